"""Every model type of the installed transformers that keeps a state in a stock cache: composed equals threaded."""

from __future__ import annotations

import pytest
from recurrent_models import cache_factory, largest_error, positions, splice
from torch import Tensor

from editable_cache import UnsupportedModelError
from editable_cache.adapters import host
from editable_cache.adapters.continuation import continuation, step_tokens
from editable_cache.adapters.states import slots
from editable_cache.adapters.transitions import capture
from editable_cache.ops import relative_error
from editable_cache.testing.threaded import threaded
from editable_cache.testing.zoo import ZooError, build, ids_for, model_types

TOLERANCE = 1e-4
VISIBLE = 1e-3
HEAD, TAIL = 3, 2
LEAST = 40
"""Transformers 5.24 has 41 such types, those with images counted beside their text models."""


def composes(name: str) -> bool | None:
    """Whether a type has a state to compose, and if so, equal to the oracle at 1e-4 and visibly not without its parts.

    None where the type can't be built or keeps no state in a stock cache.
    """
    try:
        model = build(name)
    except ZooError:
        return None

    def ids(count: int, seed: int) -> Tensor:
        return ids_for(model, count, seed)[None]

    factory = cache_factory(model)
    try:
        host.run(model, ids(4, 0), cache := factory(), position_ids=positions(1, 4))
        if not slots(cache):
            return None
    except Exception:  # whatever a type raises on a stock cache: other tests are about that
        return None
    judged = continuation(model, ids(12, 5), positions(1, 12), cache_factory=factory)
    step = step_tokens(judged)
    prefix, chunk, query = parts = ids(13, 1), ids(21, 2), ids(5, 3)
    alone = capture(model, chunk, positions(14, 21), head=HEAD, tail=TAIL, cache_factory=factory, step=step)
    expected = threaded(model, prefix, chunk, query, head=HEAD, tail=TAIL, step=step)
    right = splice(model, alone, parts, head=HEAD, tail=TAIL, step=step)
    wrong = splice(model, alone, parts, head=HEAD, tail=TAIL, step=step, without="conv")
    equal = max(
        largest_error(right.body, expected.body),
        largest_error(right.end, expected.end),
        relative_error(right.logits, expected.logits[:, -1]),
    )
    return equal <= TOLERANCE and largest_error(wrong.end, expected.end) > VISIBLE


@pytest.mark.slow
def test_all_types_that_keep_a_state_compose() -> None:
    verdicts = {name: verdict for name in model_types() if (verdict := composes(name)) is not None}
    assert [name for name, verdict in verdicts.items() if not verdict] == []
    assert len(verdicts) >= LEAST


@pytest.mark.parametrize("name", ["inkling_text", "glm5_next", "qwen4_exp_text", "falcon_mamba", "lfm3"])
def test_types_that_are_unlike_the_others(name: str) -> None:
    """Several states in a layer, recurrent beside indexed attention, ids as a state, no attention at all."""
    if name not in model_types():
        pytest.skip("this transformers does not know the type")
    assert composes(name)


@pytest.mark.parametrize("name", ["minimax", "xlstm", "recurrent_gemma", "rwkv"])
def test_states_outside_of_the_cache_are_refused(name: str) -> None:
    """MiniMax and xLSTM take a cache of their own, RecurrentGemma and RWKV keep their state in modules or outputs."""
    model = build(name)
    with pytest.raises(UnsupportedModelError):
        step_tokens(
            continuation(model, ids_for(model, 12, 5)[None], positions(1, 12), cache_factory=cache_factory(model))
        )
