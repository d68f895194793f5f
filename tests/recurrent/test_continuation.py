"""The continuation self-test sees which models transformers continues wrongly, and how."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recurrent_models import CONFIGS, build, cache_factory, ids, positions
from torch import Tensor
from transformers import DynamicCache, LlamaConfig
from transformers.cache_utils import LinearAttentionLayer

from editable_cache import UnsupportedModelError
from editable_cache.adapters.continuation import Continuation, continuation, run_in_steps, step_tokens

MULTI_TOKEN_WRONG = {"jamba", "zamba"}
"""The multi-token scan of Mamba-1 drops the initial state (transformers 5.24, `mamba_selective_scan`)."""
SINGLE_TOKEN_WRONG = {"zamba2", "nemotron_h"}
"""Decoding does not clamp the step size as the prefill does (transformers PR 48989)."""


def measured(name: str, cache: Any = None) -> Continuation:
    model = build(name)
    return continuation(model, ids(12, 5), positions(1, 12), cache_factory=cache or cache_factory(model))


@pytest.mark.parametrize("name", CONFIGS)
def test_each_family_is_judged_as_it_is(name: str) -> None:
    result = measured(name)
    assert result.multi_token_ok == (name not in MULTI_TOKEN_WRONG)
    assert result.single_token_ok == (name not in SINGLE_TOKEN_WRONG)
    assert step_tokens(result) == (1 if name in MULTI_TOKEN_WRONG else None)
    for ok, error in (
        (result.multi_token_ok, result.multi_token_error),
        (result.single_token_ok, result.single_token_error),
    ):
        assert error <= 1e-5 if ok else error >= 1e-3


def test_the_way_that_is_allowed_is_the_prefill() -> None:
    """Independently of the self-test: the last logits of a model that must run token by token."""
    model = build("jamba")
    whole = run_in_steps(model, ids(9, 1), positions(1, 9), DynamicCache(config=model.config), step=None)
    for step, right in ((1, True), (None, False)):
        cache = DynamicCache(config=model.config)
        run_in_steps(model, ids(9, 1)[:, :4], positions(1, 4), cache, step=None)
        parts = run_in_steps(model, ids(9, 1)[:, 4:], positions(5, 5), cache, step=step)
        assert torch.allclose(parts, whole, atol=1e-4) == right


class _Leaky(LinearAttentionLayer):
    """Loses a hundredth of its state with every write."""

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        return super().update_recurrent_state(0.99 * recurrent_states, state_idx, **kwargs)


def test_a_model_that_continues_neither_way_is_refused() -> None:
    model = build("bamba")

    def leaky() -> DynamicCache:
        cache = DynamicCache(config=model.config)
        cache.layers[0] = _Leaky()
        return cache

    result = measured("bamba", leaky)
    assert (result.multi_token_ok, result.single_token_ok) == (False, False)
    with pytest.raises(UnsupportedModelError, match="does not continue") as refusal:
        step_tokens(result)
    assert len(refusal.value.reasons) == 2


class _Deaf(LinearAttentionLayer):
    """Refuses what comes after the first write. Decoding writes the state in place, so it is not refused."""

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        if self.is_recurrent_states_initialized[state_idx]:
            raise RuntimeError("no second write")
        return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)


def test_what_a_model_raises_is_told() -> None:
    model = build("bamba")

    def deaf() -> DynamicCache:
        cache = DynamicCache(config=model.config)
        cache.layers[0] = _Deaf()
        return cache

    result = measured("bamba", deaf)
    assert result.multi_token_error == float("inf")
    assert result.failure == "several tokens: RuntimeError: no second write"
    assert step_tokens(result) == 1


def test_too_few_tokens_are_refused() -> None:
    model = build("bamba")
    with pytest.raises(ValueError, match="at least 7 tokens, got 6"):
        continuation(model, ids(6, 5), None, cache_factory=cache_factory(model))


def test_a_model_that_takes_no_stock_cache_is_refused() -> None:
    model = build("bamba")
    with pytest.raises(UnsupportedModelError, match="a prefill into a stock cache: expected logits, got ValueError"):
        continuation(model, ids(12, 5), None, cache_factory=lambda: DynamicCache(config=LlamaConfig()))
