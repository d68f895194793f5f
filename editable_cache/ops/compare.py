"""How far two tensors are apart."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Relative distance of ``actual`` from ``expected``, of equal shape.

    The largest difference over the largest value; for 16-bit tensors root mean squares, because single elements of a
    low-precision forward scatter widely. Infinite where something is not a number.
    """
    if not expected.numel():
        return 0.0
    difference = (actual.double() - expected.double()).masked_fill_(actual == expected, 0.0)  # infinite ones too
    reference = expected.double().nan_to_num(0.0, 0.0, 0.0)
    if actual.dtype in LOW_PRECISION:
        error = float(difference.square().mean().sqrt() / reference.square().mean().sqrt().clamp_min(1e-30))
    else:
        error = float(difference.abs().max() / reference.abs().max().clamp_min(1e-30))
    return math.inf if math.isnan(error) else error  # not a number is larger than nothing
