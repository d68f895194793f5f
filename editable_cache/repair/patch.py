"""Two sources of repaired cells: another cache that has them clean, and the model itself with a span masked out."""

from __future__ import annotations

import torch
from torch import Tensor

from editable_cache.cache import EditableLayer, LedgeredCache
from editable_cache.cache.pieces import spans_of
from editable_cache.errors import SpanError
from editable_cache.forward import run
from editable_cache.forward.outcome import Outcome, Tally, operating
from editable_cache.repair.collect import Span, require_traceable, slots_in


def patch_from(cache: LedgeredCache, clean: LedgeredCache, mask: Tensor, document: Span) -> Outcome:
    """Write the cells of another cache over those of this one where ``mask`` is set. The model does not run.

    Written cells are marked stale: they are those of another context, and no oracle of this one's ids covers them. Keys
    are copied as they stand, so the document must stand at the same positions in both; its slots may differ.

    Args:
        cache: of one row, with its model.
        clean: of the same model; not changed, and nothing is shared with it.
        mask: bool ``[num_layers, num_tokens]`` over the tokens of ``document``.
        document: span of slots ``(start, stop)`` of ``cache``.

    Raises:
        SpanError: for a mask of another shape or without a cell, a span out of range, or several rows.
        CompatibilityError: if ``clean`` belongs to another model, or does not hold these tokens at these positions.
    """
    chosen = require_mask(cache, mask, document, "patch_from")
    source = slots_in(cache, clean, document)
    with operating(cache, "patch_from") as tally:
        for layer_idx, (mine, theirs) in enumerate(zip(cache.editable_layers, clean.editable_layers, strict=True)):
            picked = chosen[_cache_layer(cache, mine, layer_idx)].nonzero()[:, 0]
            if len(picked):
                at = source[picked].to(theirs.device)
                cells = {name: t.index_select(-2, at).to(mine.device) for name, t in theirs.view().items()}
                mine.overwrite((picked + document[0]).to(mine.device), cells)
        tally.pasted += int(chosen.any(0).sum())
        _mark(cache, chosen, document, "patch from another cache")
    return tally.done()


def recompute_without(cache: LedgeredCache, mask: Tensor, document: Span, contamination: Span) -> Outcome:
    """Recompute the document's cells where ``mask`` is set as if the contamination were not there.

    Each token with a chosen cell runs through the whole model and sees what stands before it, cells that were not
    chosen as they are, but not the contamination. With all cells chosen this is the prefill of the document at its
    positions without the contamination. Written cells are marked stale: the contamination is still there, so they are
    not those of the context as its ids say it; and so are live cells behind them.

    Args:
        mask: bool ``[num_layers, num_tokens]`` over the tokens of ``document``.
        document, contamination: spans of slots ``(start, stop)`` that don't overlap.

    Raises:
        SpanError: for a mask of another shape or without a cell, a span out of range, an overlap, or several rows.
        LedgerError: if ids of chosen tokens are unknown.
        UnsupportedModelError: if the model does not honour masks over chosen cells.
    """
    chosen = require_mask(cache, mask, document, "recompute_without")
    require_apart(cache, document, contamination, "recompute_without")
    run.require_masks(cache, "recompute_without")
    with operating(cache, "recompute_without") as tally:
        recompute_masked(cache, tally, chosen, document, contamination)
    return tally.done()


def recompute_masked(cache: LedgeredCache, tally: Tally, chosen: Tensor, document: Span, without: Span | None) -> None:
    """Recompute chosen cells inside an operation, seeing everything or all but a span."""
    picked = chosen.any(0).nonzero()[:, 0]
    rows = chosen[:, picked]
    tally.computed += run.recompute_slots(
        cache, picked + document[0], None if bool(rows.all()) else rows, without=without
    )
    if without is not None:
        _mark(cache, chosen, document, f"repair without {span_name(cache, without)}")


def require_mask(cache: LedgeredCache, mask: Tensor, document: Span, operation: str) -> Tensor:
    """The mask on the CPU, after refusing what can't be repaired.

    Raises:
        SpanError: for a mask of another shape or kind or without a cell, a span out of range, or several rows.
    """
    require_traceable(cache, operation)
    start, stop = document
    if not 0 <= start < stop <= len(cache.ledger):
        raise SpanError(f"{operation}: expected 0 <= start < stop <= {len(cache.ledger)}, got ({start}, {stop}).")
    wanted = [len(cache.layers), stop - start]
    if mask.dtype != torch.bool or list(mask.shape) != wanted or not bool(mask.any()):
        raise SpanError(
            f"{operation}: expected a bool mask {wanted} (layers, tokens of the document) with at least one cell, got "
            f"{mask.dtype} {list(mask.shape)}, {int(mask.sum())} set."
        )
    return mask.detach().cpu()


def require_apart(cache: LedgeredCache, document: Span, contamination: Span, operation: str) -> None:
    """Refuse a contamination that is out of range or does not end before the document begins.

    Raises:
        SpanError: with both spans.
    """
    low, high = contamination
    if not 0 <= low < high <= document[0]:
        raise SpanError(
            f"{operation}: expected a contamination (start, stop) before the document, which begins at slot "
            f"{document[0]} of {len(cache.ledger)}, got ({low}, {high})."
        )


def span_name(cache: LedgeredCache, span: Span) -> str:
    """The name of the segment that is exactly this span, or its slots."""
    names = [segment.name for segment in cache.ledger.segments if segment.span == span]
    return repr(names[0]) if names else f"slots {span[0]} to {span[1] - 1}"


def _mark(cache: LedgeredCache, chosen: Tensor, document: Span, cause: str) -> None:
    """Written cells are stale because of ``cause``, and of no isolated chunk where the whole column was written; live
    cells behind them know what stood there before.
    """
    written, whole = torch.zeros((2, len(cache.ledger)), dtype=torch.bool)
    written[document[0] : document[1]] = chosen.any(0)
    whole[document[0] : document[1]] = chosen.all(0)
    behind = ~written & (cache.ledger.groups == 0).all(0)
    behind[: int(written.nonzero()[0, 0])] = False
    ledger = cache.ledger.marked_fresh(whole.nonzero()[:, 0])
    ledger = ledger.marked_stale(spans_of(written), cause)
    cache.ledger = ledger.marked_stale(spans_of(behind), f"{cause}, of cells before it")


def _cache_layer(cache: LedgeredCache, holder: EditableLayer, default: int) -> int:
    """Index of the cache layer that a holder of cells belongs to."""
    for layer_idx, layer in enumerate(cache.layers):
        if isinstance(layer, EditableLayer) and any(each is holder for each in layer.holders):
            return layer_idx
    return default
