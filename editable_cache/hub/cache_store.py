"""A whole cache as a folder: its cells, and its ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from editable_cache.adapters import identify
from editable_cache.adapters.leaves import tensors_of
from editable_cache.cache import Field, Ledger, LedgeredCache, Segment, Stale
from editable_cache.cache.kept_layers import KeptLayer, KeptValue
from editable_cache.cache.ledger import TENSORS, Erratum, Isolated
from editable_cache.cache.state_layers import KeepsState, StateLayer, StateValue
from editable_cache.cache.stored import States
from editable_cache.errors import ArtifactError, CompatibilityError, LedgerError
from editable_cache.hub.facts import identity_facts, read_identity
from editable_cache.hub.folder import read_folder, write_folder
from editable_cache.hub.manifest import MANIFEST
from editable_cache.spec import compare

KIND = "editable_cache.cache"
STATES = ("states.", "mark.")
KEYS = ("segments", "fields", "stale", "chunks", "open_gap", "digests", "unfed", "mark")


def save_cache(cache: LedgeredCache, tokenizer: Any, folder: str | Path) -> None:
    """Write cells and ledger.

    Raises:
        LedgerError: without a model, whose identity has to go along.
        UnsupportedModelError: if a layer holds something else than cells and recurrent states.
    """
    if cache.model is None:
        raise LedgerError(
            "save_pretrained: expected a cache with a model, got none: nobody could tell whose cells these are."
        )
    cache.require_editable("save_pretrained")
    cache.require_same_weights("save_pretrained")
    # cloned: positions and sources may be one tensor, which safetensors refuses
    tensors = {f"ledger.{name}": getattr(cache.ledger, name).clone() for name in TENSORS}
    for layer_idx, layer in enumerate(cache.editable_layers):
        tensors |= {f"layers.{layer_idx}.{name}": tensor for name, tensor in layer.view().items()}
        tensors |= {f"pristine.{layer_idx}.{name}": tensor for name, tensor in layer.pristine.items()}
    tensors |= _state_tensors("states", cache.states())
    mark = max((slot for slot in cache.marks if slot < len(cache.ledger)), default=0)
    if mark:  # without it the last token could not run again
        tensors |= _state_tensors("mark", cache.marks[mark])
    ledger = cache.ledger
    manifest = {
        "kind": KIND,
        "version": 1,
        "model": identity_facts(identify(cache.model, tokenizer)),
        "segments": [asdict(segment) for segment in ledger.segments],
        "fields": [asdict(field) for field in ledger.fields],
        "stale": [asdict(span) for span in ledger.stale],
        "chunks": [asdict(chunk) for chunk in ledger.chunks],
        "open_gap": ledger.open_gap,
        "digests": list(ledger.digests),
        "unfed": None if cache.unfed is None else cache.unfed.tolist(),
        "mark": mark,
    }
    write_folder(folder, tensors, manifest)


def load_cache(cache: LedgeredCache, tokenizer: Any, folder: str | Path) -> None:
    """Fill the empty ``cache`` from a folder.

    Raises:
        ArtifactError: if anything is missing, damaged, or contradicts itself.
        CompatibilityError: if another model wrote it.
    """
    tensors, facts = read_folder(folder, KIND)
    reasons = compare(identify(cache.model, tokenizer), read_identity(facts.section("model")))  # type: ignore[arg-type]
    if reasons:
        raise CompatibilityError(f"{folder}: these cells were computed by another model. What differs:", reasons)
    manifest = {key: facts.take(key) for key in KEYS}
    facts.done()
    try:
        open_gap = manifest["open_gap"]
        fits = type(open_gap) is int and 0 <= open_gap < 2**62
        require(fits, folder, "open_gap", "an integer >= 0", open_gap)
        ledger = replace(
            Ledger.empty(),
            **{name: tensors[f"ledger.{name}"] for name in TENSORS},
            open_gap=open_gap,
            segments=tuple(
                Segment(**{**s, "template": tuple(map(tuple, s["template"]))}) for s in manifest["segments"]
            ),
            fields=tuple(_field(values) for values in manifest["fields"]),
            stale=tuple(Stale(**values) for values in manifest["stale"]),
            chunks=tuple(Isolated(tuple(c["ids"]), tuple(c["prefix_ids"])) for c in manifest["chunks"]),
            digests=tuple(str(digest) for digest in manifest["digests"]),
        )
        shapes = {getattr(ledger, name).shape[:2] for name in TENSORS}
        require(
            len(shapes) == 1 and ledger.ids.dim() == 2 and ledger.axes.dim() == 3,
            folder,
            "ledger",
            "tensors of one shape [batch, length]",
            shapes,
        )
        _check_spans(ledger, folder)
        unfed = None if manifest["unfed"] is None else torch.tensor(manifest["unfed"], dtype=torch.int64)
        shape = (ledger.batch,) if unfed is None else tuple(unfed.shape)
        require(shape[0] == ledger.batch and len(shape) <= 2, folder, "unfed", f"{ledger.batch} rows of ids", shape)
        for layer_idx, layer in enumerate(cache.editable_layers):
            states = _named(tensors, f"layers.{layer_idx}.")
            if len(ledger) and states:
                for name, tensor in states.items():
                    fits = tensor.dim() == 4 and tensor.shape[0] == ledger.batch and tensor.shape[-2] == len(ledger)
                    require(
                        fits,
                        folder,
                        f"layers.{layer_idx}.{name}",
                        f"[{ledger.batch}, heads, {len(ledger)}, head_dim]",
                        tensor.shape,
                    )
                layer.append({name: tensor.to(cache.model.device) for name, tensor in states.items()})  # type: ignore[arg-type,union-attr]
            layer.pristine = {key: t.clone() for key, t in _named(tensors, f"pristine.{layer_idx}.").items()}
        held = any(layer.is_initialized for layer in cache.editable_layers) or cache.state_layers
        require(bool(held) or not len(ledger), folder, "layers", f"cells of {len(ledger)} tokens", "none")
        mark = manifest["mark"]
        fits = type(mark) is int and 0 <= mark <= max(len(ledger) - 1, 0)
        require(fits, folder, "mark", f"a slot below {len(ledger)}", mark)
        tensors |= {name: tensors[name].to(cache.model.device) for name in tensors if name.startswith(STATES)}  # type: ignore[arg-type,union-attr]
        if mark:
            _load_states(cache.state_layers, tensors, "mark", ledger, folder, mark)
            cache.mark(mark)
        _load_states(cache.state_layers, tensors, "states", ledger, folder, len(ledger))
        cache.mark(len(ledger))
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArtifactError(f"{folder}: the manifest does not fit the format: {error!r}.") from error
    cache.require_same_weights("from_pretrained")
    cache.ledger, cache.unfed = ledger, unfed


def require(condition: bool, folder: str | Path, what: str, expected: str, got: Any) -> None:
    """Raise ``ArtifactError`` unless ``condition``."""
    if not condition:
        raise ArtifactError(f"{Path(folder) / MANIFEST}: {what}: expected {expected}, got {str(got)[:200]!r}.")


def _named(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key[len(prefix) :]: tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _state_tensors(prefix: str, states: States) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}.{layer_idx}.{name}": tensor
        for layer_idx, value in enumerate(states)
        for name, tensor in (_named_kept(value) if isinstance(value, KeptValue) else _named_state(value)).items()
    }


def _named_state(value: StateValue) -> dict[str, torch.Tensor]:
    return {
        f"{kind}.{index}": tensor
        for kind, held in (("conv", value.conv), ("recurrent", value.recurrent))
        for index, tensor in held.items()
        if tensor is not None
    }


def _named_kept(value: KeptValue) -> dict[str, torch.Tensor]:
    counts = {path: torch.tensor(leaf) for path, leaf in value.leaves.items() if type(leaf) is int}
    return {".".join(path): tensor for path, tensor in {**tensors_of(value.leaves), **counts}.items()}


def _load_kept(
    layer: Any, tensors: dict[str, torch.Tensor], prefix: str, length: int, batch: int, folder: str | Path
) -> None:
    """Fill a layer that is kept as a whole: its tensors, and its counters."""
    leaves = dict(layer.empty.leaves)
    names = {".".join(path): path for path in leaves}
    for name, tensor in tensors.items():
        require(name in names, folder, f"{prefix}{name}", f"one of {sorted(names)}", "another")
        path = names[name]
        count = type(leaves[path]) is int
        fits = tensor.dim() == 0 and tensor.dtype == torch.int64 if count else tensor.dim() > 1
        fits = fits and ((int(tensor) >= 0 and leaves[path] in (0, int(tensor))) if count else tensor.shape[0] == batch)
        require(fits, folder, f"{prefix}{name}", "a number" if count else f"[{batch}, ...]", list(tensor.shape))
        leaves[path] = int(tensor) if count else tensor
    found = {path: leaves[path] for path in leaves if path[0] in ("keys", "values")}
    require(found.get(("keys",)) is not None, folder, prefix, "recent keys", None)
    if found.get(("values",)) is None:
        leaves["values",] = leaves["keys",]
    layer.lazy_initialization(leaves["keys",], leaves["values",])
    layer.set_state_value(KeptValue({**leaves, ("is_initialized",): True}))
    held = layer.get_seq_length()
    require(held == length, folder, prefix, f"the state after {length} tokens", held)


def _load_states(
    layers: Sequence[KeepsState],
    tensors: dict[str, torch.Tensor],
    prefix: str,
    ledger: Ledger,
    folder: str | Path,
    length: int,
) -> None:
    for layer_idx, layer in enumerate(layers):
        layer.forget_state()
        if isinstance(layer, KeptLayer):
            given = _named(tensors, f"{prefix}.{layer_idx}.")
            if length:
                _load_kept(layer, given, f"{prefix}.{layer_idx}.", length, ledger.batch, folder)
            continue
        assert isinstance(layer, StateLayer)
        for index in range(layer.number_of_states if len(ledger) else 0):
            name = f"{prefix}.{layer_idx}"
            conv, recurrent = tensors.get(f"{name}.conv.{index}"), tensors.get(f"{name}.recurrent.{index}")
            for tensor in (conv, recurrent):
                fits = tensor is None or (tensor.dim() > 1 and tensor.shape[0] == ledger.batch)
                require(fits, folder, name, f"[{ledger.batch}, ...]", None if tensor is None else tensor.shape)
            require(conv is not None or recurrent is not None, folder, name, "a state", None)
            if conv is not None:
                layer.update_conv_state(conv, index)
            if recurrent is not None:
                layer.update_recurrent_state(recurrent, index)
            layer.has_previous_state[index] = True


def _check_spans(ledger: Ledger, folder: str | Path) -> None:
    borders = [0, *(border for segment in ledger.segments for border in segment.span), len(ledger)]
    require(
        borders[::2] == borders[1::2] and all(segment.start < segment.stop for segment in ledger.segments),
        folder,
        "segments",
        f"spans that cover {len(ledger)} slots without gaps",
        [segment.span for segment in ledger.segments],
    )
    spans = [span for field in ledger.fields for span in field.spans] + [(s.start, s.stop) for s in ledger.stale]
    wrong = [span for span in spans if not 0 <= span[0] < span[1] <= len(ledger)]
    require(not wrong, folder, "fields and stale", f"spans inside of {len(ledger)} slots", wrong)
    names = {segment.name for segment in ledger.segments}
    lost = [field.name for field in ledger.fields if field.segment not in names]
    require(not lost, folder, "fields", f"segments of {sorted(names)}", lost)
    group = int(ledger.groups.max()) if ledger.groups.numel() else 0
    require(0 <= group <= len(ledger.chunks), folder, "chunks", f"{group} isolated chunks", len(ledger.chunks))
    image = int(ledger.images.max()) if ledger.images.numel() else 0
    require(0 <= image <= len(ledger.digests), folder, "digests", f"{image} images", len(ledger.digests))


def _field(values: dict[str, Any]) -> Field:
    errata = tuple(Erratum(**erratum) for erratum in values["errata"])
    spans = tuple((int(start), int(stop)) for start, stop in values["spans"])
    return Field(values["name"], values["value"], values["segment"], spans, errata)
