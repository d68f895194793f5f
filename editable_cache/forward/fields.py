"""Tracked fields: refresh in place, correct by an erratum, fold errata back into the text."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from editable_cache.cache import Field, LedgeredCache, Segment
from editable_cache.cache.arrange import Placed
from editable_cache.cache.ledger import Erratum
from editable_cache.cache.pieces import Blank, Keep
from editable_cache.errors import ContextWarning, FieldError
from editable_cache.forward import run
from editable_cache.forward.append import append_tokens
from editable_cache.forward.compose import remove_span
from editable_cache.forward.move import move
from editable_cache.forward.outcome import Outcome, Tally, operating
from editable_cache.forward.text import Encoded, encode_template, require_tokenizer

ERRATUM = "\n[UPDATE] {name} is now {value}. This replaces every earlier value of {name}.\n"
"""Default correcting line: names the field, states the value, and claims precedence without arguing (the study found
that confrontational wordings do worse).
"""


def refresh_field(cache: LedgeredCache, tokenizer: Any, name: str, value: str) -> Outcome:
    """Recompute a field's own cells for a new value; see ``EditableCache.refresh_field``."""
    with operating(cache, "refresh_field") as tally:
        refresh(cache, tokenizer, tally, name, value)
        field = cache.ledger.field(name)
        if field.errata and field.current != value:
            warnings.warn(
                f"Field {name!r} now reads {value!r}, but a later erratum still states {field.current!r}: readers "
                "will believe the erratum. Use edit(name, value) to change both, or consolidate().",
                ContextWarning,
                stacklevel=3,
            )
    return tally.done()


def erratum(
    cache: LedgeredCache,
    tokenizer: Any,
    name: str,
    value: str,
    *,
    template: str | None = None,
    role: str | None = None,
) -> Outcome:
    """Append one correcting line; see ``EditableCache.erratum``."""
    with operating(cache, "erratum") as tally:
        correct(cache, tokenizer, tally, name, value, template=template, role=role)
    return tally.done()


def consolidate(cache: LedgeredCache, tokenizer: Any) -> Outcome:
    """Fold errata into the text; see ``EditableCache.consolidate``."""
    with operating(cache, "consolidate") as tally:
        corrected = [field for field in cache.ledger.fields if field.errata]
        if corrected:
            tally.computed += run.feed_unfed(cache)
        else:
            tally.notes.append("no errata: nothing to fold")
        first = len(cache.ledger)
        for field in corrected:
            value = field.current
            first = min([first, *(start for start, _ in field.spans)])
            first = min(first, remove_errata(cache, tally, field.name))
            refresh(cache, tokenizer, tally, field.name, value)
        if corrected and first < len(cache.ledger):
            tally.computed += run.recompute_slots(cache, torch.arange(first, len(cache.ledger)))
    return tally.done()


def remove_errata(cache: LedgeredCache, tally: Tally, name: str) -> int:
    """Take every correcting line of a field out of the context, inside an operation; returns the first slot touched."""
    first = len(cache.ledger)
    for old in cache.ledger.field(name).errata:
        segment = cache.ledger.segment(old.segment)
        first = min(first, segment.start)
        remove_span(cache, tally, *segment.span)
    return first


def refresh(cache: LedgeredCache, tokenizer: Any, tally: Tally, name: str, value: str) -> list[tuple[int, int]]:
    """Recompute a field's cells, inside an operation; returns where its occurrences stand now."""
    field = cache.ledger.field(name)
    if not isinstance(value, str) or not value:
        raise FieldError(f"Field {name!r}: expected a text of at least one token, got {value!r}.")
    segment = cache.ledger.segment(field.segment)
    tally.segment = segment.name
    if value == field.value:
        tally.notes.append(f"{name} reads {value!r} already")
        return list(field.spans)
    if cache.ledger.batch != 1:
        raise FieldError(f"Field {name!r}: expected a cache of one row, got {cache.ledger.batch}; unstack() it first.")
    encoded = _encode_again(cache, tokenizer, segment, field, value)
    new_spans = [(segment.start + low, segment.start + high) for low, high in encoded.spans[name]]
    longer = [high - low for low, high in new_spans] != [high - low for low, high in field.spans]
    ids = encoded.ids[None]
    if longer:
        _make_room(cache, tally, field, segment, new_spans, ids)
    else:
        cells = cache.ledger.ids.clone()
        cells[:, segment.start : segment.stop] = ids
        cache.ledger = replace(cache.ledger, ids=cells)
    cause = f"field {name}: {field.value!r} -> {value!r}"
    slots = torch.cat([torch.arange(low, high) for low, high in new_spans])
    cache.ledger = cache.ledger.marked_stale([(new_spans[0][0], len(cache.ledger))], cause)
    tally.computed += run.recompute_slots(cache, slots)
    field = cache.ledger.field(name)
    cache.ledger = cache.ledger.with_field(replace(field, value=value, spans=tuple(new_spans)))
    return new_spans


def correct(
    cache: LedgeredCache,
    tokenizer: Any,
    tally: Tally,
    name: str,
    value: str,
    *,
    template: str | None = None,
    role: str | None = None,
    always: bool = False,
) -> None:
    """Leave one live correcting line for a field, or none if the context says the value without it, inside an
    operation.

    ``always`` adds the line even then.
    """
    field = cache.ledger.field(name)
    if not isinstance(value, str) or not value:
        raise FieldError(f"Field {name!r}: expected a text of at least one token, got {value!r}.")
    line = _line(template or ERRATUM, name, value)
    text = line if role is None else render_turn(require_tokenizer(tokenizer, "role="), role, line.strip())
    tally.computed += run.feed_unfed(cache)
    while field.errata and cache.ledger.segment(field.errata[-1].segment).stop == len(cache.ledger):
        trailing = cache.ledger.segment(field.errata[-1].segment)
        remove_span(cache, tally, *trailing.span)
        tally.notes.append(f"the trailing erratum ({field.current!r}) was taken back")
        field = cache.ledger.field(name)
    if field.current == value and not always:
        tally.notes.append(f"the context already says {value!r}: no line needed")
        return
    if field.errata:
        tally.notes.append(f"supersedes the erratum {field.current!r}")
    append_tokens(cache, tokenizer, tally, text, name=cache.ledger.free_name(f"erratum:{name}"), origin="erratum")
    assert tally.segment is not None
    written = Erratum(tally.segment, value, len(cache.ledger.segment(tally.segment)))
    cache.ledger = cache.ledger.with_field(replace(field, errata=(*field.errata, written)))


def render_turn(tokenizer: Any, role: str, content: str) -> str:
    """One turn of the tokenizer's chat template, as it reads in the middle of a chat.

    Raises:
        FieldError: if the tokenizer has no chat template, or renders a turn differently when another one follows.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise FieldError(f"role={role!r}: expected a tokenizer with a chat template, got none; pass template= instead.")
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    base = tokenizer.apply_chat_template(before, tokenize=False)
    whole = tokenizer.apply_chat_template([*before, {"role": role, "content": content}], tokenize=False)
    if not whole.startswith(base) or content not in whole[len(base) :]:
        raise FieldError(
            f"role={role!r}: this chat template does not render a turn of that role after others unchanged; pass "
            "template= with the text of the turn instead."
        )
    return str(whole[len(base) :])


def _line(template: str, name: str, value: str) -> str:
    if "{value}" not in template:
        raise FieldError(f"erratum: expected a template with '{{value}}' (and '{{name}}'), got {template!r}.")
    return template.replace("{name}", name).replace("{value}", value)


def _encode_again(cache: LedgeredCache, tokenizer: Any, segment: Segment, field: Field, value: str) -> Encoded:
    """Tokenize the field's segment with the new value; nothing but the field may change."""
    if not segment.template:
        raise FieldError(
            f"Field {field.name!r}: the text of segment {segment.name!r} was cut after the field was defined, so it "
            "can't be tokenized again; use erratum() instead."
        )
    values = {other.name: other.value for other in cache.ledger.fields if other.segment == segment.name}
    values[field.name] = value
    held = cache.ledger.ids[0, segment.start : segment.stop]
    old = [(low - segment.start, high - segment.start) for low, high in field.spans]
    for first in (segment.start == 0, segment.start != 0):
        encoded = encode_template(tokenizer, segment.template, values, first=first)
        if _outside(held, old) == _outside(encoded.ids, encoded.spans[field.name]):
            return encoded
    raise FieldError(
        f"Field {field.name!r}: with {value!r} the text around it tokenizes differently; expected only the field's "
        "own tokens to change. Separate the field from its neighbours by spaces or line breaks, or use erratum()."
    )


def _outside(ids: Tensor, spans: Any) -> list[list[int]]:
    borders = [0, *(border for span in spans for border in span), len(ids)]
    return [ids[low:high].tolist() for low, high in zip(borders[::2], borders[1::2], strict=True)]


def _make_room(
    cache: LedgeredCache,
    tally: Tally,
    field: Field,
    segment: Segment,
    new_spans: list[tuple[int, int]],
    ids: Tensor,
) -> None:
    """Put blank slots of the new length where each occurrence stands; what follows closes up or makes room."""
    ledger, length = cache.ledger, len(cache.ledger)
    placed, done = [], 0
    for (start, stop), (low, high) in zip(field.spans, new_spans, strict=True):
        placed.append(Placed(Keep(done, start)))
        placed.append(Placed(Blank(ids[:, low - segment.start : high - segment.start]), segment))
        done = stop
    placed.append(Placed(Keep(done, length)))
    placed = [item for item in placed if len(item.piece)]
    total = sum(len(item.piece) for item in placed)
    positions = _close_up(ledger.positions, placed, total)
    run.check_limit(run.require_model(cache, "refresh_field"), int(positions.max()), "refresh_field")
    tally.moved += length - field.spans[0][1]
    index = ledger.fields.index(field)
    cache.ledger = replace(ledger, fields=ledger.fields[:index] + ledger.fields[index + 1 :])
    move(cache, "refresh_field with another token count", placed, positions)
    fields = list(cache.ledger.fields)
    fields.insert(index, replace(field, spans=tuple(new_spans)))
    cache.ledger = replace(cache.ledger, fields=tuple(fields))


def _close_up(positions: Tensor, placed: list[Placed], total: int) -> Tensor:
    """Positions of the new order: kept tokens, and the first of new ones, keep their distance to the token before them;
    further new ones follow by one.
    """
    new = torch.zeros((positions.shape[0], total), dtype=torch.int64)
    offset = old = 0
    for item in placed:
        piece, count = item.piece, len(item.piece)
        before = new[:, offset - 1 : offset] if offset else torch.full_like(positions[:, :1], -1)
        if isinstance(piece, Keep):
            kept = positions[:, piece.start : piece.stop]
            step = kept[:, :1] - positions[:, piece.start - 1 : piece.start] if piece.start else kept[:, :1] + 1
            new[:, offset : offset + count] = before + step + (kept - kept[:, :1])
            old = piece.stop
        else:
            step = positions[:, old : old + 1] - (positions[:, old - 1 : old] if old else -1)
            new[:, offset : offset + count] = before + step + torch.arange(count)
        offset += count
    return new
