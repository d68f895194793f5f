"""Prefill new text at the end, with fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from editable_cache.cache import Field, Ledger, LedgeredCache, Segment
from editable_cache.errors import FieldError, SpanError
from editable_cache.forward import checks, run
from editable_cache.forward.outcome import Outcome, Tally, operating
from editable_cache.forward.text import (
    Template,
    TextOrIds,
    encode,
    encode_template,
    parse_template,
    require_tokenizer,
    warn_at_boundary,
)


def append(
    cache: LedgeredCache,
    tokenizer: Any,
    content: TextOrIds | Sequence[str],
    *,
    name: str | None = None,
    fields: Mapping[str, str] | None = None,
) -> Outcome:
    """Prefill at the end; see ``EditableCache.append``."""
    with operating(cache, "append") as tally:
        if fields is not None:
            append_template(cache, tokenizer, tally, content, fields, name=name)
        else:
            append_tokens(cache, tokenizer, tally, content, name=name)
    return tally.done()


def append_template(
    cache: LedgeredCache,
    tokenizer: Any,
    tally: Tally,
    content: Any,
    fields: Mapping[str, str],
    *,
    name: str | None,
) -> None:
    """Prefill a text with fields, inside an operation that is already running."""
    if not isinstance(content, str):
        raise FieldError(
            f"fields: expected a template text such as 'status: {{status}}\\n', got {type(content).__name__}."
        )
    taken = sorted({field.name for field in cache.ledger.fields} & set(fields))
    if taken:
        raise FieldError(f"Duplicate field {taken}: a field is defined once; change it with refresh_field or edit.")
    append_parsed(cache, tokenizer, tally, parse_template(content, fields), fields, name=name)


def append_parsed(
    cache: LedgeredCache,
    tokenizer: Any,
    tally: Tally,
    template: Template,
    values: Mapping[str, str],
    *,
    name: str | None,
) -> None:
    """Prefill a parsed template and track its fields."""
    tally.computed += run.feed_unfed(cache)
    start = len(cache.ledger)
    encoded = encode_template(tokenizer, template, values, first=not start)
    segment = Segment(new_name(cache.ledger, name, "prefilled"), 0, 0, "prefilled", template)
    add(cache, tokenizer, tally, encoded.ids[None], segment)
    for field, spans in encoded.spans.items():
        placed = tuple((start + low, start + high) for low, high in spans)
        cache.ledger = cache.ledger.with_field(Field(field, values[field], segment.name, placed))


def append_tokens(
    cache: LedgeredCache,
    tokenizer: Any,
    tally: Tally,
    content: TextOrIds | Sequence[str],
    *,
    name: str | None = None,
    origin: str = "prefilled",
) -> None:
    """Prefill text or ids, or one text for each row, inside an operation that is already running."""
    tally.computed += run.feed_unfed(cache)
    first, valid = not len(cache.ledger), None
    if isinstance(content, Sequence) and not isinstance(content, str) and content and isinstance(content[0], str):
        ids, valid = encode_rows(tokenizer, [str(text) for text in content], first=first)
    elif isinstance(content, Tensor) and content.dim() == 2 and content.shape[0] > 1:
        ids = torch.stack([encode(tokenizer, row, first=first) for row in content])
    else:
        ids = encode(tokenizer, content, first=first)[None]  # type: ignore[arg-type]
    if not ids.shape[1]:
        tally.notes.append("empty text: nothing to append")
        return
    segment = Segment(new_name(cache.ledger, name, origin), 0, 0, origin)
    add(cache, tokenizer if isinstance(content, str) else None, tally, ids, segment, valid=valid)


def add(
    cache: LedgeredCache,
    tokenizer: Any,
    tally: Tally,
    ids: Tensor,
    segment: Segment,
    *,
    valid: Tensor | None = None,
) -> None:
    """Prefill ``ids`` ``[1 or batch, num_tokens]`` as ``segment``; warn with ``tokenizer`` if the seam tokenizes
    otherwise.
    """
    ledger = cache.ledger
    if not len(ledger):
        ledger = cache.ledger = replace(Ledger.empty(ids.shape[0]), open_gap=ledger.open_gap)
    elif ids.shape[0] not in (1, ledger.batch):
        raise SpanError(f"append: expected one text, or one for each of the {ledger.batch} rows, got {ids.shape[0]}.")
    if tokenizer is not None and ledger.batch == 1 and len(ledger):
        warn_at_boundary(tokenizer, ledger.ids[0], tokenizer.decode(ids[0], clean_up_tokenization_spaces=False))
    checks.check_text(run.require_model(cache, "append"), ids, "append")
    if valid is not None:
        checks.check_padding(cache, valid, "append")
    run.extend(cache, ids.expand(ledger.batch, -1), segment, valid=valid)
    tally.computed += ids.shape[1]
    tally.segment = segment.name


def encode_rows(tokenizer: Any, texts: Sequence[str], *, first: bool) -> tuple[Tensor, Tensor]:
    """Left-padded ids ``[batch, num_tokens]`` of one text for each row, and which of them are no padding."""
    require_tokenizer(tokenizer, "text")
    rows = [encode(tokenizer, text, first=first) for text in texts]
    longest = max(map(len, rows))
    padding = getattr(tokenizer, "pad_token_id", None) or 0
    ids = torch.stack([torch.cat((row.new_full((longest - len(row),), padding), row)) for row in rows])
    valid = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows])
    return ids, valid


def new_name(ledger: Ledger, wanted: str | None, origin: str) -> str:
    """A segment's name: as wanted if it is free, else made from its origin.

    Raises:
        SpanError: if the wanted name is taken.
    """
    if wanted is None:
        return ledger.free_name(origin)
    if not wanted:
        raise SpanError("name: expected a text or None, got an empty one.")
    if any(segment.name == wanted for segment in ledger.segments):
        raise SpanError(f"Duplicate segment name {wanted!r}; this cache has {[s.name for s in ledger.segments]}.")
    return wanted
