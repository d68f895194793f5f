"""Error budgets that come from data: how wrong may a low-precision result be?

In float32 every exact operation meets a bar of 1e-4 (`oracles.check`). In bfloat16 or float16 no such number
holds for all models, layers and lengths. So a result is judged by what another, independent path in the same
precision gets wrong against the exact states. Two such paths:

* `rounding_budget`: the exact states rounded to the dtype. For what only copies, stores or rotates.
* `forward_budget`: the stock model run in the dtype. For what runs the model.

A budget is a bound to hold against, so a test also shows that a wrong answer exceeds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from editable_cache.testing.oracles import OracleResult

LOW_PRECISION = (torch.bfloat16, torch.float16, torch.float32)


class ErrorBudget(NamedTuple):
    """Errors relative to the exact states: worst element over largest magnitude, and root mean square."""

    max: float
    rms: float

    def times(self, headroom: float) -> ErrorBudget:
        """This budget, `headroom` times as wide."""
        return ErrorBudget(self.max * headroom, self.rms * headroom)


def measured_error(actual: Tensor, exact: Tensor) -> ErrorBudget:
    """Return the errors of `actual` against `exact` of the same shape; infinite if one is not a number."""
    if actual.shape != exact.shape:
        raise ValueError(f"measured_error: got shape {tuple(actual.shape)}, expected {tuple(exact.shape)}")
    exact = exact.detach().double().cpu()
    difference = actual.detach().double().cpu() - exact
    scale, rms_scale = exact.abs().max().item(), exact.square().mean().sqrt().item()
    if not (difference.isfinite().all() and math.isfinite(scale)):
        return ErrorBudget(math.inf, math.inf)
    if scale == 0.0:
        worst = 0.0 if not difference.any() else math.inf
        return ErrorBudget(worst, worst)
    return ErrorBudget(difference.abs().max().item() / scale, difference.square().mean().sqrt().item() / rms_scale)


def rounding_budget(states: Tensor, dtype: torch.dtype, *, roundings: int = 1, headroom: float = 2.0) -> ErrorBudget:
    """Return what `roundings` roundings of the exact `states` to `dtype` may cost.

    The error of one rounding is measured on the states themselves. More of them add up in the worst element
    and as independent errors in the root mean square. `headroom` covers what a rotation does to a rounded
    pair (its worst element grows by at most sqrt 2) and the luck of the draw. A chunk stored in `dtype`,
    rotated in float32 and stored again has two roundings.

    Args:
        states: Exact states of any shape, float64 (or float32 for a bfloat16 or float16 budget).
        dtype: The precision to judge.
        roundings: How often the path under test rounds to `dtype`.
        headroom: Factor on top of the measured error.
    """
    _require_finer(states, dtype, "rounding_budget")
    if roundings < 1:
        raise ValueError(f"rounding_budget: expected at least 1 rounding, got {roundings}")
    once = measured_error(states.to(dtype), states)
    return ErrorBudget(once.max * roundings, once.rms * math.sqrt(roundings)).times(headroom)


def forward_budget(low: OracleResult, exact: OracleResult, *, headroom: float = 2.0) -> dict[str, list[ErrorBudget]]:
    """Return the budget per tensor of anything that runs the model in low precision.

    `low` and `exact` come from the same oracle on the same tokens: once by the stock model in the low
    precision, once in float64 with the *same* (rounded) weights, so that only arithmetic differs:

        low_model = tiny_model("llama", dtype=torch.bfloat16)
        exact_model = tiny_model("llama", dtype=torch.float64)
        exact_model.load_state_dict(low_model.state_dict())

    The path under test must be another one than `low`, else it would judge itself. Keys of the result are
    `logits` (one budget), `keys` and `values` (one per layer).
    """
    _require_finer(exact.logits, low.logits.dtype, "forward_budget")

    def budgets(low_states: Sequence[Tensor], exact_states: Sequence[Tensor]) -> list[ErrorBudget]:
        pairs = zip(low_states, exact_states, strict=True)
        return [measured_error(a, e).times(headroom) for a, e in pairs]

    return {
        "logits": budgets([low.logits], [exact.logits]),
        "keys": budgets(low.keys, exact.keys),
        "values": budgets(low.values, exact.values),
    }


def check_budget(actual: Tensor, exact: Tensor, budget: ErrorBudget, what: str = "states") -> ErrorBudget:
    """Raise AssertionError unless `actual` is as near to `exact` as `budget` allows; return its error."""
    error = measured_error(actual, exact)
    if not (error.max <= budget.max and error.rms <= budget.rms):
        raise AssertionError(
            f"{what}: max error {error.max:.3g} (budget {budget.max:.3g}), "
            f"rms error {error.rms:.3g} (budget {budget.rms:.3g}), both relative to the exact states"
        )
    return error


def _require_finer(states: Tensor, dtype: torch.dtype, what: str) -> None:
    if dtype not in LOW_PRECISION:
        raise ValueError(f"{what}: expected one of {', '.join(map(str, LOW_PRECISION))} to judge, got {dtype}")
    if torch.finfo(states.dtype).eps >= torch.finfo(dtype).eps:
        raise ValueError(f"{what}: expected exact states finer than {dtype}, got {states.dtype}; use float64")
