"""Every tiny family keeps the adapter contract, or is refused before anything is changed."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from editable_cache.testing.adapter_contract import AdapterContract, RefusalContract
from editable_cache.testing.contents import shared_model
from editable_cache.testing.tiny_models import REFUSED_FAMILIES, TINY_FAMILIES


@pytest.fixture(params=TINY_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestSupported(AdapterContract):
    @pytest.fixture
    def model(self, family: str) -> PreTrainedModel:
        return shared_model(family)


class TestRefused(RefusalContract):
    @pytest.fixture(params=REFUSED_FAMILIES)
    def model(self, request: pytest.FixtureRequest) -> PreTrainedModel:
        return shared_model(request.param)
