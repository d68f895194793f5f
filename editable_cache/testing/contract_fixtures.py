"""What every contract is given: a model, and ids that it knows."""

from __future__ import annotations

from typing import ClassVar

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from editable_cache.testing.contents import ids_known_to


class GivenModel:
    """Override ``model``, and where needed ``ids``."""

    num_ids: ClassVar[int] = 40
    """How many ids the tests may use; more than twice the sliding window, at least 40. For a model that attends in
    blocks a multiple of four blocks.
    """

    @pytest.fixture
    def model(self) -> PreTrainedModel:
        """The model under contract, float32, in evaluation mode; no test changes it."""
        raise NotImplementedError("give the contract a model: override the fixture `model`")

    @pytest.fixture
    def ids(self, model: PreTrainedModel) -> Tensor:
        """Random ids, int64 ``[num_ids]``."""
        return ids_known_to(model, self.num_ids)
