"""Recurrent layers inside of a cache: positions, verification, marks, memory of what can't be kept."""

from __future__ import annotations

import functools

import pytest
import torch
from cache_support import forward, refused
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from editable_cache import EditableCache, Skill, UnsupportedModelError
from editable_cache.adapters import measured
from editable_cache.cache.stored import MOST_MARKS
from editable_cache.testing import oracles, zoo

FAMILIES = pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next", "jamba", "mamba2"])


@functools.cache
def model_of(family: str) -> PreTrainedModel:
    return zoo.build(family)


def ids_of(family: str, count: int = 40, seed: int = 1) -> Tensor:
    return zoo.ids_for(model_of(family), count, seed)


def test_bamba_is_told_its_positions() -> None:
    """It numbers the tokens of every forward from 0 on unless it is told; a stock cache is silently wrong there."""
    model, ids = model_of("bamba:attn"), ids_of("bamba:attn", 30)[None]
    cache, stock = EditableCache(model), DynamicCache(config=model.config)
    got, plain = [], []
    for part in (ids[:, :20], ids[:, 20:]):
        got.append(forward(cache, part, model=model))
        plain.append(forward(stock, part, model=model))
    expected = forward(EditableCache(model), ids, model=model)
    oracles.check(torch.cat(got, dim=1), expected)
    with pytest.raises(AssertionError):
        oracles.check(torch.cat(plain, dim=1), expected)
    assert cache.positions.tolist() == [list(range(30))]


@FAMILIES
def test_verify_judges_cells_and_states(family: str) -> None:
    model, ids = model_of(family), ids_of(family)
    cache = EditableCache(model)
    cache.append(ids[:12])
    assert cache.verify().ok
    assert cache.verify().full_cosine > 0.9999
    for layer in cache.state_layers:
        states = [t for t in (*layer.conv_states.values(), *layer.recurrent_states.values()) if t is not None]
        for state in states:
            kept = state.clone()
            state += 1.0
            assert not cache.verify().ok
            state.copy_(kept)
    assert cache.verify().ok
    cache.splice(Skill.precompile(model, None, ids[12:34], name="chunk"))
    found = cache.verify()
    assert found.ok
    assert found.stale_tokens == len(cache.token_ids[0]) - 12 - cache.ledger.groups[0, 12:].tolist().index(1)
    cache.recompute(slice(None))
    assert cache.verify().stale_tokens == 0


@FAMILIES
def test_a_fork_and_a_checkpoint_keep_their_state(family: str) -> None:
    model, ids = model_of(family), ids_of(family)
    cache = EditableCache(model)
    cache.append(ids[:12])
    fork = cache.fork()
    cache.checkpoint("here")
    cache.append(ids[12:20])
    fork.append(ids[20:25])
    cache.rollback("here")
    cache.append(ids[25:30])
    for one, rest in ((fork, ids[20:25]), (cache, ids[25:30])):
        expected = EditableCache(model)
        expected.append(torch.cat((ids[:12], rest)))
        oracles.check(one.next_token_logits(), expected.next_token_logits())
        assert one.verify().ok


def test_old_marks_are_thinned_out_and_edits_stay_exact() -> None:
    model, ids = model_of("falcon_h1"), ids_of("falcon_h1", 3 * MOST_MARKS)
    cache = EditableCache(model)
    for start in range(0, len(ids), 2):
        cache.append(ids[start : start + 2])
    assert len(cache.marks) <= MOST_MARKS
    cache.remove((5, 9))
    assert cache.verify().ok


def test_tokens_are_fed_one_by_one_where_only_that_is_right() -> None:
    """Jamba drops its state when several tokens run on a filled cache (transformers 5.24)."""
    model, ids = model_of("jamba"), ids_of("jamba")
    assert measured(model).step_tokens == 1
    cache = EditableCache(model)
    cache.append(ids[:12])
    with refused(cache, UnsupportedModelError, NotImplementedError, "5 tokens at once", "cache.append"):
        forward(cache, ids[None, 12:17], model=model)
    cache.append(ids[12:17])
    assert cache.verify().ok
    stock = DynamicCache(config=model.config)
    forward(stock, ids[None, :12], model=model)
    wrong = forward(stock, ids[None, 12:17], model=model)[:, -1]
    with pytest.raises(AssertionError):
        oracles.check(wrong, cache.next_token_logits())


def test_a_state_outside_of_the_cache_is_refused() -> None:
    """RecurrentGemma keeps its state on the module: nobody can put it back."""
    model, ids = model_of("recurrent_gemma"), ids_of("recurrent_gemma")
    cache = EditableCache(model)
    with pytest.raises(UnsupportedModelError) as caught:
        cache.append(ids[:12])
    assert any("behind others" in reason.what for reason in caught.value.reasons)
