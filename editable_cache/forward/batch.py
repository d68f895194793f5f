"""Batches of caches of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from editable_cache.adapters import measured
from editable_cache.cache import Ledger, LedgeredCache, Segment
from editable_cache.cache.axes import join_axes, renumbered
from editable_cache.cache.layer import EditableLayer
from editable_cache.cache.ledger import TENSORS, Isolated
from editable_cache.cache.stored import States
from editable_cache.errors import SpanError, UnsupportedModelError
from editable_cache.forward.checks import check_slot_padding


@torch.no_grad()
def stack(into: LedgeredCache, caches: Sequence[LedgeredCache]) -> None:
    """Fill the empty cache ``into`` with the rows of ``caches``, shorter ones padded on the left with masked slots.

    Segments and fields of the single caches do not fit a batch: the stacked cache has one segment.

    Raises:
        SpanError: if a cache is empty or has another model.
    """
    if not caches or any(cache.model is not into.model for cache in caches):
        raise SpanError("stack: expected at least one cache, all of the same model.")
    for cache in caches:
        cache.require_idle("stack")
        cache.adopt()
        cache.require_editable("stack")
        cache.require_same_weights("stack")
        if not len(cache.ledger):
            raise SpanError("stack: expected caches with at least one token each, got an empty one.")
    waiting = {0 if cache.unfed is None else cache.unfed.shape[1] for cache in caches}
    if len(waiting) > 1:
        raise SpanError(
            "stack: expected every cache or none to hold back the last token of a generate, got some of both; call "
            "append('') on those that do, which feeds it."
        )
    into.unfed = torch.cat([cache.unfed for cache in caches if cache.unfed is not None]) if max(waiting) else None
    gaps = {cache.ledger.open_gap for cache in caches}
    if len(gaps) > 1:
        raise SpanError(
            f"stack: expected the same gap left open at the end of every cache, got {sorted(gaps)} positions."
        )
    longest = max(len(cache.ledger) for cache in caches)
    if any(len(cache.ledger) < longest for cache in caches):
        _require_padding(into, "stack")
    into.computed_by = caches[0].computed_by
    for layer_idx, layer in enumerate(into.editable_layers):
        layers = [cache.editable_layers[layer_idx] for cache in caches]
        if not layers[0].is_initialized:
            continue
        layer.append(_joined([one.view() for one in layers], longest))
        if any(one.pristine for one in layers):
            names = {name for one in layers for name in one.pristine}
            layer.pristine = _joined([{name: one.full_pristine(name) for name in names} for one in layers], longest)
    into.set_states(_joined_states([cache.states() for cache in caches]))
    backs = [{len(cache.ledger) - slot: states for slot, states in cache.marks.items()} for cache in caches]
    for back in set.intersection(*map(set, backs)):
        into.marks[longest - back] = _joined_states([one[back] for one in backs])
    chunks: list[Isolated] = []
    digests: list[str] = []
    columns: dict[str, list[Tensor]] = {name: [] for name in TENSORS}
    for cache in caches:
        ledger = replace(
            cache.ledger,
            groups=renumbered(cache.ledger.groups, len(chunks)),
            images=renumbered(cache.ledger.images, len(digests)),
        )
        chunks.extend(ledger.chunks)
        digests.extend(ledger.digests)
        for name in TENSORS:
            column = getattr(ledger, name)
            padding = column.new_zeros((ledger.batch, longest - len(ledger), *column.shape[2:]))
            columns[name].append(torch.cat((padding, column), dim=1))
    stale = tuple(
        replace(s, start=s.start + longest - len(cache.ledger), stop=s.stop + longest - len(cache.ledger))
        for cache in caches
        for s in cache.ledger.stale
    )
    tensors = {
        name: join_axes(column, dim=0) if name == "axes" else torch.cat(column) for name, column in columns.items()
    }
    segments = (Segment("stacked", 0, longest, "prefilled", note=f"{len(caches)} caches"),)
    into.ledger = replace(
        Ledger.empty(),
        **tensors,  # type: ignore[arg-type]
        segments=segments,
        stale=tuple(dict.fromkeys(stale)),
        chunks=tuple(chunks),
        digests=tuple(digests),
        open_gap=gaps.pop(),
    )


@torch.no_grad()
def take_row(into: LedgeredCache, cache: LedgeredCache, row: int) -> None:
    """Fill the empty cache ``into`` with one row of ``cache``, without its padding."""
    ledger = cache.ledger.rows(torch.tensor([row]))
    into.unfed = None if cache.unfed is None else cache.unfed[row : row + 1]
    into.computed_by = cache.computed_by
    kept = ledger.valid[0].nonzero()[:, 0]
    if len(kept) < len(ledger):
        _require_padding(cache, "unstack")
        if cache.kept_layers:
            raise UnsupportedModelError(
                "unstack: the padding of this row is folded into the entries of its compressed layers, so that it "
                "can't be taken out. Feed each row without padding into a cache of its own."
            )
    for mine, theirs in zip(into.editable_layers, cache.editable_layers, strict=True):
        if theirs.is_initialized:
            _copy_slots(mine, theirs, row, kept)
    _take_states(into, cache, row, padding=len(ledger) - len(kept))
    tensors = {name: getattr(ledger, name)[:, kept] for name in TENSORS}
    if len(kept) == len(ledger):
        into.ledger = ledger
        return
    before = torch.cat((torch.zeros(1, dtype=torch.int64), ledger.valid[0].long().cumsum(dim=0))).tolist()
    stale = tuple(replace(s, start=before[s.start], stop=before[s.stop]) for s in ledger.stale)
    segment = Segment("row", 0, len(kept), "prefilled", note=f"row {row} of a batch")
    into.ledger = replace(
        Ledger.empty(),
        **tensors,
        segments=(segment,),
        stale=tuple(s for s in stale if s.start < s.stop),
        chunks=ledger.chunks,
        digests=ledger.digests,
        open_gap=ledger.open_gap,
    )


def _require_padding(cache: LedgeredCache, operation: str) -> None:
    """Refuse rows of different lengths where the slot of a token is its position.

    Raises:
        UnsupportedModelError: with what to do.
    """
    if cache.model is not None and not cache.model.training:
        check_slot_padding(measured(cache.model), Ledger.empty(), operation)


def _take_states(into: LedgeredCache, cache: LedgeredCache, row: int, *, padding: int) -> None:
    """Give ``into`` the recurrent states of one row, and earlier ones behind all of its padding."""
    rows, valid = torch.tensor([row]), cache.ledger.valid[row]
    into.set_states(tuple(value.rows(rows) for value in cache.states()))
    into.marks = {
        slot - padding: tuple(value.rows(rows) for value in states)
        for slot, states in cache.marks.items()
        if slot > padding and bool(valid[slot:].all())
    }


def _joined_states(rows: Sequence[States]) -> States:
    """The states of all rows."""
    return tuple(layer[0].joined(layer) for layer in zip(*rows, strict=True))


def _copy_slots(mine: EditableLayer, theirs: EditableLayer, row: int, kept: Tensor) -> None:
    slots = kept.to(theirs.device)
    mine.append({name: tensor[row : row + 1].index_select(-2, slots) for name, tensor in theirs.view().items()})
    mine.pristine = {
        name: theirs.full_pristine(name)[row : row + 1].index_select(-2, slots) for name in theirs.pristine
    }


def _joined(rows: Sequence[dict[str, Tensor]], longest: int) -> dict[str, Tensor]:
    return {
        name: torch.cat([torch.nn.functional.pad(row[name], (0, 0, longest - row[name].shape[-2], 0)) for row in rows])
        for name in rows[0]
    }
