"""A whole cache as a folder: its cells, and its ledger."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from editable_cache.adapters import host, identify, measured
from editable_cache.adapters.held import Shape, cell_shapes, entry_shapes, state_shapes
from editable_cache.adapters.leaves import tensors_of
from editable_cache.cache import Ledger, LedgeredCache
from editable_cache.cache.kept_layers import KeptLayer, KeptValue
from editable_cache.cache.state_layers import KeepsState, StateLayer, StateValue
from editable_cache.cache.stored import States
from editable_cache.errors import CompatibilityError, LedgerError
from editable_cache.hub.facts import identity_facts, read_identity
from editable_cache.hub.folder import read_folder, write_folder
from editable_cache.hub.ledger_facts import ledger_facts, ledger_tensors, read_ledger
from editable_cache.hub.schema import MOST_NUMBER, Section
from editable_cache.spec import compare

KIND = "editable_cache.cache"


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
    tensors = ledger_tensors(cache.ledger)
    for layer_idx, layer in enumerate(cache.editable_layers):
        tensors |= {f"layers.{layer_idx}.{name}": tensor for name, tensor in layer.view().items()}
        tensors |= {f"pristine.{layer_idx}.{name}": tensor for name, tensor in layer.pristine.items()}
    tensors |= _state_tensors("states", cache.states())
    mark = max((slot for slot in cache.marks if slot < len(cache.ledger)), default=0)
    if mark:  # without it the last token could not run again
        tensors |= _state_tensors("mark", cache.marks[mark])
    manifest = {
        "kind": KIND,
        "version": 1,
        "model": identity_facts(identify(cache.model, tokenizer)),
        **ledger_facts(cache.ledger),
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
    model = cache.model
    assert model is not None
    reasons = compare(identify(model, tokenizer), read_identity(facts.section("model")))
    if reasons:
        raise CompatibilityError(f"{folder}: these cells were computed by another model. What differs:", reasons)
    ledger = read_ledger(facts, tensors)
    unfed, mark = _unfed(facts, ledger.batch), facts.integer("mark", 0, max(len(ledger) - 1, 0))
    facts.done()
    _check_ids(model, ledger, unfed, facts)
    shapes = cell_shapes(model)
    for layer_idx, layer in enumerate(cache.editable_layers):
        cells = _cells(tensors, f"layers.{layer_idx}", shapes[layer_idx], ledger, facts)
        if cells:
            layer.append({name: tensor.to(host.device_of(model)) for name, tensor in cells.items()})
        layer.pristine = _pristine(tensors, f"pristine.{layer_idx}", cells, facts)
    if mark:
        _load_states(cache, tensors, "mark", ledger.batch, mark, facts)
        cache.mark(mark)
    _load_states(cache, tensors, "states", ledger.batch, len(ledger), facts)
    cache.mark(len(ledger))
    facts.require(not tensors, "tensors", "no others", sorted(tensors))
    cache.require_same_weights("from_pretrained")
    cache.ledger, cache.unfed = ledger, unfed


def _unfed(facts: Section, batch: int) -> Tensor | None:
    rows = facts.take("unfed")
    if rows is None:
        return None
    fine = isinstance(rows, list) and len(rows) == batch
    fine = fine and all(isinstance(row, list) and 0 < len(row) == len(rows[0]) for row in rows)
    fine = fine and all(type(token) is int and 0 <= token < MOST_NUMBER for row in rows for token in row)
    facts.require(fine, "unfed", f"null, or {batch} rows of ids", rows)
    return torch.tensor(rows, dtype=torch.int64)


def _check_ids(model: nn.Module, ledger: Ledger, unfed: Tensor | None, facts: Section) -> None:
    """Refuse ids that the model has no embedding for, and positions on axes that it does not have."""
    size = host.num_embeddings(model)
    chunks = [torch.tensor((*chunk.ids, *chunk.prefix_ids), dtype=torch.int64) for chunk in ledger.chunks]
    text = ledger.ids[ledger.images == 0]
    for ids in (text, *([] if ledger.digests else chunks), *([] if unfed is None else [unfed])):
        facts.require(not ids.numel() or int(ids.max()) < size, "ids", f"ids below {size}", "others")
    axes = [max(rotary.axes, default=0) for rotary in measured(model).rotaries() if rotary.axes is not None]
    facts.require(
        ledger.axes.shape[2] in (0, max(axes, default=0)), "ledger.axes", "those of the model", ledger.axes.shape[2]
    )


def _cells(
    tensors: dict[str, Tensor], prefix: str, shapes: Mapping[str, Shape], ledger: Ledger, facts: Section
) -> dict[str, Tensor]:
    """The cells of one holder: all that the model stores there, or none where the cache is empty."""
    found = _taken(tensors, f"{prefix}.")
    if not len(ledger) and not found:
        return {}
    facts.require(found.keys() == shapes.keys(), prefix, f"{sorted(shapes)}", sorted(found))
    for name, tensor in found.items():
        _, num_heads, _, head_dim = shapes[name].shape
        wanted = Shape(shapes[name].dtype, (ledger.batch, num_heads, len(ledger), head_dim))
        _require_shape(facts, f"{prefix}.{name}", wanted, tensor)
    return found


def _pristine(
    tensors: dict[str, Tensor], prefix: str, cells: Mapping[str, Tensor], facts: Section
) -> dict[str, Tensor]:
    found = _taken(tensors, f"{prefix}.")
    for name, tensor in found.items():
        facts.require(name in cells, f"{prefix}.{name}", f"one of {sorted(cells)}", name)
        count = tensor.shape[-2] if tensor.dim() == 4 else 0
        cut = cells[name][..., :count, :]
        _require_shape(facts, f"{prefix}.{name}", Shape(cut.dtype, tuple(cut.shape)), tensor)
    return {name: tensor.to(cells[name].device).clone() for name, tensor in found.items()}


def _require_shape(facts: Section, what: str, wanted: Shape, tensor: Tensor) -> None:
    have = Shape(tensor.dtype, tuple(tensor.shape))
    facts.require(have == wanted, what, f"{wanted.dtype} {list(wanted.shape)}", f"{have.dtype} {list(have.shape)}")


def _taken(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of their names; they are taken out."""
    return {key[len(prefix) :]: tensors.pop(key) for key in sorted(tensors) if key.startswith(prefix)}


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


def _load_states(
    cache: LedgeredCache, tensors: dict[str, Tensor], prefix: str, batch: int, length: int, facts: Section
) -> None:
    model = cache.model
    assert model is not None
    compressed, states = measured(model).compressed, state_shapes(model)
    kept = {} if compressed is None else entry_shapes(model, compressed, length, behind=False)
    places = [idx for idx, layer in enumerate(cache.layers) if isinstance(layer, KeepsState)]
    for number, (layer_idx, layer) in enumerate(zip(places, cache.state_layers, strict=True)):
        layer.forget_state()
        where = f"{prefix}.{number}"
        given = {name: t.to(host.device_of(model)) for name, t in _taken(tensors, f"{where}.").items()}
        if not length:
            facts.require(not given, where, "nothing of no tokens", sorted(given))
        elif isinstance(layer, KeptLayer):
            shapes = {".".join(path): shape for path, shape in kept[layer_idx].items()}
            _load_kept(layer, given, shapes, where, length, batch, facts)
        else:
            assert isinstance(layer, StateLayer)
            _load_state(layer, given, states[layer_idx], where, batch, facts)


def _load_kept(
    layer: Any,
    given: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
    where: str,
    length: int,
    batch: int,
    facts: Section,
) -> None:
    """Fill a layer that is kept as a whole: its tensors, and its counters."""
    leaves = dict(layer.empty.leaves)
    counters = {".".join(path): path for path, leaf in leaves.items() if type(leaf) is int}
    shapes = {"values": shapes["keys"], **shapes} if "values" in given else shapes
    facts.require(given.keys() == shapes.keys() | counters.keys(), where, f"{sorted(shapes)}", sorted(given))
    for name, shape in shapes.items():
        _require_shape(facts, f"{where}.{name}", Shape(shape.dtype, (batch, *shape.shape[1:])), given[name])
        leaves[tuple(name.split("."))] = given[name]
    for name, path in counters.items():
        count = given[name]
        fits = count.dim() == 0 and count.dtype == torch.int64 and 0 <= int(count) <= MOST_NUMBER
        fits = fits and leaves[path] in (0, int(count))
        facts.require(fits, f"{where}.{name}", "a count", list(count.shape))
        leaves[path] = int(count)
    leaves["values",] = given.get("values", given["keys"])
    layer.lazy_initialization(leaves["keys",], leaves["values",])
    layer.set_state_value(KeptValue({**leaves, ("is_initialized",): True}))
    entries = {
        (host.COMPRESSED_COUNTS, path[1]): leaf.shape[1]
        for path, leaf in leaves.items()
        if path[0] == host.COMPRESSED_ENTRIES and isinstance(leaf, Tensor)
    }
    wrong = [path for path, count in entries.items() if leaves[path] != count]
    held = layer.get_seq_length()
    facts.require(held == length and not wrong, where, f"the state after {length} tokens", f"one after {held}")


def _load_state(
    layer: StateLayer, given: Mapping[str, Tensor], shapes: Mapping[str, Shape], where: str, batch: int, facts: Section
) -> None:
    facts.require(given.keys() == shapes.keys(), where, f"{sorted(shapes)}", sorted(given))
    for name, shape in shapes.items():
        _require_shape(facts, f"{where}.{name}", Shape(shape.dtype, (batch, *shape.shape[1:])), given[name])
        kind, index = name.split(".")
        if kind == "conv":
            layer.update_conv_state(given[name], int(index))
        else:
            layer.update_recurrent_state(given[name], int(index))
        layer.has_previous_state[int(index)] = True
