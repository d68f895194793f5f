"""Put cells together: splice, insert, remove, reposition, extract."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from editable_cache.adapters import identify, measured, model_spec, weights_state
from editable_cache.cache import UNKNOWN, Ledger, LedgeredCache, Segment
from editable_cache.cache.arrange import (
    Placed,
    arranged_fields,
    extend_with_chunk,
    rearrange,
    require_whole_images,
)
from editable_cache.cache.lengths import shortened
from editable_cache.cache.pieces import Blank, Keep, Paste
from editable_cache.chunk import KVChunk
from editable_cache.errors import CompatibilityError, ContextWarning, SpanError
from editable_cache.forward import run
from editable_cache.forward.append import new_name
from editable_cache.forward.checks import check_text
from editable_cache.forward.compressed import splice_compressed
from editable_cache.forward.fits import check_fits
from editable_cache.forward.move import check_blocks, check_reach, check_slots, move, require_moves
from editable_cache.forward.outcome import Outcome, Tally, operating
from editable_cache.forward.recurrent import splice_recurrent
from editable_cache.forward.spans import Where, resolve
from editable_cache.forward.text import TextOrIds, adds_bos, encode
from editable_cache.spec import ModelIdentity, compare

SINK_TOKENS = 4
"""Leading tokens that attention leans on ("attention sinks", Xiao et al., 2024); losing them is worth a warning."""


def splice(
    cache: LedgeredCache,
    tokenizer: Any,
    chunk: KVChunk,
    *,
    at: int | None = None,
    seam_tokens: int = 1,
    name: str | None = None,
    position: int | None = None,
) -> Outcome:
    """Write a chunk into the cache; see ``EditableCache.splice``."""
    model = run.require_model(cache, "splice")
    state = weights_state(model)
    require_compatible(identify(model, tokenizer, state=state), chunk, "splice")
    spec = model_spec(model, state=state)
    check_fits(cache, model, spec, chunk, "splice")
    with operating(cache, "splice", state=state) as tally:
        if at in (None, len(cache.ledger)):
            tally.computed += run.feed_unfed(cache)
            at = None
        length = len(cache.ledger)
        if seam_tokens < 0:
            raise SpanError(f"splice: expected seam_tokens >= 0, got {seam_tokens}.")
        if at is not None and not 0 <= at <= length:
            raise SpanError(f"splice: expected at= a slot in [0, {length}], got {at}.")
        if position is not None and at not in (None, length):
            raise SpanError("splice: position= places a chunk behind the last slot; expected it without at=.")
        slot = length if at is None else at
        label = new_name(cache.ledger, name or chunk.name, "spliced")
        segment = Segment(label, 0, 0, "spliced", note=str(chunk.provenance))
        seam = _seam(chunk, seam_tokens)
        if seam < min(seam_tokens, len(chunk)) and int(chunk.token_ids[seam]) == UNKNOWN:
            tally.notes.append(f"seam of {seam} tokens: no token made the cells behind it")
        if not len(chunk):
            tally.notes.append("empty chunk: nothing to splice")
        elif slot == length:
            positions = _positions_at_end(cache.ledger, chunk, position)
            run.check_limit(model, int(positions.min()) + chunk.extent - 1, "splice")
            check_reach(spec, torch.cat((positions.flatten(), chunk.position_ids)), "splice")
            check_blocks(spec, cache.ledger, chunk, slot, "splice")
            _warn_about_bos(tokenizer, chunk, slot)
            if spec.compressed is not None:
                seam = splice_compressed(cache, spec, chunk, positions, segment, seam_tokens)
            elif cache.state_layers:
                _check_recurrence(chunk, seam_tokens)
                seam = splice_recurrent(cache, spec, chunk, positions, segment)
            elif seam:
                ids = chunk.token_ids[None, :seam].expand(cache.ledger.batch, -1)
                axes = None if chunk.axes is None else chunk.axes[None, :seam].expand(cache.ledger.batch, -1, -1)
                run.extend(cache, ids, segment, positions=positions[:, :seam], axes=axes)
            if seam < len(chunk) and not cache.state_layers:
                extend_with_chunk(cache, spec, chunk, seam, positions[:, seam:], segment)
            check_slots(spec, cache.ledger, "splice")
        else:
            _warn_about_bos(tokenizer, chunk, slot)
            _warn_about_pushed_bos(tokenizer, cache.ledger, slot)
            cache.require_cells_only("splice in the middle", "splice at the end, or insert(chunk.token_ids, at)")
            check_blocks(spec, cache.ledger, chunk, slot, "splice")
            run.require_masks(cache, "splice in the middle")
            insert_piece(cache, tally, slot, Placed(Paste(chunk), segment), f"insertion of {segment.name!r}")
            run.recompute_slots(cache, torch.arange(slot, slot + seam))
        for part in chunk.parts:
            low, known = max(part.start, seam), chunk.token_ids[part.start : part.stop] != UNKNOWN
            if part.note and low < part.stop and bool(known.any()):  # no forward of these ids would give such cells
                cache.ledger = cache.ledger.mixed(slot + low, slot + part.stop, part.note)
        tally.segment = segment.name
        tally.computed += seam
        tally.moved += len(chunk) - seam
        tally.pasted += len(chunk) - seam
    return tally.done()


def _seam(chunk: KVChunk, wanted: int) -> int:
    """How many tokens at a chunk's start can be computed again: up to the first image or trained cell."""
    lost: list[int] = (chunk.token_ids == UNKNOWN).nonzero()[:1, 0].tolist()
    return min(wanted, len(chunk), *lost, *(image.start for image in chunk.images))


def _check_recurrence(chunk: KVChunk, seam_tokens: int) -> None:
    """Refuse a chunk that does not say what it does to recurrent layers, or a seam that it was not compiled for."""
    if chunk.recurrence is None:
        raise CompatibilityError(
            f"splice: this model has recurrent layers, and {chunk!r} does not say what it does to them; compile it "
            "with Skill.precompile."
        )
    if seam_tokens > chunk.recurrence.head:
        raise SpanError(
            f"splice: expected seam_tokens up to {chunk.recurrence.head}, the tokens that this chunk was compiled to "
            f"run live at its start, got {seam_tokens}; compile it with head_tokens={seam_tokens}."
        )


def insert(cache: LedgeredCache, tokenizer: Any, content: TextOrIds, at: int, *, name: str | None = None) -> Outcome:
    """Compute new text in the middle; see ``EditableCache.insert``."""
    with operating(cache, "insert") as tally:
        length = len(cache.ledger)
        if not 0 <= at <= length:
            raise SpanError(f"insert: expected at= a slot in [0, {length}], got {at}.")
        ids = encode(tokenizer, content, first=at == 0)
        run.check_ids(run.require_model(cache, "insert"), ids, "insert")
        check_text(run.require_model(cache, "insert"), ids, "insert")
        if not len(ids):
            tally.notes.append("empty text: nothing to insert")
        else:
            segment = Segment(new_name(cache.ledger, name, "prefilled"), 0, 0, "prefilled")
            if at == length:
                tally.computed += run.feed_unfed(cache)
                run.extend(cache, ids[None].expand(cache.ledger.batch, -1), segment)
                tally.computed += len(ids)
            else:
                _warn_about_pushed_bos(tokenizer, cache.ledger, at)
                run.require_masks(cache, "insert")
                insert_piece(cache, tally, at, Placed(Blank(ids[None]), segment), f"insertion of {segment.name!r}")
                tally.computed += run.recompute_slots(cache, torch.arange(at, at + len(ids)))
            tally.segment = segment.name
    return tally.done()


def remove(cache: LedgeredCache, where: Where, *, close_gap: bool = True) -> Outcome:
    """Forget a span; see ``EditableCache.remove``."""
    with operating(cache, "remove") as tally:
        start, stop = resolve(cache.ledger, where, "remove")
        if start < SINK_TOKENS < len(cache.ledger) and stop < len(cache.ledger):
            warnings.warn(
                f"Removing slots [{start}, {stop}) takes away tokens among the first {SINK_TOKENS}, which attention "
                "leans on: models often read such a context badly. Keep the first tokens, or recompute what follows.",
                ContextWarning,
                stacklevel=3,
            )
        remove_span(cache, tally, start, stop, close_gap=close_gap)
    return tally.done()


def remove_span(cache: LedgeredCache, tally: Tally, start: int, stop: int, *, close_gap: bool = True) -> None:
    """Forget slots, inside an operation that is already running."""
    ledger, length = cache.ledger, len(cache.ledger)
    names = [s.name for s in ledger.segments if s.start < stop and start < s.stop]
    tally.removed += stop - start
    pieces = [Placed(Keep(*span)) for span in ((0, start), (stop, length)) if span[0] < span[1]]
    later = ledger.positions[:, stop:]
    if close_gap and stop < length:
        gone = _freed(ledger, start, stop)
        later = (later - gone).masked_fill(~ledger.valid[:, stop:], 0)
        tally.moved += length - stop
    positions = torch.cat((ledger.positions[:, :start], later), dim=1)
    if stop == length:
        require_whole_images(ledger, [Keep(0, start)])
        cache.unfed = None  # it came behind what goes
        fields = arranged_fields(ledger.fields, [Keep(0, start)])
        if cache.state_layers:
            cache.touch(start)
        else:
            for layer in cache.editable_layers:
                layer.truncate(start)
        cache.ledger = shortened(ledger, start, cache.model).with_fields(fields)
        if not close_gap:
            new = torch.ones((ledger.batch, 1), dtype=torch.bool)
            gaps = (ledger.next_positions(new) - cache.ledger.next_positions(new)).unique()
            if len(gaps) > 1:
                raise SpanError("remove: expected a gap of one width in every row, got several; unstack() first.")
            cache.ledger = replace(cache.ledger, open_gap=int(gaps))
            _check_gap(cache)
    else:
        if close_gap or any(layer.pristine for layer in cache.editable_layers):
            move(cache, "remove", pieces, positions)
        else:
            rearrange(cache, None, pieces, positions)
            _check_gap(cache)
        cache.ledger = cache.ledger.marked_stale(
            [(start, length - stop + start)], f"removal of {' and '.join(map(repr, names))}"
        )


def _freed(ledger: Ledger, start: int, stop: int) -> Tensor:
    """How many positions each row gets back when slots ``[start, stop)`` go, int64 ``[batch, 1]``.

    As many as tokens; with an image, as far as the next token moves up to the first one that goes.
    """
    freed = ledger.valid[:, start:stop].sum(dim=1)
    for row in (ledger.images[:, start:stop] > 0).any(dim=1).nonzero()[:, 0].tolist():
        here, behind = ledger.valid[row, start:stop], ledger.valid[row, stop:]
        if bool(behind.any()):
            freed[row] = ledger.positions[row, stop:][behind][0] - ledger.positions[row, start:stop][here][0]
    return freed[:, None]


def _check_gap(cache: LedgeredCache) -> None:
    """Refuse a gap where positions are slots, which have none."""
    if cache.model is not None and measured(cache.model).positions == "slots":
        raise SpanError(
            "remove: the positions of this model are the slots of its cache, so no gap can stay; expected "
            "close_gap=True."
        )


def reposition(cache: LedgeredCache, where: Where, *, to: int | None = None, position: int | None = None) -> Outcome:
    """Move a span to another slot, or to other positions; see ``EditableCache.reposition``."""
    with operating(cache, "reposition") as tally:
        start, stop = resolve(cache.ledger, where, "reposition")
        if to is not None and stop == len(cache.ledger):
            fed = run.feed_unfed(cache)  # it goes along with what it belongs to
            tally.computed, stop = tally.computed + fed, stop + fed
        if (to is None) == (position is None):
            raise SpanError(
                "reposition: expected either to= (a slot) or position= (of the first token), got both or none."
            )
        require_moves(cache, "reposition")
        if position is not None:
            _shift_positions(cache, start, stop, position)
            tally.moved += stop - start
        else:
            assert to is not None
            _move_slots(cache, tally, start, stop, to)
    return tally.done()


def require_compatible(identity: ModelIdentity, chunk: KVChunk, operation: str) -> None:
    """Refuse a chunk of another model.

    Raises:
        CompatibilityError: with every fact that differs.
    """
    if not isinstance(chunk, KVChunk):
        raise CompatibilityError(
            f"{operation}: expected a KVChunk or Skill, got {type(chunk).__name__}; compile text with "
            "Skill.precompile(model, tokenizer, text, name=...), or append() it."
        )
    reasons = compare(identity, chunk.model)
    if reasons:
        raise CompatibilityError(
            f"{operation}: {chunk!r} was computed by another model than this cache's; compile it again with this one "
            "(Skill.precompile). What differs:",
            reasons,
        )


def insert_piece(cache: LedgeredCache, tally: Tally, at: int, placed: Placed, cause: str) -> None:
    """Make room at slot ``at`` and put a piece there, inside an operation that is already running."""
    ledger, length, count = cache.ledger, len(cache.ledger), len(placed.piece)
    first = (
        ledger.positions[:, at:]
        .masked_fill(~ledger.valid[:, at:], torch.iinfo(torch.int64).max)
        .amin(dim=1, keepdim=True)
    )
    chunk = placed.piece.chunk if isinstance(placed.piece, Paste) else None
    new = first + (torch.arange(count) if chunk is None else chunk.steps)
    room = count if chunk is None else chunk.extent
    later = (ledger.positions[:, at:] + room).masked_fill(~ledger.valid[:, at:], 0)
    positions = torch.cat((ledger.positions[:, :at], new, later), dim=1)
    run.check_limit(run.require_model(cache, "insert"), int(positions.max()), "insert")
    pieces = [Placed(Keep(0, at))] if at else []
    pieces += [placed, Placed(Keep(at, length))]
    move(cache, "insert", pieces, positions)
    cache.ledger = cache.ledger.marked_stale([(at + count, length + count)], cause)
    tally.moved += length - at


def _positions_at_end(ledger: Ledger, chunk: KVChunk, position: int | None) -> Tensor:
    following = ledger.next_positions(torch.ones((ledger.batch, 1), dtype=torch.bool))
    if position is None:
        return following + chunk.steps
    if position < int(following[:, 0].max()):
        raise SpanError(
            f"splice: expected position >= {int(following[:, 0].max())} (what follows the last token), got {position}."
        )
    return (position + chunk.steps).expand(ledger.batch, -1)


def _shift_positions(cache: LedgeredCache, start: int, stop: int, position: int) -> None:
    ledger = cache.ledger
    first = (
        ledger.positions[:, start:stop]
        .masked_fill(~ledger.valid[:, start:stop], torch.iinfo(torch.int64).max)
        .amin(dim=1)
    )
    positions = ledger.positions.clone()
    positions[:, start:stop] += (position - first)[:, None]
    model = run.require_model(cache, "reposition")
    run.check_limit(model, int(positions.max()), "reposition")
    if int(positions[ledger.valid].min()) < 0:
        raise SpanError(f"reposition: expected positions >= 0, got {int(positions.min())}.")
    moved = ledger.segments
    move(cache, "reposition", [Placed(Keep(0, len(ledger)))], positions)
    name = next(s.name for s in moved if s.start <= start < s.stop)
    cache.ledger = cache.ledger.marked_stale([(start, len(ledger))], f"move of {name!r}")


def _move_slots(cache: LedgeredCache, tally: Tally, start: int, stop: int, to: int) -> None:
    ledger, length, count = cache.ledger, len(cache.ledger), stop - start
    if not 0 <= to <= length - count:
        raise SpanError(
            f"reposition: expected to= the slot of the first moved token in the new order, in [0, {length - count}], "
            f"got {to}."
        )
    if to == start:
        tally.notes.append("already there")
        return
    if not bool(ledger.valid.all()):
        raise SpanError("reposition: expected a cache without padding; unstack() it first.")
    low, high = min(start, to), max(stop, to + count)
    between = (stop, high) if to > start else (low, start)
    order = [between, (start, stop)] if to > start else [(start, stop), between]
    spans = [(0, low), *order, (high, length)]
    positions = ledger.positions.clone()
    if bool(ledger.images[:, low:high].any()):
        positions[:, low:high] = _swapped(ledger, low, stop if to > start else start, high)
    else:
        positions[:, low:high] = ledger.positions[:, low:high].sort(dim=1).values
    name = next(s.name for s in ledger.segments if s.start <= start < s.stop)
    move(cache, "reposition", [Placed(Keep(*span)) for span in spans if span[0] < span[1]], positions)
    cache.ledger = cache.ledger.marked_stale([(low, length)], f"move of {name!r}")
    tally.moved += high - low
    tally.segment = name


def _swapped(ledger: Ledger, low: int, middle: int, high: int) -> Tensor:
    """Positions of ``[middle, high)`` and then ``[low, middle)``, each as a whole, in the room that both have."""
    ends = torch.cat((ledger.positions, ledger.next_positions(torch.ones((ledger.batch, 1), dtype=torch.bool))), dim=1)
    first, second = ends[:, middle] - ends[:, low], ends[:, high] - ends[:, middle]
    parts = (ledger.positions[:, middle:high] - first[:, None], ledger.positions[:, low:middle] + second[:, None])
    return torch.cat(parts, dim=1)


def _warn_about_bos(tokenizer: Any, chunk: KVChunk, slot: int) -> None:
    if tokenizer is None or not slot or not adds_bos(tokenizer):
        return
    if int(chunk.token_ids[0]) == tokenizer.bos_token_id:
        warnings.warn(
            f"{chunk!r} begins with the tokenizer's BOS token and goes to slot {slot}: a second BOS in the middle of "
            "a context shifts how models read it. Precompile the text without it, or splice chunk.slice(1, "
            "len(chunk)).",
            ContextWarning,
            stacklevel=4,
        )


def _warn_about_pushed_bos(tokenizer: Any, ledger: Ledger, slot: int) -> None:
    if tokenizer is None or slot or not adds_bos(tokenizer):
        return
    if bool((ledger.ids[:, 0] == tokenizer.bos_token_id).any()):
        warnings.warn(
            "What is put in front pushes the context's BOS token into the middle, where models read it badly: insert "
            "behind it, at slot 1.",
            ContextWarning,
            stacklevel=4,
        )
