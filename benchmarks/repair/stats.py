"""Intervals over documents: the percentile bootstrap of a mean (Efron & Tibshirani 1993, chapter 13)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

RESAMPLES = 2000


def interval(
    values: Sequence[float], *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """Mean and the bounds of its interval.

    Args:
        values: one number per document, the unit that is drawn again; at least one, all finite.
        level: share of resampled means between the bounds.

    Returns:
        ``(mean, low, high)``; the same for the same arguments. Of one value all three are equal.

    Raises:
        ValueError: for no value, or one that is not finite.
    """
    found = torch.tensor(list(values), dtype=torch.float64)
    if not len(found) or not bool(found.isfinite().all()):
        raise ValueError(f"interval: expected finite numbers, at least one, got {list(values)}.")
    drawn = torch.randint(len(found), (resamples, len(found)), generator=torch.Generator().manual_seed(seed))
    edges = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = found[drawn].mean(1).quantile(edges).tolist()
    return float(found.mean()), low, high
