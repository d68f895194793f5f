"""Oracles on layers that hold more, or less, than keys and values."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from editable_cache.testing import oracles, parts, zoo
from editable_cache.testing.contents import must_differ

KINDS = {
    "deepseek_v2": {"keys", "values"},
    "glm_moe_dsa:topk4": {"keys", "values", "indexer_keys"},
    "minimax_m3_vl_text": {"keys", "values", "idx_keys"},
    "gemma3n_text": {"keys", "values"},
    "bamba": {"keys", "values"},
    "mamba2": set(),
}


@functools.cache
def model_of(name: str) -> PreTrainedModel:
    return zoo.build(name)


@pytest.mark.parametrize("name", KINDS)
def test_every_token_tensor_is_carried(name: str) -> None:
    model = model_of(name)
    ids = zoo.ids_for(model, 21, 1)
    result = oracles.full(model, ids)
    assert {key for layer in result.layers for key in layer} == KINDS[name]
    assert all(tensor.dim() == 4 and tensor.shape[-2] == 21 for tensor in result.cells.values())
    assert bool(result.states) == (name in ("bamba", "mamba2"))
    stock = DynamicCache(config=model.config)
    assert len(result.layers) == len(stock.layers)
    oracles.check(result, oracles.full(model, ids))
    must_differ({**result.cells, **result.states}, {**(o := oracles.full(model, ids.flip(0))).cells, **o.states})


def test_shared_layers_hold_nothing() -> None:
    layers = oracles.full(model_of("gemma3n_text"), zoo.ids_for(model_of("gemma3n_text"), 9, 1)).layers
    assert layers[0]
    assert len([layer for layer in layers if layer]) < model_of("gemma3n_text").config.num_hidden_layers


@pytest.mark.parametrize("name", ["deepseek_v2", "glm_moe_dsa:topk4", "gemma3n_text"])
def test_layer_cells_between_all_and_nothing(name: str) -> None:
    model = model_of(name)
    ids = zoo.ids_for(model, 21, 1)
    positions = torch.arange(21)
    full, other = oracles.full(model, ids), oracles.full(model, zoo.ids_for(model, 21, 2))
    everything, nothing = torch.ones(21, dtype=torch.bool), torch.zeros(21, dtype=torch.bool)
    oracles.check(oracles.layer_cells(model, ids, positions, other.layers, everything), full)
    kept = oracles.layer_cells(model, ids, positions, other.layers, nothing)
    oracles.check(kept.cells, other.cells)
    must_differ(kept.cells, full.cells)


def test_indexer_keys_are_substituted_too() -> None:
    """With the right keys and values but an indexer that looks at others, other tokens are chosen."""
    model = model_of("glm_moe_dsa:topk4")
    ids = zoo.ids_for(model, 21, 1)
    full, other = oracles.full(model, ids), oracles.full(model, zoo.ids_for(model, 21, 2))
    mixed = [
        {name: (theirs if name == "indexer_keys" else mine)[name] for name in mine}
        for mine, theirs in zip(full.layers, other.layers, strict=True)
    ]
    nothing = torch.zeros(21, dtype=torch.bool)
    oracles.check(oracles.layer_cells(model, ids, torch.arange(21), full.layers, nothing).logits, full.logits)
    must_differ(oracles.layer_cells(model, ids, torch.arange(21), mixed, nothing).logits, full.logits)


def test_check_refuses_other_names() -> None:
    one = torch.ones(1, 1, 2, 2)
    with pytest.raises(ValueError, match="expected"):
        oracles.check({"layer 0 keys": one}, {"layer 0 values": one})
    with pytest.raises(ValueError, match="tensors"):
        oracles.check({"a": one}, {"a": one, "b": one})


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v2"])
def test_frozen_in_parts_is_frozen(name: str) -> None:
    """The reference without a mask over chosen cells equals the one with it."""
    model = model_of(name)
    texts = zoo.ids_for(model, 38, 4).split([16, 14, 8])
    ids, groups = torch.cat(texts), torch.tensor([0] * 16 + [1] * 14 + [0] * 8)
    whole = oracles.frozen(model, ids, torch.arange(38), groups)
    oracles.check(parts.frozen_in_parts(model, texts, given=True), whole)
    oracles.check(parts.frozen(model, texts, given=True), whole)
    must_differ(parts.frozen_in_parts(model, texts, given=True).logits, oracles.full(model, ids).logits)


def test_a_mask_that_the_model_does_not_apply_is_not_used() -> None:
    """Moshi's config names a window, but its forward has none: a mask with the window would be another model."""
    model = model_of("moshi")
    texts = zoo.ids_for(model, 38, 4).split([16, 14, 8])
    ids, groups = torch.cat(texts), torch.tensor([0] * 16 + [1] * 14 + [0] * 8)
    must_differ(
        parts.frozen(model, texts, given=True).logits, oracles.frozen(model, ids, torch.arange(38), groups).logits
    )
