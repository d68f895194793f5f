"""Random sequences of all operations, on families that differ in windows, tables, layouts and scaling."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from editable_cache.testing.cache_machine import CacheMachine
from editable_cache.testing.tiny_models import TINY_FAMILIES


def run(family: str, examples: int, steps: int) -> None:
    class Machine(CacheMachine):
        pass

    Machine.family = family
    # Not shrunk: that takes minutes, and twenty steps can be read as they are.
    phases = (Phase.explicit, Phase.generate)
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=examples, stateful_step_count=steps, phases=phases)
    )


@pytest.mark.parametrize("family", ["gemma3", "llama_yarn", "phi"])
def test_short_histories(family: str) -> None:
    run(family, examples=30, steps=20)


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_long_histories(family: str) -> None:
    run(family, examples=25, steps=40)
