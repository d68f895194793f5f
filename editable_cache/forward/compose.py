"""Put cells together: splice, insert, remove, reposition, extract."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from editable_cache.adapters import identify, model_spec, weights_state
from editable_cache.cache import UNKNOWN, Ledger, LedgeredCache, Segment
from editable_cache.cache.arrange import Placed, arranged_fields, extend_with_chunk, rearrange
from editable_cache.cache.pieces import Blank, Keep, Paste
from editable_cache.chunk import KVChunk, Provenance
from editable_cache.errors import CompatibilityError, ContextWarning, LedgerError, SpanError
from editable_cache.forward import run
from editable_cache.forward.append import new_name
from editable_cache.forward.outcome import Outcome, Tally, operating
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
        seam = min(seam_tokens, len(chunk))
        if not len(chunk):
            tally.notes.append("empty chunk: nothing to splice")
        elif slot == length:
            positions = _positions_at_end(cache.ledger, len(chunk), position)
            run.check_limit(model, int(positions.max()), "splice")
            _warn_about_bos(tokenizer, chunk, slot)
            if seam:
                ids = chunk.token_ids[None, :seam].expand(cache.ledger.batch, -1)
                run.extend(cache, ids, segment, positions=positions[:, :seam])
            if seam < len(chunk):
                extend_with_chunk(cache, spec, chunk, seam, positions[:, seam:], segment)
        else:
            _warn_about_bos(tokenizer, chunk, slot)
            _warn_about_pushed_bos(tokenizer, cache.ledger, slot)
            run.spec_for_masks(model, "splice in the middle")
            insert_piece(cache, tally, slot, Placed(Paste(chunk), segment), f"insertion of {segment.name!r}")
            run.recompute_slots(cache, torch.arange(slot, slot + seam))
        if chunk.provenance.note and seam < len(chunk):  # a mixture: no forward of these ids would give such cells
            cache.ledger = cache.ledger.mixed(slot + seam, slot + len(chunk), chunk.provenance.note)
        tally.segment = segment.name
        tally.computed += seam
        tally.moved += len(chunk) - seam
        tally.pasted += len(chunk) - seam
    return tally.done()


def insert(cache: LedgeredCache, tokenizer: Any, content: TextOrIds, at: int, *, name: str | None = None) -> Outcome:
    """Compute new text in the middle; see ``EditableCache.insert``."""
    model = run.require_model(cache, "insert")
    with operating(cache, "insert") as tally:
        length = len(cache.ledger)
        if not 0 <= at <= length:
            raise SpanError(f"insert: expected at= a slot in [0, {length}], got {at}.")
        ids = encode(tokenizer, content, first=at == 0)
        run.check_ids(model, ids, "insert")
        if not len(ids):
            tally.notes.append("empty text: nothing to insert")
        else:
            segment = Segment(new_name(cache.ledger, name, "prefilled"), 0, 0, "prefilled")
            if at == length:
                tally.computed += run.feed_unfed(cache)
                run.extend(cache, ids[None].expand(cache.ledger.batch, -1), segment)
            else:
                _warn_about_pushed_bos(tokenizer, cache.ledger, at)
                run.spec_for_masks(model, "insert")
                insert_piece(cache, tally, at, Placed(Blank(ids[None]), segment), f"insertion of {segment.name!r}")
                run.recompute_slots(cache, torch.arange(at, at + len(ids)))
            tally.segment = segment.name
            tally.computed += len(ids)
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
        gone = ledger.valid[:, start:stop].sum(dim=1, keepdim=True)
        later = (later - gone).masked_fill(~ledger.valid[:, stop:], 0)
        tally.moved += length - stop
    positions = torch.cat((ledger.positions[:, :start], later), dim=1)
    if stop == length:
        cache.unfed = None  # it came behind what goes
        fields = arranged_fields(ledger.fields, [Keep(0, start)])
        for layer in cache.editable_layers:
            layer.truncate(start)
        cache.ledger = ledger.truncated(start).with_fields(fields)
        if not close_gap:
            new = torch.ones((ledger.batch, 1), dtype=torch.bool)
            gaps = (ledger.next_positions(new) - cache.ledger.next_positions(new)).unique()
            if len(gaps) > 1:
                raise SpanError("remove: expected a gap of one width in every row, got several; unstack() first.")
            cache.ledger = replace(cache.ledger, open_gap=int(gaps))
    else:
        moved = close_gap or any(layer.pristine for layer in cache.editable_layers)
        rearrange(cache, _spec(cache, "remove") if moved else None, pieces, positions)
        cache.ledger = cache.ledger.marked_stale(
            [(start, length - stop + start)], f"removal of {' and '.join(map(repr, names))}"
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
        spec = _spec(cache, "reposition")
        if position is not None:
            _shift_positions(cache, spec, start, stop, position)
            tally.moved += stop - start
        else:
            assert to is not None
            _move_slots(cache, spec, tally, start, stop, to)
    return tally.done()


def extract(cache: LedgeredCache, tokenizer: Any, where: Where, *, name: str | None = None) -> KVChunk:
    """Cut out a chunk; see ``EditableCache.extract``."""
    model = run.require_model(cache, "extract")
    cache.require_idle("extract")
    cache.adopt()
    cache.require_editable("extract")
    cache.require_same_weights("extract")
    ledger = cache.ledger
    start, stop = resolve(ledger, where, "extract")
    if ledger.batch != 1:
        raise SpanError(f"extract: expected a cache of one row, got {ledger.batch}; take a row with unstack() first.")
    ids = ledger.ids[0, start:stop]
    if bool((ids == UNKNOWN).any()):
        raise LedgerError(
            f"extract: the ids of slots [{start}, {stop}) are unknown; only tokens that the cache saw can be cut out."
        )
    causes = ledger.causes(start, stop)
    seen = tuple(ledger.ids[0, :start].tolist())
    isolated = bool((ledger.groups[0, start:stop] != 0).any())
    whole = _isolated_prefix(ledger, start, stop)
    if whole is not None:  # a piece of one isolated chunk has seen what that chunk had seen, and nothing else
        seen, causes, isolated = whole, (), False
    gaps = not torch.equal(ledger.positions[0, :stop], torch.arange(stop)) and whole is None and bool(seen)
    note = "; ".join(
        [
            *(f"stale: {cause}" for cause in causes),
            *(["holds cells of an isolated chunk"] if isolated else []),
            *(["computed at positions with gaps or out of order"] if gaps else []),
        ]
    )
    return KVChunk(
        layers=tuple(
            {name: tensor[..., start:stop, :].detach().clone() for name, tensor in layer.view().items()}
            for layer in cache.editable_layers
        ),
        token_ids=ids.clone(),
        position_ids=ledger.positions[0, start:stop].clone(),
        model=identify(model, tokenizer),
        provenance=Provenance("extracted" if seen or note else "precompiled", seen, note),
        name=name,
    )


def _isolated_prefix(ledger: Ledger, start: int, stop: int) -> tuple[int, ...] | None:
    """What the cells of a span had seen if all belong to one isolated chunk, in order; else None."""
    groups, offsets = ledger.groups[0, start:stop], ledger.offsets[0, start:stop]
    first = int(offsets[0])
    in_order = torch.equal(offsets, torch.arange(first, first + stop - start))
    if not int(groups[0]) or bool((groups != groups[0]).any()) or not in_order:
        return None
    chunk = ledger.chunks[int(groups[0]) - 1]
    return (*chunk.prefix_ids, *chunk.ids[:first])


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
    new = first + torch.arange(count)
    later = (ledger.positions[:, at:] + count).masked_fill(~ledger.valid[:, at:], 0)
    positions = torch.cat((ledger.positions[:, :at], new, later), dim=1)
    run.check_limit(run.require_model(cache, "insert"), int(positions.max()), "insert")
    pieces = [Placed(Keep(0, at))] if at else []
    pieces += [placed, Placed(Keep(at, length))]
    rearrange(cache, _spec(cache, "insert"), pieces, positions)
    cache.ledger = cache.ledger.marked_stale([(at + count, length + count)], cause)
    tally.moved += length - at


def _positions_at_end(ledger: Ledger, count: int, position: int | None) -> Tensor:
    following = ledger.next_positions(torch.ones((ledger.batch, count), dtype=torch.bool))
    if position is None:
        return following
    if position < int(following[:, 0].max()):
        raise SpanError(
            f"splice: expected position >= {int(following[:, 0].max())} (what follows the last token), got {position}."
        )
    return (position + torch.arange(count)).expand(ledger.batch, -1)


def _shift_positions(cache: LedgeredCache, spec: Any, start: int, stop: int, position: int) -> None:
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
    rearrange(cache, spec, [Placed(Keep(0, len(ledger)))], positions)
    name = next(s.name for s in moved if s.start <= start < s.stop)
    cache.ledger = cache.ledger.marked_stale([(start, len(ledger))], f"move of {name!r}")


def _move_slots(cache: LedgeredCache, spec: Any, tally: Tally, start: int, stop: int, to: int) -> None:
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
    positions[:, low:high] = ledger.positions[:, low:high].sort(dim=1).values
    name = next(s.name for s in ledger.segments if s.start <= start < s.stop)
    rearrange(cache, spec, [Placed(Keep(*span)) for span in spans if span[0] < span[1]], positions)
    cache.ledger = cache.ledger.marked_stale([(low, length)], f"move of {name!r}")
    tally.moved += high - low
    tally.segment = name


def _spec(cache: LedgeredCache, operation: str) -> Any:
    cache.require_editable(operation)
    return model_spec(run.require_model(cache, operation))


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
