"""Which traces tell of the tokens that stand in a cache now: of the same writer, and found again by their ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from editable_cache.cache import UNKNOWN, Field, Ledger
from editable_cache.repair.collect import Span, Traced
from editable_cache.repair.trace import PrefillTrace


class Known(NamedTuple):
    """What traces tell of a document.

    Attributes:
        trace: of the covered tokens, in their order; shares nothing with the traces it is made of.
        covered: bool ``[num_tokens]`` of the document.
    """

    trace: PrefillTrace
    covered: Tensor


def known_of(
    ledger: Ledger, document: Span, writer: Span | None, field: Field | None, traces: Sequence[Traced]
) -> Known | None:
    """The traces of this writer joined, as far as they tell of the document; the later wins. None if none does."""
    start, stop = document
    which, row = (torch.full((stop - start,), -1, dtype=torch.int64) for _ in range(2))
    for number, each in enumerate(traces):
        standing = _standing(ledger, each) if _same_writer(ledger, writer, field, each) else None
        low, high = (max(standing[0], start), min(standing[1], stop)) if standing else (start, start)
        if standing and low < high:
            which[low - start : high - start] = number
            row[low - start : high - start] = torch.arange(low, high) - standing[0]
    covered = which >= 0
    if not bool(covered.any()):
        return None
    pieces: dict[str, list[Tensor]] = {}
    for number, count in zip(*torch.unique_consecutive(which[covered], return_counts=True), strict=True):
        done = sum(piece.shape[-1] for piece in pieces.get("inflow", ()))
        rows = row[covered][done : done + int(count)]
        for name, value in vars(traces[int(number)].trace).items():
            pieces.setdefault(name, []).append(value[..., rows])
    return Known(PrefillTrace(**{name: torch.cat(parts, dim=-1) for name, parts in pieces.items()}), covered)


def last_traced(ledger: Ledger, traces: Sequence[Traced], writer: Span, field: Field | None) -> int | None:
    """The slot behind the last token that a trace of this writer tells of."""
    found = (_standing(ledger, each) for each in traces if _same_writer(ledger, writer, field, each))
    return max((standing[1] for standing in found if standing is not None and standing[1] > writer[1]), default=None)


def _same_writer(ledger: Ledger, writer: Span | None, field: Field | None, each: Traced) -> bool:
    """Whether a trace tells of what wrote to the document: the same tokens, or a span that holds the field (whose value
    may have changed since).
    """
    if writer is None:
        return False
    low, high = each.contamination
    if field is not None and any(low <= start < high for start, _ in field.spans):
        return True
    ids = ledger.ids[0, slice(*writer)]
    if not torch.equal(ids, each.contamination_ids):
        return False
    return writer == each.contamination or not bool((ids == UNKNOWN).any())


def _standing(ledger: Ledger, each: Traced) -> Span | None:
    """Where the traced tokens stand now: where they were, else the one place that has them all, else, where they were,
    those that the end of the cache has left.
    """
    ids, traced, expected = ledger.ids[0], each.trace.token_ids, each.document[0]
    count = len(traced)
    if torch.equal(ids[expected : expected + count], traced):
        return expected, expected + count
    if bool((traced == UNKNOWN).any()):
        return None
    places = (ids[: max(0, len(ids) - count + 1)] == traced[0]).nonzero()[:, 0].tolist()
    places = [at for at in places if torch.equal(ids[at : at + count], traced)]
    if len(places) == 1:
        return places[0], places[0] + count
    left = len(ids) - expected
    return (expected, len(ids)) if 0 < left < count and torch.equal(ids[expected:], traced[:left]) else None
