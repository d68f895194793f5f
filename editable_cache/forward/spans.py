"""Which slots, and which cells, a caller means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from editable_cache.cache import Ledger, Segment
from editable_cache.errors import SpanError

Where = Segment | str | slice | tuple[int, int]
"""A span of slots: a segment, its name, a slice without step, or ``(start, stop)``."""

Cells = Where | Tensor | Sequence[Where]
"""Chosen cells: a span, several spans, a bool mask ``[tokens]`` or ``[layers, tokens]``."""


class Chosen(NamedTuple):
    """Ascending slots, and for each layer which of them to write (``[num_layers, num_slots]``; None for all)."""

    slots: Tensor
    rows: Tensor | None


def resolve(ledger: Ledger, where: Where, operation: str) -> tuple[int, int]:
    """``(start, stop)`` of a span that lies inside the cache and is not empty.

    Raises:
        SpanError: if it is empty, reversed, out of range or unknown.
    """
    length = len(ledger)
    if isinstance(where, Segment):
        return ledger.segment(where.name).span
    if isinstance(where, str):
        return ledger.segment(where).span
    if isinstance(where, slice):
        if where.step not in (None, 1):
            raise SpanError(f"{operation}: expected a span without step, got {where}.")
        start, stop = 0 if where.start is None else where.start, length if where.stop is None else where.stop
        if not (isinstance(start, int) and isinstance(stop, int)):
            raise SpanError(f"{operation}: expected a slice of whole numbers, got {where}.")
    elif isinstance(where, tuple) and len(where) == 2 and all(isinstance(w, int) for w in where):
        start, stop = where
    else:
        raise SpanError(
            f"{operation}: expected a segment, a segment's name, a slice or (start, stop), got {type(where).__name__} "
            f"{where!r}."
        )
    if not 0 <= start < stop <= length:
        raise SpanError(f"{operation}: expected 0 <= start < stop <= {length}, got ({start}, {stop}).")
    return start, stop


def choose(ledger: Ledger, num_layers: int, cells: Cells, operation: str) -> Chosen:
    """Slots and rows of chosen cells.

    Raises:
        SpanError: for a mask of the wrong shape or kind, or a span that does not fit.
    """
    if isinstance(cells, Tensor):
        return _from_mask(ledger, num_layers, cells.detach().cpu(), operation)
    spans = cells if isinstance(cells, Sequence) and not isinstance(cells, (str, tuple)) else [cells]
    mask = torch.zeros(len(ledger), dtype=torch.bool)
    for span in spans:
        start, stop = resolve(ledger, span, operation)
        mask[start:stop] = True
    return Chosen(mask.nonzero()[:, 0], None)


def _from_mask(ledger: Ledger, num_layers: int, mask: Tensor, operation: str) -> Chosen:
    shapes = ([len(ledger)], [num_layers, len(ledger)])
    if mask.dtype != torch.bool or list(mask.shape) not in shapes:
        raise SpanError(
            f"{operation}: expected a bool mask of shape {shapes[0]} (tokens) or {shapes[1]} (layers, tokens), got "
            f"{mask.dtype} {list(mask.shape)}."
        )
    if mask.dim() == 1:
        return Chosen(mask.nonzero()[:, 0], None)
    slots = mask.any(dim=0).nonzero()[:, 0]
    rows = mask[:, slots]
    return Chosen(slots, None if bool(rows.all()) else rows)
