"""Families of every kind keep the contract that they can keep, or are refused before anything is changed."""

from __future__ import annotations

import functools

import pytest
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from editable_cache.testing import zoo
from editable_cache.testing.adapter_contract import AdapterContract, RefusalContract
from editable_cache.testing.contents import shared_model
from editable_cache.testing.hybrid_contract import HybridContract
from editable_cache.testing.tiny_models import (
    LATENT_FAMILIES,
    POSITION_FREE_FAMILIES,
    REFUSED_FAMILIES,
    TINY_FAMILIES,
    tiny_tokenizer,
)

ROTATING = (
    # latent attention: stored half-split, interleaved, and a latent of the query too
    "deepseek_v2",
    "minicpm3",
    # keys of an indexer beside it, which leaves tokens out
    "glm_moe_dsa:topk4",
    # layers that read the keys of others
    "gemma3n_text",
    "gemma4_text",
    # layers without a rotation among others
    "cohere2",
    "exaone4",
    # interleaved and partial layouts
    "gptj",
    "glm4",
    "codegen",
    # a frequency set for each kind of layer, local attention
    "modernbert-decoder",
    "mimo_v2_flash",
    # experts; learned sinks
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    # the opposite sense of rotation
    "nanochat",
    "olmo2",
    "phi3",
)

HYBRIDS = ("falcon_h1", "bamba", "qwen3_next", "lfm2", "jamba", "zamba2", "kimi_linear")


@functools.cache
def zoo_model(name: str) -> PreTrainedModel:
    """A model of the zoo that many tests share."""
    model = zoo.build(name)
    model.generation_config.use_cache = True  # MPT's config says no
    return model


def installed(*families: str) -> list[str]:
    """Those types of the zoo that the installed transformers has."""
    return [family for family in families if family.split(":")[0] in zoo.model_types()]


def model_of(family: str) -> PreTrainedModel:
    """A tiny family, or a model of the zoo."""
    known = (*TINY_FAMILIES, *LATENT_FAMILIES, *POSITION_FREE_FAMILIES, *REFUSED_FAMILIES)
    return shared_model(family) if family in known else zoo_model(family)


class OnFamilies:
    """The fixture ``model``, for a list of families."""

    @pytest.fixture
    def model(self, family: str) -> PreTrainedModel:
        return model_of(family)


class OfZoo(OnFamilies):
    """And ids of the zoo."""

    num_ids = 48

    @pytest.fixture
    def ids(self, model: PreTrainedModel) -> Tensor:
        return zoo.ids_for(model, self.num_ids, 3)


@pytest.mark.parametrize("family", [*TINY_FAMILIES, *LATENT_FAMILIES])
class TestTinyFamilies(OnFamilies, AdapterContract):
    pass


@pytest.mark.parametrize("family", installed(*ROTATING))
class TestRotating(OfZoo, AdapterContract):
    pass


@pytest.mark.parametrize("family", ["llama4_text"])
class TestInBlocks(OfZoo, AdapterContract):
    """A chunk may stand only where the blocks of attention cut it as they did when it was compiled."""

    num_ids = 64


@pytest.mark.parametrize("family", ["roformer"])
class TestPositionsAreSlots(OfZoo, AdapterContract):
    positions_given = False
    recomputes_cells = False


@pytest.mark.parametrize("family", [*POSITION_FREE_FAMILIES, "falcon:alibi"])
class TestPositionFree(OfZoo, AdapterContract):
    rotates = False
    positions_given = False
    recomputes_cells = False


@pytest.mark.parametrize("family", ["mpt"])
class TestPositionFreeWithMasks(OfZoo, AdapterContract):
    rotates = False
    positions_given = False


@pytest.mark.parametrize("family", installed(*HYBRIDS))
class TestHybrids(OfZoo, HybridContract):
    @pytest.fixture
    def model(self, family: str) -> PreTrainedModel:
        return zoo_model(family)  # their states live longer than those of the tiny families


@pytest.mark.parametrize("family", ["mamba2"])
class TestStatesAlone(OfZoo, HybridContract):
    positions_given = False


@pytest.mark.parametrize("family", REFUSED_FAMILIES)
class TestRefused(OnFamilies, RefusalContract):
    @pytest.fixture
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return tiny_tokenizer()


@pytest.mark.parametrize("family", ["bert", "opt", "hunyuan_v1_dense"])
class TestRefusedOfZoo(OfZoo, RefusalContract):
    pass


def test_at_least_twenty_five_families() -> None:
    moved = {
        *TINY_FAMILIES,
        *LATENT_FAMILIES,
        *ROTATING,
        "llama4_text",
        "roformer",
        *POSITION_FREE_FAMILIES,
        "mpt",
        "falcon:alibi",
    }
    assert len(moved) >= 25
    types = [name.split(":")[0] for name in ROTATING]
    assert len(set(types)) == len(types)
