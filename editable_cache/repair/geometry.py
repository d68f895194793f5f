"""From scores and a budget to a mask: which cells to repair, in a shape that can be carried out.

A budget is a share of the document's cells. Each geometry spends it in *actions* of its own size, and spends it exactly
to one action: ``round(budget * cells / cells per action)`` of them, at least one. Higher scores come first; ties go to
the earlier slot, then to the lower layer. So a larger budget only adds cells to the mask of a smaller one.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from editable_cache.errors import SpanError

Geometry = Literal["cells", "prefixes", "columns", "suffixes"]
"""S1 free cells, S2 layers 0 to l of a token, S3 all layers of a token, S4 the layers of a token from one layer up."""


def mask_of(scores: Tensor, budget: float, geometry: Geometry, *, from_layer: int = 0) -> Tensor:
    """The cells to repair.

    Args:
        scores: ``[num_layers, num_tokens]``, finite; the higher, the sooner.
        budget: share of all cells, in (0, 1].
        geometry: ``"cells"``: the best cells, one per action. ``"prefixes"``: of each token its lowest layers, one cell
            per action; a prefix is extended where the mean score per cell of the extension is highest, and what is left
            of the budget at the end buys a part of the next extension. ``"columns"``: whole tokens
            by the sum of their scores. ``"suffixes"``: the layers of a token from `from_layer` up, by the sum of their
            scores; only those are paid for, so a budget buys more tokens.
        from_layer: for ``"suffixes"`` only.

    Returns:
        New bool mask ``[num_layers, num_tokens]`` on the CPU.

    Raises:
        SpanError: if the budget is outside (0, 1] or more than the geometry can spend, the scores are empty, not finite
            or of another shape, the geometry is unknown, or `from_layer` is out of range or without use.
    """
    found = _checked(scores, budget, geometry, from_layer)
    count = _num_actions(found, budget, geometry, from_layer)
    if geometry in ("cells", "prefixes"):
        by_token = (found if geometry == "cells" else antitonic(found)).T.contiguous()
        chosen = torch.zeros(by_token.shape, dtype=torch.bool)
        chosen.view(-1)[_best(by_token.view(-1), count)] = True
        return chosen.T.contiguous()
    mask = torch.zeros(found.shape, dtype=torch.bool)
    mask[from_layer:, _best(found[from_layer:].sum(0), count)] = True
    return mask


def antitonic(scores: Tensor) -> Tensor:
    """Each cell's score replaced by the mean of its block, so that no token's scores rise from one layer to the next.

    The blocks of a token are what the greedy choice of the best mean extension takes one after another: from the layers
    that it has, the extension with the highest mean (the longest of them). This is antitonic regression by the greatest
    concave majorant of the cumulative sums (Barlow et al. 1972); see the tests for the greedy choice done step by step.

    Args:
        scores: ``[num_layers, num_tokens]``, finite.

    Returns:
        float64 of the same shape.
    """
    num_layers, num_tokens = scores.shape
    sums = torch.cat([torch.zeros(1, num_tokens, dtype=torch.float64), scores.to(torch.float64).cumsum(0)])
    ends = torch.arange(num_layers + 1)[:, None]
    start = torch.zeros(num_tokens, dtype=torch.int64)
    found = torch.empty(num_layers, num_tokens, dtype=torch.float64)
    while bool((start < num_layers).any()):
        length = ends - start
        means = (sums - sums.gather(0, start[None])) / length.clamp_min(1)
        means = means.masked_fill(length < 1, -torch.inf)
        best = means.flip(0).max(0)
        stop = torch.where(start < num_layers, num_layers - best.indices, num_layers)
        inside = (ends[:-1] >= start) & (ends[:-1] < stop)
        found = torch.where(inside, best.values, found)
        start = stop
    return found.cummin(0).values  # a later block's mean is lower, but for rounding


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest of ``[n]`` scores, the earlier first among equals."""
    return scores.sort(descending=True, stable=True).indices[:count]


def _num_actions(scores: Tensor, budget: float, geometry: str, from_layer: int) -> int:
    num_layers, num_tokens = scores.shape
    if geometry in ("cells", "prefixes"):
        return max(1, round(budget * scores.numel()))
    count = max(1, round(budget * (scores.numel() / (num_layers - from_layer))))
    if count > num_tokens:
        raise SpanError(
            f"mask_of: the suffixes from layer {from_layer} up hold {1 - from_layer / num_layers:.4g} of all cells, "
            f"got a budget of {budget}; lower one of the two, or take whole columns."
        )
    return count


def _checked(scores: Tensor, budget: float, geometry: str, from_layer: int) -> Tensor:
    """Scores as float64 on the CPU, after every refusal that `mask_of` documents but one."""
    if geometry not in get_args(Geometry):
        raise SpanError(f"mask_of: expected a geometry among {', '.join(get_args(Geometry))}, got {geometry!r}.")
    if not isinstance(scores, Tensor) or scores.dim() != 2 or scores.numel() == 0 or scores.is_complex():
        got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise SpanError(f"mask_of: expected real scores [num_layers, num_tokens] with at least one cell, got {got}.")
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget <= 1:  # NaN compares false
        raise SpanError(f"mask_of: expected a budget in (0, 1], a share of the cells, got {budget!r}.")
    if isinstance(from_layer, bool) or not isinstance(from_layer, int) or not 0 <= from_layer < len(scores):
        raise SpanError(f"mask_of: expected from_layer in 0 to {len(scores) - 1}, got {from_layer!r}.")
    if from_layer and geometry != "suffixes":
        raise SpanError(f"mask_of: from_layer={from_layer} is for 'suffixes' alone, got {geometry!r}.")
    found = scores.detach().to("cpu", torch.float64)
    if not bool(found.isfinite().all()):
        raise SpanError(f"mask_of: expected finite scores, got {int((~found.isfinite()).sum())} that are not.")
    return found
