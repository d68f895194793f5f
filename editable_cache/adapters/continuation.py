"""The continuation self-test: does this model, with a stock cache, continue from where a forward ended?

Some models of transformers drop a state when several tokens run on a warm cache, others compute a single token
differently. What follows a splice is such a forward, so it is measured before anything is spliced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from editable_cache.adapters import host
from editable_cache.adapters.states import cache_tensors
from editable_cache.errors import Reason, UnsupportedModelError
from editable_cache.ops import relative_error

NUM_TOKENS = 12
FIRST = 2
LAST = 3
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
LOOSE = 5e-2
"""For bfloat16 and float16, where rounding alone reaches 2e-2: a state that is dropped is seen, a clamped dt is not."""


@dataclass(frozen=True)
class Continuation:
    """How far a forward in parts is from one prefill: relative errors of last logits, keys, values and all states.

    Attributes:
        multi_token_ok: whether several tokens at a time may run on a warm cache.
        single_token_ok: whether one token at a time may.
        multi_token_error: largest relative error of the parts 2, 7 and 3 of 12 tokens; inf if the model raised.
        single_token_error: the same for 2 tokens and 10 times one.
        tolerance: what the errors were held against.
        failure: what the model raised, or an empty string.
    """

    multi_token_ok: bool
    single_token_ok: bool
    multi_token_error: float
    single_token_error: float
    tolerance: float
    failure: str = ""


def continuation(
    model: nn.Module, input_ids: Tensor, position_ids: Tensor | None, *, cache_factory: Callable[[], Any]
) -> Continuation:
    """Prefill `input_ids` `[1, n]`, n >= 7, whole, in three parts, and token by token, each into a new stock cache.

    The last part is short, so that what it drops is not forgotten before it can be seen. Takes n + 3 forwards.

    Raises:
        UnsupportedModelError: if the model does not run with a stock cache at all.
    """
    num_tokens = input_ids.shape[1]
    if num_tokens < FIRST + LAST + 2:
        raise ValueError(f"continuation: expected at least {FIRST + LAST + 2} tokens, got {num_tokens}.")
    try:
        whole = _in_parts(model, input_ids, position_ids, cache_factory, [num_tokens])
    except Exception as error:  # whatever a model raises on a cache that is not its own
        raise UnsupportedModelError(
            "This model does not run with a stock cache, so nothing can be spliced into one; use its own cache.",
            (Reason("a prefill into a stock cache", "logits", f"{type(error).__name__}: {error}"),),
        ) from error
    tolerance = TOLERANCES.get(host.dtype_of(model), LOOSE)
    errors, failures = [], []
    for name, parts in (
        ("several tokens", [FIRST, num_tokens - FIRST - LAST, LAST]),
        ("one token", [FIRST, *[1] * (num_tokens - FIRST)]),
    ):
        try:
            errors.append(_worst(_in_parts(model, input_ids, position_ids, cache_factory, parts), whole))
        except Exception as error:  # whatever a model raises on a warm cache
            errors.append(math.inf)
            failures.append(f"{name}: {type(error).__name__}: {error}")
    multi, single = errors
    return Continuation(multi <= tolerance, single <= tolerance, multi, single, tolerance, "; ".join(failures))


def step_tokens(result: Continuation) -> int | None:
    """How many tokens may run at once on a warm cache: None for any number, 1 for token by token.

    Raises:
        UnsupportedModelError: if neither way gives what a prefill gives.
    """
    if result.multi_token_ok:
        return None
    if result.single_token_ok:
        return 1
    raise UnsupportedModelError(
        "This model does not continue from its own cache, so nothing can be spliced in front of more tokens; prefill "
        "everything at once.",
        (
            Reason("several tokens on a warm cache", "the prefill's result", f"error {result.multi_token_error:.1e}"),
            Reason("one token on a warm cache", "the prefill's result", f"error {result.single_token_error:.1e}"),
        ),
    )


def run_in_steps(
    model: nn.Module, input_ids: Tensor, position_ids: Tensor | None, cache: Any, *, step: int | None
) -> Tensor:
    """Forward `input_ids` `[batch, n]` into `cache`, `step` tokens at a time (None: all at once); last logits."""
    parts = [input_ids.shape[1]] if step is None else _equal_parts(input_ids.shape[1], step)
    return _run_parts(model, input_ids, position_ids, cache, parts)


def _equal_parts(num_tokens: int, step: int) -> list[int]:
    return [min(step, num_tokens - start) for start in range(0, num_tokens, step)]


def _run_parts(
    model: nn.Module, input_ids: Tensor, position_ids: Tensor | None, cache: Any, parts: Sequence[int]
) -> Tensor:
    logits, start = None, 0
    for part in parts:
        span = slice(start, start + part)
        positions = None if position_ids is None else position_ids[..., span]
        logits = host.run(model, input_ids[:, span], cache, position_ids=positions, last_logits_only=True)
        start += part
    assert logits is not None
    return logits[:, -1]


def _in_parts(
    model: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor | None,
    cache_factory: Callable[[], Any],
    parts: Sequence[int],
) -> dict[str, Tensor]:
    cache = cache_factory()
    logits = _run_parts(model, input_ids, position_ids, cache, parts)
    return {"logits": logits, **cache_tensors(cache)}


def _worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest relative error; inf if a tensor is missing, has another shape or is not finite."""
    worst = 0.0
    for name, reference in expected.items():
        tensor = found.get(name)
        if tensor is None or tensor.shape != reference.shape or not bool(torch.isfinite(tensor).all()):
            return math.inf
        worst = max(worst, relative_error(tensor, reference))
    return worst
