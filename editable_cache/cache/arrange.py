"""Give the slots of a cache a new order: keep, paste, leave blank; keys are rotated to their new positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from editable_cache.cache.axes import join_axes, renumbered
from editable_cache.cache.isolated import isolation
from editable_cache.cache.layer import EditableLayer
from editable_cache.cache.ledger import TENSORS, Field, Ledger, Segment, Stale
from editable_cache.cache.ledgered import LedgeredCache
from editable_cache.cache.pieces import Keep, Paste, Piece, move_spans, total_length, untouched_prefix
from editable_cache.chunk import KVChunk
from editable_cache.errors import SpanError
from editable_cache.ops import LOW_PRECISION, Rotation, rotate_into, rotation
from editable_cache.spec import ModelSpec, RotarySpec, TensorSpec


class Placed(NamedTuple):
    """A piece and the segment that its new tokens belong to (None for kept ones, which bring theirs along)."""

    piece: Piece
    segment: Segment | None = None


def rearrange(cache: LedgeredCache, spec: ModelSpec | None, placed: Sequence[Placed], positions: Tensor) -> None:
    """Bring the slots of ``cache`` into the order of ``placed`` at ``positions``; call inside an operation.

    Contents of cells do not change; keys are rotated from where they stand to their new position. Blank cells hold
    garbage until they are recomputed. Pieces before the first one that moves are not touched.

    Args:
        cache: changed, layers and ledger.
        spec: how the tensors rotate; may be None if no kept or pasted token changes its position.
        placed: the new order.
        positions: int64 ``[batch, new_length]``.
    """
    pieces = [item.piece for item in placed]
    if spec is not None and _is_low_precision(cache) and not cache.state_layers:
        _settle_if_lost(cache, spec)
    require_whole_images(cache.ledger, pieces)
    ledger = _arranged_ledger(cache.ledger, placed, positions)
    if bool((positions[ledger.valid] < 0).any()):
        raise SpanError(
            f"expected positions >= 0, got {int(positions[ledger.valid].min())}: tokens that follow stand before the "
            "span that goes. Reposition them first, or remove with close_gap=False."
        )
    start = untouched_prefix(pieces)
    still = (cache.ledger.positions[:, :start] == positions[:, :start]).all(dim=0)
    start = int(still.long().cumprod(dim=0).sum())
    if cache.state_layers:  # a recurrent state can't be moved: everything from here on is computed again
        cache.touch(start)
        cache.ledger = replace(ledger, sources=ledger.positions)
        return
    sources = _where_from(cache.ledger, pieces, pristine=_is_low_precision(cache))
    device = next((layer.device for layer in cache.editable_layers if layer.is_initialized), None)
    ahead = ledger.axes[:, start:]
    turns = {} if spec is None else _turns(spec, sources[:, start:], positions[:, start:], device, ahead)
    low = _is_low_precision(cache)
    distance = positions - _where_from(cache.ledger, pieces, pristine=False)
    for index, layer in enumerate(cache.editable_layers):
        facts = {} if spec is None else {tensor.name: tensor for tensor in spec.layers[index].tensors}
        _arrange_layer(layer, index, pieces, start, facts, turns, distance, low=low)
    cache.ledger = ledger if low else replace(ledger, sources=ledger.positions)


def _settle_if_lost(cache: LedgeredCache, spec: ModelSpec) -> None:
    """Take the stored keys of every layer as pristine where one of them has lost its own (assigned by hand)."""
    rotating = [any(tensor.rotary is not None for tensor in layer.tensors) for layer in spec.layers]
    layers = [layer for layer, turns in zip(cache.editable_layers, rotating, strict=True) if turns]
    if not torch.equal(cache.ledger.sources, cache.ledger.positions) and not all(layer.pristine for layer in layers):
        for layer in layers:
            layer.pristine = {}
        cache.ledger = replace(cache.ledger, sources=cache.ledger.positions)


def extend_with_chunk(
    cache: LedgeredCache,
    spec: ModelSpec,
    chunk: KVChunk,
    first: int,
    positions: Tensor,
    segment: Segment,
    *,
    stop: int | None = None,
) -> None:
    """Write tokens ``[first, stop)`` of a chunk behind the last slot; call inside an operation.

    The keys are rotated straight into their place; nothing is copied twice.

    Args:
        positions: int64 ``[batch, stop - first]``, where the tokens go.
        stop: the end of the chunk by default.
    """
    stop = len(chunk) if stop is None else stop
    batch, count = cache.ledger.batch, stop - first
    source = chunk.position_ids[None, first:stop].expand(batch, -1)
    axes = _axes_of(chunk, batch)[:, first:stop]
    states = [{name: t[..., first:stop, :] for name, t in layer.items()} for layer in chunk.layers]
    turns = _turns(spec, source, positions, _device(cache, states), axes)
    for layer, cells, facts in zip(cache.editable_layers, states, spec.layers, strict=True):
        if not cells:
            continue
        layer.prepare(cells, batch)
        slots = layer.claim(count)
        for tensor in facts.tensors:
            turn = None if tensor.rotary is None else turns.get(tensor.rotary)
            _move(slots[tensor.name], cells[tensor.name], turn)
            if tensor.counter:
                _count_on(slots[tensor.name], positions - source)
    low = _is_low_precision(cache)
    if low and turns:
        _remember_pristine(cache, spec, states)
    ids = chunk.token_ids[None, first:stop].expand(batch, -1)
    alone = isolation(chunk, first, stop, len(cache.ledger.chunks))
    ledger = replace(cache.ledger, chunks=(*cache.ledger.chunks, *alone.chunks))
    cache.ledger = ledger.extended(
        ids,
        positions,
        torch.ones(ids.shape, dtype=torch.bool),
        segment,
        sources=source if low else positions,
        groups=alone.groups.expand(ids.shape),
        offsets=alone.offsets.expand(ids.shape),
        axes=axes,
        images=chunk.image_numbers[None, first:stop].expand(batch, -1),
        digests=[image.digest for image in chunk.images],
    )


def _axes_of(chunk: KVChunk, batch: int) -> Tensor:
    axes = chunk.position_ids.new_zeros((len(chunk), 0)) if chunk.axes is None else chunk.axes
    return axes[None].expand(batch, -1, -1)


def _device(cache: LedgeredCache, states: Sequence[Mapping[str, Tensor]]) -> torch.device:
    held = (layer.device for layer in cache.editable_layers if layer.is_initialized)
    given = (tensor.device for cells in states for tensor in cells.values())
    return next(held, None) or next(given, torch.device("cpu"))


def _remember_pristine(cache: LedgeredCache, spec: ModelSpec, chunk_layers: Sequence[Mapping[str, Tensor]]) -> None:
    for layer, states, facts in zip(cache.editable_layers, chunk_layers, spec.layers, strict=True):
        if not states:
            continue
        count = next(iter(states.values())).shape[-2]
        kept = {}
        for tensor in facts.tensors:
            if tensor.rotary is not None:
                before = layer.full_pristine(tensor.name)[..., : layer.length - count, :]
                fresh = states[tensor.name].to(before.device).expand(before.shape[0], -1, -1, -1)
                kept[tensor.name] = torch.cat((before, fresh), dim=-2)
        layer.pristine = kept


def _arrange_layer(
    layer: EditableLayer,
    index: int,
    pieces: Sequence[Piece],
    start: int,
    facts: Mapping[str, TensorSpec],
    turns: Mapping[RotarySpec, Rotation],
    distance: Tensor,
    *,
    low: bool,
) -> None:
    total = total_length(pieces)
    stored = layer.view()
    if not stored:
        pasted = next((piece.chunk.layers[index] for piece in pieces if isinstance(piece, Paste)), None)
        if not pasted:
            return  # this layer stores nothing
        layer.prepare(pasted, 1)
        stored = layer.view()
    tail = {name: t.new_empty((*t.shape[:2], total - start, t.shape[-1])) for name, t in stored.items()}
    pristine = {}
    for name, out in tail.items():
        rotary = facts[name].rotary if name in facts else None
        keep_pristine = low and rotary is not None
        kept = layer.full_pristine(name) if keep_pristine else stored[name]
        if keep_pristine:
            pristine[name] = kept.new_empty((*kept.shape[:2], total, kept.shape[-1]))
            pristine[name][..., :start, :] = kept[..., :start, :]
        turn = None if rotary is None else turns.get(rotary)
        for low_slot, high_slot, cells in _cells(pieces, index, name, kept, start):
            low_out, high_out = low_slot - start, high_slot - start
            _move(out[..., low_out:high_out, :], cells, None if turn is None else turn.slots(low_out, high_out))
            if keep_pristine:
                pristine[name][..., low_slot:high_slot, :] = cells
        if name in facts and facts[name].counter:
            _count_on(out, distance[:, start:])
    layer.replace_tail(start, tail, pristine)


def _cells(pieces: Sequence[Piece], index: int, name: str, kept: Tensor, start: int) -> list[tuple[int, int, Tensor]]:
    """New slots ``[low, high)`` from ``start`` on and the cells that go there; blank pieces are left out."""
    found = []
    offset = 0
    for piece in pieces:
        low, high = max(offset, start), offset + len(piece)
        if low < high and isinstance(piece, Keep):
            found.append((low, high, kept[..., piece.start + low - offset : piece.stop, :]))
        elif low < high and isinstance(piece, Paste):
            found.append((low, high, piece.chunk.layers[index][name][..., low - offset :, :]))
        offset += len(piece)
    return found


def _move(out: Tensor, states: Tensor, turn: Rotation | None) -> None:
    if states.device != out.device:
        states = states.to(out.device)
    if turn is None:
        out.copy_(states)
    else:
        rotate_into(out, states, turn.to(out.device))


def _count_on(out: Tensor, distance: Tensor) -> None:
    """Add ``distance`` ``[batch, num_tokens]`` to positions that are stored as cells."""
    out += distance[:, None, :, None].to(out.device, out.dtype)


def _turns(
    spec: ModelSpec, source: Tensor, target: Tensor, device: torch.device | None, axes: Tensor
) -> dict[RotarySpec, Rotation]:
    if torch.equal(source, target):
        return {}
    return {rotary: rotation(rotary, source, target, device, axes=axes) for rotary in spec.rotaries()}


def _where_from(ledger: Ledger, pieces: Sequence[Piece], *, pristine: bool) -> Tensor:
    """Positions at which the cells of the new order stand before they are turned, ``[batch, new_length]``.

    Blank cells take 0; what they hold does not matter.
    """
    origin = ledger.sources if pristine else ledger.positions
    parts = []
    for piece in pieces:
        if isinstance(piece, Keep):
            parts.append(origin[:, piece.start : piece.stop])
        elif isinstance(piece, Paste):
            parts.append(piece.chunk.position_ids[None].expand(ledger.batch, -1))
        else:
            parts.append(torch.zeros((ledger.batch, len(piece)), dtype=torch.int64))
    return torch.cat(parts, dim=1) if parts else origin[:, :0]


def _is_low_precision(cache: LedgeredCache) -> bool:
    return cache.dtype in LOW_PRECISION


def _arranged_ledger(ledger: Ledger, placed: Sequence[Placed], positions: Tensor) -> Ledger:
    pieces = [item.piece for item in placed]
    columns: dict[str, list[Tensor]] = {name: [] for name in TENSORS if name != "positions"}
    chunks, digests, offset = list(ledger.chunks), list(ledger.digests), 0
    for piece in pieces:
        where = slice(offset, offset + len(piece))
        if isinstance(piece, Keep):
            new = {name: getattr(ledger, name)[:, piece.start : piece.stop] for name in columns}
        else:
            ids = piece.chunk.token_ids[None] if isinstance(piece, Paste) else piece.token_ids
            ids = ids.expand(ledger.batch, -1)
            source = (
                piece.chunk.position_ids[None].expand(ids.shape) if isinstance(piece, Paste) else positions[:, where]
            )
            new = {
                "ids": ids,
                "sources": source,
                "valid": torch.ones(ids.shape, dtype=torch.bool),
                "groups": torch.zeros_like(ids),
                "offsets": torch.zeros_like(ids),
                "axes": ids.new_zeros((*ids.shape, 0)),
                "images": torch.zeros_like(ids),
            }
            if isinstance(piece, Paste):
                alone = isolation(piece.chunk, 0, len(piece), len(chunks))
                chunks += alone.chunks
                new["groups"], new["offsets"] = alone.groups.expand(ids.shape), alone.offsets.expand(ids.shape)
                new["axes"] = _axes_of(piece.chunk, ledger.batch)
                new["images"] = renumbered(piece.chunk.image_numbers, len(digests)).expand(ids.shape)
                digests += [image.digest for image in piece.chunk.images]
        for name, column in columns.items():
            column.append(new[name])
        offset += len(piece)
    tensors = {
        name: join_axes(column) if name == "axes" else torch.cat(column, dim=1)
        for name, column in columns.items()
        if column
    }
    stale = tuple(
        Stale(start, stop, old.cause) for old in ledger.stale for start, stop in move_spans(pieces, old.start, old.stop)
    )
    arranged = replace(
        ledger,
        **tensors,  # type: ignore[arg-type]
        positions=positions,
        segments=_arranged_segments(ledger, placed),
        stale=stale,
        chunks=tuple(chunks),
        digests=tuple(digests),
    )
    return arranged.with_fields(arranged_fields(ledger.fields, pieces))


def _arranged_segments(ledger: Ledger, placed: Sequence[Placed]) -> tuple[Segment, ...]:
    runs: list[tuple[Segment, int]] = []
    kept: dict[str, list[tuple[int, int]]] = {}
    renewed = {segment.name for _, segment in placed if segment is not None}
    for piece, segment in placed:
        if isinstance(piece, Keep):
            for old in ledger.segments:
                start, stop = max(piece.start, old.start), min(piece.stop, old.stop)
                if start < stop:
                    runs.append((old, stop - start))
                    kept.setdefault(old.name, []).append((start, stop))
        elif len(piece) and segment is not None:
            runs.append((segment, len(piece)))
    segments: list[Segment] = []
    offset, last = 0, None
    for label, count in runs:
        if last is not None and label.name == last.name:
            segments[-1] = replace(segments[-1], stop=offset + count)
        else:
            segments.append(replace(label, start=offset, stop=offset + count))
        offset, last = offset + count, label
    told = {old.name for old in ledger.segments if _is_whole(old, kept.get(old.name, []))} | renewed
    return tuple(_with_unique_names([s if s.name in told else replace(s, template=()) for s in segments]))


def _is_whole(segment: Segment, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether ascending runs keep every token of a segment in its order, so that its template still tells its text."""
    return sum(stop - start for start, stop in spans) == len(segment) and list(spans) == sorted(spans)


def _with_unique_names(segments: Sequence[Segment]) -> list[Segment]:
    """A segment that was cut keeps its name on the first part; no part has the whole template any more."""
    names = [segment.name for segment in segments]
    taken, unique = set(names), []
    for index, segment in enumerate(segments):
        if names.count(segment.name) > 1:
            segment = replace(segment, template=())
        if segment.name in names[:index]:
            number = 2
            while f"{segment.name} ({number})" in taken:
                number += 1
            segment = replace(segment, name=f"{segment.name} ({number})")
            taken.add(segment.name)
        unique.append(segment)
    return unique


def arranged_fields(fields: Sequence[Field], pieces: Sequence[Piece]) -> list[Field]:
    """Fields of the new order, without those that are gone.

    Raises:
        SpanError: if an occurrence of a field would be cut.
    """
    arranged = []
    for field in fields:
        spans = []
        for start, stop in field.spans:
            moved = move_spans(pieces, start, stop)
            kept = sum(high - low for low, high in moved)
            if moved and (len(moved) > 1 or kept != stop - start):
                raise SpanError(
                    f"Field {field.name!r} holds slots [{start}, {stop}); this operation would cut it. Move the "
                    "border outside of the field, or refresh the field instead."
                )
            spans.extend(moved)
        if spans:
            arranged.append(replace(field, spans=tuple(sorted(spans))))
    return arranged


def require_whole_images(ledger: Ledger, pieces: Sequence[Piece]) -> None:
    """Refuse an order that cuts an image.

    Raises:
        SpanError: naming the first cut.
    """
    borders = {border for piece in pieces if isinstance(piece, Keep) for border in (piece.start, piece.stop)}
    for slot in sorted(borders - {0, len(ledger)}):
        same = (ledger.images[:, slot] > 0) & (ledger.images[:, slot] == ledger.images[:, slot - 1])
        if bool(same.any()):
            raise SpanError(
                f"Slot {slot} lies inside an image; this operation would cut it. Move the border to one of its ends "
                "(cache.image_spans()), or take the whole image."
            )
