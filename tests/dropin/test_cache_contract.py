"""The methods of transformers' cache contract, copies, autograd and inference mode: all as `DynamicCache` has them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from cache_support import (
    Snapshot,
    forward,
    generate,
    go_on,
    make_cache,
    make_context,
    shared_model,
    shared_tokenizer,
    some_ids,
)
from transformers import DynamicCache

from editable_cache import EditableCache, Skill, SpanError
from editable_cache.adapters import host
from editable_cache.testing.tiny_models import tiny_model

STEPS: dict[str, Any] = {
    "crop": lambda cache: cache.crop(-3),
    "crop_all": lambda cache: cache.crop(-99),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0, 1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([2, 0])),
    "select_mask": lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.parametrize("make", ["model", "config", "bare"])
@pytest.mark.parametrize("step", STEPS)
def test_contract_method_equals_stock(step: str, make: str) -> None:
    model, ids = shared_model(), some_ids(9, batch=3)
    ours = {
        "model": lambda: EditableCache(model),
        "config": lambda: EditableCache(config=model.config),
        "bare": EditableCache,
    }[make]()
    stock = DynamicCache()
    for cache in (ours, stock):
        forward(cache, ids)
        STEPS[step](cache)
    assert ours.get_seq_length() == stock.get_seq_length()
    assert ours.get_mask_sizes(4, 0) == stock.get_mask_sizes(4, 0)
    if step in ("crop_all", "reset"):
        stock = DynamicCache()  # what is left of a stock cache still has a batch size
    rows = 3 if step in ("crop_all", "reset") else stock.layers[0].keys.shape[0]
    more = some_ids(4, batch=rows, seed=2)
    logits = forward(ours, more)
    assert torch.allclose(logits, forward(stock, more), atol=1e-5)
    for mine, theirs in zip(ours.layers, stock.layers, strict=True):
        assert torch.allclose(mine.keys, theirs.keys, atol=1e-5)
        assert torch.allclose(mine.values, theirs.values, atol=1e-5)
    if make == "model":
        assert ours.token_ids.shape == (rows, ours.get_seq_length())
        assert ours.verify().ok


def test_an_emptied_cache_takes_another_batch_size() -> None:
    for empty in (lambda c: c.crop(-9), lambda c: c.reset(), lambda c: c.remove((0, 9))):
        cache = make_cache()
        forward(cache, some_ids(9, batch=3))
        empty(cache)
        ids = some_ids(6)
        assert torch.allclose(forward(cache, ids), forward(DynamicCache(), ids), atol=1e-5)
        assert cache.layers[0].keys.shape[0] == cache.ledger.batch == 1


def test_a_positive_crop_is_refused() -> None:
    cache = make_context()
    before = Snapshot(cache)
    with pytest.raises(SpanError, match=r"crop\(-3\)"):
        cache.crop(3)
    before.check(cache)


@pytest.mark.parametrize("how", [copy.copy, EditableCache.fork], ids=["copy", "fork"])
def test_copy_is_a_fork(how: Any) -> None:
    """Stock `copy.copy` shares the layers: a forward on the copy grows the original."""
    cache = make_context()
    before = Snapshot(cache)
    twin = how(cache)
    assert isinstance(twin, EditableCache)
    before.check(twin)
    assert twin.layers[0].keys.data_ptr() == cache.layers[0].keys.data_ptr()  # shared until one writes
    forward(twin, some_ids(5))
    before.check(cache)
    after = Snapshot(twin)
    cache.refresh_field("status", "delivered")
    forward(cache, some_ids(3, seed=4))
    after.check(twin)
    assert cache.verify().ok
    assert twin.verify().ok


def test_deepcopy_shares_nothing() -> None:
    cache = make_context()
    before = Snapshot(cache)
    twin = copy.deepcopy(cache)
    before.check(twin)
    for mine, theirs in zip(cache.layers, twin.layers, strict=True):
        assert mine.keys.untyped_storage().data_ptr() != theirs.keys.untyped_storage().data_ptr()
    twin.edit("status", "delivered")
    before.check(cache)
    assert twin.model is cache.model
    assert twin.verify().ok


def test_deepcopy_of_a_cache_with_a_graph() -> None:
    """huggingface/transformers#32681, #32929: deepcopy fails on tensors that autograd made."""
    model, ids, cache = shared_model(), some_ids(9), make_cache()
    model(ids, **{host.cache_argument(model): cache})
    assert cache.layers[0].keys.requires_grad
    twin = copy.deepcopy(cache)
    assert not twin.layers[0].keys.requires_grad
    assert torch.equal(twin.layers[0].keys, cache.layers[0].keys)


@pytest.mark.parametrize(
    "operation",
    [
        lambda c: c.remove((4, 6)),
        lambda c: c.reposition((6, 8), to=4),
        lambda c: c.insert([7, 8], 5),
        lambda c: c.splice(c.extract((2, 5)), at=6),
        lambda c: c.recompute((3, 7)),
        lambda c: c.append([5, 6]),
        lambda c: EditableCache.stack([c, c]).unstack(),
        lambda c: c.verify(),
        lambda c: c.next_token_logits(),
    ],
)
def test_operations_on_a_cache_that_was_filled_with_gradients_on(operation: Any) -> None:
    """Nobody remembers `torch.no_grad` every time."""
    model, ids, cache = shared_model(), some_ids(12), make_cache()
    model(ids, **{host.cache_argument(model): cache})
    operation(cache)
    assert cache.verify().ok
    assert not cache.extract((2, 5)).layers[0]["keys"].requires_grad


@pytest.mark.parametrize("make", ["model", "bare"])
def test_gradients_flow_as_in_the_stock_cache(make: str) -> None:
    model, ids = tiny_model("llama").train(), some_ids(12)

    def gradients(cache: Any) -> dict[str, torch.Tensor]:
        model.zero_grad()
        name = host.cache_argument(model)
        model(ids[:, :5], **{name: cache})
        model(ids[:, 5:], labels=ids[:, 5:], **{name: cache}).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients(DynamicCache())
    actual = gradients(EditableCache(model) if make == "model" else EditableCache())
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(actual[name], gradient, atol=1e-6), name

    # negative control: a cache cut off from the graph gives other gradients
    class Cut(DynamicCache):
        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            return super().update(key_states.detach(), value_states.detach(), *args, **kwargs)

    cut = gradients(Cut())
    key = "model.layers.0.mlp.down_proj.weight"
    assert not torch.allclose(cut[key], expected[key], atol=1e-6)


def test_inference_mode_then_normal_mode_and_back() -> None:
    cache, model = make_cache(), shared_model()
    with torch.inference_mode():
        cache.append("order_status: {status} \n", fields={"status": "pending"})
        cache.splice(Skill.precompile(model, shared_tokenizer(), "If the order", name="rule"))
        cache.checkpoint()
    cache.refresh_field("status", "delivered now")
    cache.append("the order")
    cache.remove("rule")
    assert cache.verify().ok
    fork = cache.fork()
    fork.edit("status", "pending")
    with torch.inference_mode():
        cache.edit("status", "refund")
        fork.append("the customer")
    model(some_ids(3), **{host.cache_argument(model): fork}).logits.sum().backward()
    model.zero_grad()
    assert fork.verify().ok
    assert cache.verify().ok
    go_on(cache, "ok")
    cache.rollback()
    assert cache.field("status").value == "pending"
    assert cache.verify().ok


def test_a_checkpoint_of_an_empty_cache_without_layers() -> None:
    cache = EditableCache()
    cache.checkpoint("start")
    forward(cache, some_ids(5))
    cache.rollback("start")
    assert cache.get_seq_length() == 0
    ids = some_ids(4, seed=3)
    assert torch.allclose(forward(cache, ids), forward(DynamicCache(), ids), atol=1e-5)


def test_a_cache_is_never_pickled() -> None:
    with pytest.raises(TypeError, match="save_pretrained"):
        pickle.dumps(make_context())


@pytest.mark.parametrize("form", ["none", "ones", "float", "bool", "own_length", "whole"])
def test_every_form_of_mask_on_a_continued_cache(form: str) -> None:
    ids = some_ids(12)
    expected = forward(DynamicCache(), ids)[:, 8:]
    cache = make_cache()
    cache.append(ids[0, :8])
    mask = {
        "none": None,
        "ones": torch.ones(1, 12, dtype=torch.long),
        "float": torch.ones(1, 12),
        "bool": torch.ones(1, 12, dtype=torch.bool),
        "own_length": torch.ones(1, 4, dtype=torch.long),
        "whole": torch.ones(1, 12, dtype=torch.long),
    }[form]
    given = ids if form == "whole" else ids[:, 8:]
    logits = forward(cache, given, attention_mask=mask)
    assert torch.allclose(logits[:, -4:], expected, atol=1e-5)
    assert torch.equal(cache.token_ids, ids)


def test_chunked_prefill_by_hand_equals_one_forward() -> None:
    ids = some_ids(30, batch=2)
    expected = forward(DynamicCache(), ids)
    cache = make_cache()
    parts = [forward(cache, part) for part in ids.split([1, 7, 2, 1, 19], dim=1)]
    assert torch.allclose(torch.cat(parts, dim=1), expected, atol=1e-5)
    assert torch.equal(cache.token_ids, ids)
    assert cache.verify().ok


def test_eager_and_sdpa_agree() -> None:
    ids = some_ids(12)
    outputs = []
    for attention in ("eager", "sdpa"):
        model = shared_model("llama", attn_implementation=attention)
        cache = EditableCache(model)
        cache.append(ids[0, :5])
        outputs.append(generate(cache, ids, model=model))
        assert cache.verify().ok
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)


def test_recurrent_state_follows_the_beams() -> None:
    """huggingface/transformers#46612: reorder must reach every tensor of a hybrid layer, K, V and state."""
    model, ids = shared_model("falcon_h1"), some_ids(10)
    expected = generate(DynamicCache(config=model.config), ids, model=model, num_beams=3)
    actual = generate(EditableCache(model), ids, model=model, num_beams=3)
    assert torch.equal(actual.sequences, expected.sequences)
    for mine, theirs in zip(actual.logits, expected.logits, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)
