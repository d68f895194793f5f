"""A whole cache as a folder: its cells, and its ledger."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from editable_cache.adapters import identify
from editable_cache.cache import Field, Ledger, LedgeredCache, Segment, Stale
from editable_cache.cache.ledger import TENSORS, Erratum, Isolated
from editable_cache.errors import ArtifactError, CompatibilityError, LedgerError
from editable_cache.hub.folder import read_folder, require, write_folder
from editable_cache.spec import ModelIdentity, compare

KIND = "editable_cache.cache"


def save_cache(cache: LedgeredCache, tokenizer: Any, folder: str | Path) -> None:
    """Write cells and ledger.

    Raises:
        LedgerError: without a model, whose identity has to go along.
        UnsupportedModelError: if a layer holds state that is not per-token cells.
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
    ledger = cache.ledger
    manifest = {
        "kind": KIND,
        "version": 1,
        "model": identify(cache.model, tokenizer).to_dict(),
        "segments": [asdict(segment) for segment in ledger.segments],
        "fields": [asdict(field) for field in ledger.fields],
        "stale": [asdict(span) for span in ledger.stale],
        "chunks": [asdict(chunk) for chunk in ledger.chunks],
        "open_gap": ledger.open_gap,
        "unfed": None if cache.unfed is None else cache.unfed.tolist(),
    }
    write_folder(folder, tensors, manifest)


def load_cache(cache: LedgeredCache, tokenizer: Any, folder: str | Path) -> None:
    """Fill the empty ``cache`` from a folder.

    Raises:
        ArtifactError: if anything is missing, damaged, or contradicts itself.
        CompatibilityError: if another model wrote it.
    """
    tensors, manifest = read_folder(folder, KIND)
    names = {field.name for field in fields(ModelIdentity)}
    model = manifest.get("model")
    require(isinstance(model, dict) and set(model) == names, folder, "model", f"texts {sorted(names)}", model)
    reasons = compare(identify(cache.model, tokenizer), ModelIdentity(**model))  # type: ignore[arg-type]
    if reasons:
        raise CompatibilityError(f"{folder}: these cells were computed by another model. What differs:", reasons)
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
        )
        shapes = {getattr(ledger, name).shape for name in TENSORS}
        require(
            len(shapes) == 1 and ledger.ids.dim() == 2,
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
            if len(ledger):
                states = {name: tensors[f"layers.{layer_idx}.{name}"] for name in ("keys", "values")}
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
            prefix = f"pristine.{layer_idx}."
            layer.pristine = {key[len(prefix) :]: t.clone() for key, t in tensors.items() if key.startswith(prefix)}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ArtifactError(f"{folder}: the manifest does not fit the format: {error!r}.") from error
    cache.require_same_weights("from_pretrained")
    cache.ledger, cache.unfed = ledger, unfed


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


def _field(values: dict[str, Any]) -> Field:
    errata = tuple(Erratum(**erratum) for erratum in values["errata"])
    spans = tuple((int(start), int(stop)) for start, stop in values["spans"])
    return Field(values["name"], values["value"], values["segment"], spans, errata)
