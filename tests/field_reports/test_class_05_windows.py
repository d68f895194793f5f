"""Field reports, class 5: sliding windows."""

from __future__ import annotations

import pytest
import torch
from cache_support import forward, generate, make_cache, shared_model, shared_tokenizer, some_ids
from transformers import DynamicCache

from editable_cache import EditableCache, Skill, UnsupportedModelError
from editable_cache.testing import oracles
from editable_cache.testing.tiny_models import SLIDING_WINDOW, tiny_model

FAMILIES = ["mistral", "gemma2", "gemma3"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", ["prompt_lookup", "assistant"])
def test_b29_rollback_in_a_full_window(family: str, way: str) -> None:
    """huggingface/transformers#46629, #47153, #47447: assisted decoding raises once the window is full."""
    model = shared_model(family)

    def context() -> EditableCache:
        cache = make_cache(family)
        cache.append(some_ids(12)[0])
        cache.splice(Skill.precompile(model, None, some_ids(8, seed=4)[0], name="c"))
        return cache

    plain, cache = context(), context()
    ids = cache.inputs(torch.tensor([9, 10, 9]))["input_ids"]
    options = (
        {"prompt_lookup_num_tokens": 3} if way == "prompt_lookup" else {"assistant_model": tiny_model(family, seed=8)}
    )
    expected = generate(plain, ids, model=model, max_new_tokens=10)
    actual = generate(cache, ids, model=model, max_new_tokens=10, **options)
    assert torch.equal(actual.sequences, expected.sequences)
    oracles.check(torch.cat(actual.logits), torch.cat(expected.logits))
    assert torch.equal(cache.token_ids, actual.sequences[:, :-1])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_b30_steps_then_a_crop(attention: str) -> None:
    """huggingface/transformers#48280: stored and advertised length part; eager crashes, sdpa is silently wrong."""
    model, ids = shared_model("mistral", attn_implementation=attention), some_ids(20)
    cache = EditableCache(model)
    cache.activate_past_recording()
    forward(cache, ids[:, :14], model=model)
    for step in range(14, 17):
        forward(cache, ids[:, step : step + 1], model=model)
    cache.crop(-2)
    logits = forward(cache, ids[:, 15:], model=model)
    oracles.check(logits, oracles.full(model, ids).logits[:, 15:])


@pytest.mark.parametrize("suffix", [1, 5, 12])
@pytest.mark.parametrize("context", [7, 8, 9, 20])
def test_b31_window_borders(context: int, suffix: int) -> None:
    """huggingface/transformers#37574, #34352; lablup/mlxcel#413: off by one at W, and a shifted mask."""
    for family in FAMILIES:
        model, ids = shared_model(family), some_ids(context + suffix)
        cache = make_cache(family)
        cache.append(ids[0, :context])
        logits = forward(cache, ids[:, context:], model=model)
        full = oracles.full(model, ids)
        oracles.check(logits, full.logits[:, context:])
        oracles.check([layer.view()["keys"] for layer in cache.editable_layers], full.keys)
        assert {layer.get_seq_length() for layer in cache.layers} == {context + suffix}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("value", ["delivered", "delivered now at last"])
def test_b33_an_edit_before_the_window(family: str, value: str) -> None:
    """ggml-org/llama.cpp#13194: sliding layers no longer hold what an edit in the past needs. Ours do."""
    model, cache = shared_model(family), make_cache(family)
    cache.append("order: {status} \n", fields={"status": "pending"})
    cache.append(some_ids(30)[0])
    assert cache.field("status").spans[0][1] < SLIDING_WINDOW < len(cache.ledger)
    cache.edit("status", value, method="suffix")
    oracles.check([layer.view()["keys"] for layer in cache.editable_layers], oracles.full(model, cache.token_ids).keys)
    cache.refresh_field("status", "refund")
    assert cache.verify().ok


@pytest.mark.parametrize("family", FAMILIES)
def test_b39_padding_in_the_middle_is_refused_where_the_window_counts_it(family: str) -> None:
    """huggingface/transformers#34232: short rows only. A window counts slots, so inner padding takes room in it."""
    model, caches = shared_model(family), [make_cache(family) for _ in range(2)]
    for cache, count in zip(caches, (3, 12), strict=True):
        cache.append(some_ids(count)[0])
    stacked = EditableCache.stack(caches)
    texts = ["a b", " the refund of the order"]
    for call in (stacked.inputs, stacked.append):
        with pytest.raises(UnsupportedModelError, match=r"window counts slots.*unstack"):
            call(texts)
    equal = [tokens.tolist() for tokens in some_ids(4, batch=2, seed=6)]
    stacked.append(torch.tensor(equal))  # equally many tokens: no padding inside, every row as alone
    for row, cache in enumerate(caches):
        cache.append(equal[row])
    logits = forward(stacked, some_ids(1).expand(2, 1), model=model)
    for row, cache in enumerate(caches):
        oracles.check(logits[row : row + 1], forward(cache, some_ids(1), model=model))


def test_a_chunk_longer_than_the_window() -> None:
    """Field reports section 2: a chunk longer than the sliding window."""
    for family in FAMILIES:
        model, cache = shared_model(family), make_cache(family)
        chunk = Skill.precompile(model, shared_tokenizer(), "the order " * 10, name="long")
        assert len(chunk) > 2 * SLIDING_WINDOW
        cache.append(some_ids(5)[0])
        cache.splice(chunk, seam_tokens=0)
        positions = cache.positions[0, 5:]
        oracles.check(
            [layer.view()["keys"][..., 5:, :] for layer in cache.editable_layers],
            oracles.iso(model, chunk.token_ids, positions).keys,
        )
        assert cache.verify().ok


def test_the_stock_window_would_lose_what_an_edit_needs() -> None:
    """Control of this class: a stock cache keeps 7 of 20 tokens."""
    model, stock = shared_model("mistral"), DynamicCache(config=shared_model("mistral").config)
    forward(stock, some_ids(20), model=model)
    assert stock.layers[0].keys.shape[-2] == SLIDING_WINDOW - 1
