"""What a repair is against: said by the caller, or known to the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from editable_cache.cache import Field, Ledger, LedgeredCache, Stale
from editable_cache.errors import SpanError
from editable_cache.forward.spans import Where, resolve
from editable_cache.repair.collect import Span, Traced
from editable_cache.repair.known import last_traced
from editable_cache.repair.patch import require_apart, span_name

FOLLOWING = ("recompute", ", of cells before it")
"""Ends of the causes that only say that cells in front were mended."""


class Target(NamedTuple):
    """What to repair.

    Attributes:
        document: span of slots.
        without: span that the new cells don't see, or None.
        writer: span that wrote to the old cells, if known.
        field: the field that the writer holds a value of, if any.
        reason: for people.
        pending: bool ``[num_tokens]``, tokens of the document that are to be mended; the others are right already.
        isolated: it is a chunk that saw nothing of what precedes it, rather than something that it should not have.
    """

    document: Span
    without: Span | None
    writer: Span | None
    field: Field | None
    reason: str
    pending: Tensor
    isolated: bool = False


def find_target(
    cache: LedgeredCache, traces: Sequence[Traced], document: Where | None, contamination: Where | None
) -> Target:
    """What is to be repaired, as said by the caller or, for what was not said, by the ledger.

    Raises:
        SpanError: if the ledger does not know exactly one thing, or spans don't fit.
    """
    ledger = cache.ledger
    span = None if document is None else resolve(ledger, document, "repair")
    if contamination is not None:
        cause = resolve(ledger, contamination, "repair")
        field = next((field for field in ledger.fields if cause in field.spans), None)
        span = span or (cause[1], last_traced(ledger, traces, cause, field) or len(ledger))
        if span[0] >= span[1]:
            raise SpanError(f"repair: nothing stands behind the contamination {cause}; expected a document there.")
        require_apart(cache, span, cause, "repair")
        everything = torch.ones(span[1] - span[0], dtype=torch.bool)
        return Target(span, cause, cause, field, f"without {span_name(cache, cause)}", everything)
    low, high = span or (0, len(ledger))
    causes = _causes(ledger, low, high)
    isolated, groups = _isolated(ledger, low, high)
    if len(causes) == 1 and not len(groups):
        (name, stale), *_ = causes.items()
        field = next((field for field in ledger.fields if name == _of_field(field)), None)
        slots = _stale(ledger)[low:high].nonzero()[:, 0] + low
        start, stop = int(slots[0]), int(slots[-1]) + 1
        writer = None if field is None else field.spans[0]
        if span is None and writer is not None:
            traced = last_traced(ledger, traces, writer, field)
            stop = stop if traced is None or traced <= start else min(stop, traced)
        return Target((start, stop), None, writer, field, f"stale: {stale[-1].cause}", _stale(ledger)[start:stop])
    if len(groups) == 1 and not causes:
        start, stop = int(isolated[0]), int(isolated[-1]) + 1
        pending = ledger.groups[0, start:stop] != 0
        reason = "isolated: it never saw what precedes it"
        return Target((start, stop), None, (0, start), None, reason, pending, isolated=True)
    known = list(causes) + [f"isolated chunk {number}" for number in groups]
    raise SpanError(
        "repair: expected exactly one cause that the ledger knows, got "
        f"{known or 'none'}. Pass contamination= (the span whose influence is to go), or document= (the span to "
        "repair, with one stale cause or one isolated chunk in it)."
    )


def _causes(ledger: Ledger, low: int, high: int) -> dict[str, list[Stale]]:
    """Stale spans in ``[low, high)`` by cause; all changes of one field are one, and mended cells in front are none
    unless nothing else is known.
    """
    found: dict[str, list[Stale]] = {}
    for stale in ledger.stale:
        if stale.start < high and low < stale.stop:
            names = (_of_field(field) for field in ledger.fields if stale.cause.startswith(_of_field(field)))
            found.setdefault(next(names, stale.cause), []).append(stale)
    return {name: spans for name, spans in found.items() if not name.endswith(FOLLOWING)} or found


def _of_field(field: Field) -> str:
    """How the causes begin that a change of a field leaves."""
    return f"field {field.name}:"


def _isolated(ledger: Ledger, low: int, high: int) -> tuple[Tensor, list[int]]:
    """Slots in ``[low, high)`` of isolated chunks that have something in front of them, and the chunks' numbers."""
    first = ledger.groups[0, :1]
    mask = (ledger.groups[0] != 0) & (ledger.groups[0] != first)
    slots = mask[low:high].nonzero()[:, 0] + low
    return slots, ledger.groups[0, slots].unique().tolist()


def _stale(ledger: Ledger) -> Tensor:
    mask = torch.zeros(len(ledger), dtype=torch.bool)
    for stale in ledger.stale:
        mask[stale.start : stale.stop] = True
    return mask
