"""What a stock cache holds can be taken over: dynamic, static, quantized; or is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_support import forward, generate, make_context, refused, shared_model, some_ids
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, QuantizedLayer

from editable_cache import (
    CompatibilityError,
    ContextWarning,
    EditableCache,
    LedgerError,
    SpanError,
    UnsupportedModelError,
)
from editable_cache.forward.adopt import QUANTIZED, adopt
from editable_cache.testing import oracles
from editable_cache.testing.tiny_models import SLIDING_WINDOW, tiny_model

IDS = some_ids(12, seed=21)


class CoarseLayer(QuantizedLayer):
    """A quantizer of our own: rounds to 1/64, and counts what it is asked."""

    def _quantize(self, tensor: Any, axis: Any = None) -> Any:
        return (tensor * 64).round().to(torch.int32)

    def _dequantize(self, qtensor: Any) -> Any:
        return qtensor.float() / 64


def quantized(residual: int = 4, kind: type = CoarseLayer) -> Cache:
    return Cache(layers=[kind(residual_length=residual) for _ in range(shared_model().config.num_hidden_layers)])


def fp8() -> Cache:
    layer = pytest.importorskip("transformers.cache_utils").__dict__.get("Fp8QuantizedLayer")
    if layer is None:
        pytest.skip("this transformers has no fp8 cache")
    return Cache(layers=[layer() for _ in range(shared_model().config.num_hidden_layers)])


def fill(cache: Any, ids: Any = IDS, *, model: Any = None, pieces: tuple[int, ...] = (6, 2, 1, 1, 1, 1)) -> Any:
    start = 0
    for count in pieces:
        forward(cache, ids[:, start : start + count], model=model)
        start += count
    return cache


def adopted(cache: Any, ids: Any = IDS, *, model: Any = None, **kwargs: Any) -> EditableCache:
    into = EditableCache(shared_model() if model is None else model)
    adopt(into, cache, ids, **kwargs)
    return into


def check_full(cache: EditableCache, tolerance: float = 1e-4) -> None:
    expected = oracles.full(cache.model, cache.token_ids[0])
    oracles.check([layer.view()["keys"] for layer in cache.editable_layers], expected.keys, tolerance)
    oracles.check([layer.view()["values"] for layer in cache.editable_layers], expected.values, tolerance)


STOCK = {
    "dynamic": lambda: DynamicCache(config=shared_model().config),
    "dynamic without config": DynamicCache,
    "static": lambda: StaticCache(config=shared_model().config, max_cache_len=40),
    "editable without model": lambda: EditableCache(config=shared_model().config),
}


@pytest.mark.parametrize("kind", STOCK)
def test_a_filled_stock_cache_is_taken_over(kind: str) -> None:
    stock = fill(STOCK[kind]())
    cache = adopted(stock)
    check_full(cache)
    assert cache.verify().ok
    assert cache.verify().full_agrees
    assert cache.history[-1].tokens_pasted == 12
    kept = cache.layers[0].keys.clone()
    forward(stock, some_ids(1), model=shared_model())
    assert torch.equal(cache.layers[0].keys, kept)  # nothing is shared
    cache.remove((6, 8))
    cache.append(some_ids(3)[0])
    assert cache.verify().ok


def test_the_last_token_of_generate_is_remembered() -> None:
    stock = DynamicCache()
    out = generate(stock, IDS).sequences
    cache = adopted(stock, out)
    assert torch.equal(cache.unfed, out[:, -1:])
    assert torch.equal(cache.inputs("")["input_ids"], out)
    more = generate(cache, cache.inputs("")["input_ids"])
    expected = generate(DynamicCache(), IDS, max_new_tokens=12)
    assert torch.equal(more.sequences, expected.sequences)


def test_batches_with_padding() -> None:
    ids, mask = some_ids(9, batch=2, seed=4), torch.ones((2, 9), dtype=torch.long)
    mask[1, :4] = 0
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    stock = DynamicCache()
    forward(stock, ids, attention_mask=mask, position_ids=positions)
    cache = adopted(stock, ids, attention_mask=mask)
    assert cache.verify().ok
    with pytest.raises(CompatibilityError):  # control: without the mask the second row has other positions
        adopted(stock, ids)


def test_fp8_is_dequantized_and_says_so() -> None:
    stock = fill(fp8())
    with pytest.warns(ContextWarning, match="dequantized"):
        cache = adopted(stock)
    for layer, held in zip(stock.layers, cache.editable_layers, strict=True):
        assert held.length == 12
        assert torch.equal(held.view()["keys"], layer._dequantize(layer._quantized_keys))
    with pytest.raises(AssertionError):  # control: it is not exact
        check_full(cache)
    exact = adopted(fill(DynamicCache(), pieces=(12,)))
    for mine, theirs in zip(cache.editable_layers, exact.editable_layers, strict=True):  # the first update
        oracles.check(mine.view()["keys"][..., :6, :], theirs.view()["keys"][..., :6, :], tolerance=0.1)
    assert {stale.cause for stale in cache.ledger.stale} == {QUANTIZED}
    cache.recompute(slice(None))
    check_full(cache)
    assert not cache.ledger.stale
    assert cache.verify().ok


def test_a_coarse_quantizer_reads_as_the_model_read_it() -> None:
    """What the take-over holds is what the next forward of the stock cache would see, in both regions."""
    stock = fill(quantized())
    assert {layer.keys.shape[-2] for layer in stock.layers} == {2}  # and ten tokens quantized
    with pytest.warns(ContextWarning, match="dequantized"):
        cache = adopted(stock)
    mine, theirs = (forward(one, some_ids(1), model=shared_model()) for one in (cache, stock))
    assert (mine - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    exact = forward(fill(DynamicCache()), some_ids(1), model=shared_model())
    assert (exact - theirs).abs().max() > 1e-3 * theirs.abs().max()  # control: quantization shows


def test_values_that_are_not_finite_are_refused() -> None:
    stock = fill(DynamicCache())
    stock.layers[1].keys[..., -1, 3] = float("nan")
    with pytest.raises(CompatibilityError, match="finite"):
        adopted(stock)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("ids", "layer 0 values"),
        ("positions", "layer 0 keys"),
        ("model", "layer 0 keys"),
    ],
)
def test_what_does_not_belong_together_is_refused(change: str, words: str) -> None:
    stock, ids, kwargs, model = fill(DynamicCache()), IDS.clone(), {}, shared_model()
    if change == "ids":
        ids[0, 2] += 1
    elif change == "positions":
        kwargs["position_ids"] = torch.arange(1, 13)[None]
    else:
        model = tiny_model("llama", seed=1)
    with pytest.raises(CompatibilityError, match="do not belong together") as caught:
        adopted(stock, ids, model=model, **kwargs)
    assert any(words in str(reason) for reason in caught.value.reasons)
    assert "error" in str(caught.value)


def test_positions_that_the_model_saw_can_be_given() -> None:
    stock = DynamicCache()
    forward(stock, IDS, position_ids=torch.arange(100, 112)[None])
    cache = adopted(stock, IDS, position_ids=torch.arange(100, 112)[None])
    assert cache.positions[0].tolist() == list(range(100, 112))
    cache.reposition("adopted", position=0)
    check_full(cache)


@pytest.mark.parametrize("make", [DynamicCache, StaticCache])
def test_a_sliding_layer_that_dropped_tokens_is_refused(make: Any) -> None:
    model = shared_model("gemma3")
    options: dict[str, Any] = {} if make is DynamicCache else {"max_cache_len": 40}
    for count in (SLIDING_WINDOW - 2, 12):
        stock = make(config=model.config, **options)
        forward(stock, IDS[:, :count], model=model)
        if count < SLIDING_WINDOW:  # nothing dropped yet
            assert adopted(stock, IDS[:, :count], model=model).verify().ok
        else:
            with pytest.raises(UnsupportedModelError, match="dropped"):
                adopted(stock, IDS[:, :count], model=model)


def test_offloaded_layers_come_back_to_their_device() -> None:
    """Offloaded storage lies on the CPU; the layer knows where it belongs."""
    stock = fill(DynamicCache())
    stock.layers[1].device = torch.device("meta")  # a second device that every machine has
    into = EditableCache(shared_model())
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):  # the cells went there
        adopt(into, stock, IDS)
    assert into.get_seq_length() == 0


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("empty", SpanError, "filled"),
        ("count", LedgerError, "ids"),
        ("layers", CompatibilityError, "3 layers"),
        ("uneven", LedgerError, "every layer"),
        ("dtype", CompatibilityError, "bfloat16"),
        ("ours", CompatibilityError, "fork"),
        ("none", CompatibilityError, "NoneType"),
    ],
)
def test_what_cannot_be_read_is_refused(case: str, kind: type[Exception], words: str) -> None:
    stock: Any = DynamicCache() if case == "empty" else fill(DynamicCache())
    ids: Any = IDS
    if case == "empty":
        stock = DynamicCache(config=shared_model().config)
    elif case == "count":
        ids = IDS[:, :9]
    elif case == "layers":
        stock.layers.pop()
    elif case == "uneven":
        stock.layers[1].crop(-1)
    elif case == "dtype":
        for layer in stock.layers:
            layer.keys, layer.values = layer.keys.bfloat16(), layer.values.bfloat16()
    elif case == "ours":
        stock = make_context()
    else:
        stock = None
    with pytest.raises(kind, match=words):
        adopted(stock, ids)


def test_only_an_empty_cache_is_filled() -> None:
    cache = make_context()
    with refused(cache, SpanError, ValueError, "empty"):
        adopt(cache, fill(DynamicCache()), IDS)


def test_a_hybrid_is_refused() -> None:
    model = shared_model("falcon_h1")
    stock = DynamicCache(config=model.config)
    forward(stock, IDS, model=model)
    with pytest.raises(UnsupportedModelError):
        adopted(stock, IDS, model=model)


@pytest.mark.parametrize("implementation", ["quantized", "static", "offloaded"])
def test_generate_with_a_cache_and_another_implementation_is_refused(implementation: str) -> None:
    """transformers refuses it; the cache must be as before, and the next generate right."""
    cache = make_context()
    ids = cache.inputs("the order")["input_ids"]
    with refused_by_transformers(cache):
        generate(cache, ids, cache_implementation=implementation)
    generate(cache, ids)
    assert cache.verify().ok


def refused_by_transformers(cache: EditableCache) -> Any:
    from contextlib import contextmanager

    from cache_support import Snapshot

    @contextmanager
    def checking() -> Any:
        before = Snapshot(cache)
        with pytest.raises(ValueError, match="cache_implementation"):
            yield
        before.check(cache)

    return checking()
