from __future__ import annotations

import random

import pytest
import torch
from hypothesis import settings
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from editable_cache.testing import real_models

torch.set_num_threads(1)  # tiny models: with more, threads only wait for each other

# The same examples in every run: a failure is a finding, never a coincidence.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")

_REAL_MODEL_FIXTURES = frozenset(real_models.MODEL_NAMES)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not _REAL_MODEL_FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("real_model")


def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


# Before the fixtures and before the test: it never matters which test set up a session fixture.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    _seed()


def _require(name: str) -> None:
    reason = real_models.available(name)
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct in float32 and its tokenizer, shared by all tests: leave them unchanged."""
    _require("smollm2")
    return real_models.load_smollm2()


@pytest.fixture(scope="session")
def gemma3_270m() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Gemma 3 270M in float32 and its tokenizer, shared by all tests: leave them unchanged."""
    _require("gemma3_270m")
    return real_models.load_gemma3_270m()
