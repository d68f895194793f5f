"""What is measured of a decision, against the exact one."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_GAP = 1.0
"""Logits; an item whose stale and exact caches differ by less in their gap has no recovery to speak of."""


def recovery(gap: float, stale: float, exact: float) -> float | None:
    """Share of the way from the stale to the exact decision: 0 acts as if nothing had changed, 1 as a full prefill.

    None where the two ends are less than ``LEAST_GAP`` apart (the study, section 3).
    """
    if abs(exact - stale) < LEAST_GAP:
        return None
    return (gap - stale) / (exact - stale)


def p_correct(gap: float) -> float:
    """Probability of the right answer among the two, from the gap of their logits."""
    return float(torch.tensor(gap, dtype=torch.float64).sigmoid())


def cosine(first: Tensor, second: Tensor) -> float:
    """Cosine of two logit vectors."""
    return float(torch.nn.functional.cosine_similarity(first.double(), second.double(), dim=-1))


def divergence(exact: Tensor, found: Tensor) -> float:
    """KL divergence of the next-token distribution from the exact one, in nats."""
    p, q = exact.double().log_softmax(-1), found.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1))
