"""How far two tensors are apart."""

from __future__ import annotations

import torch
from torch import Tensor

LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Relative distance of ``actual`` from ``expected``, of equal shape.

    The largest difference over the largest value; for 16-bit tensors root mean squares, because single elements of a
    low-precision forward scatter widely.
    """
    if not expected.numel():
        return 0.0
    difference, reference = actual.double() - expected.double(), expected.double()
    if actual.dtype in LOW_PRECISION:
        return float(difference.square().mean().sqrt() / reference.square().mean().sqrt().clamp_min(1e-30))
    return float(difference.abs().max() / reference.abs().max().clamp_min(1e-30))
