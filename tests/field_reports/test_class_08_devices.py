"""Field reports, class 8: quantized, offloaded, several devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_support import forward, make_cache, shared_model, some_ids
from transformers.cache_utils import Cache, QuantizedLayer

from editable_cache import ContextWarning, EditableCache, LedgerError, Skill
from editable_cache.forward.adopt import adopt
from editable_cache.testing import oracles

IDS = some_ids(8, seed=31)


class ExactLayer(QuantizedLayer):
    """The stock layer with its two regions, and a quantizer that loses nothing: what is wrong is not rounding."""

    def _quantize(self, tensor: Any, axis: Any) -> Any:
        return tensor.clone()

    def _dequantize(self, qtensor: Any) -> Any:
        return qtensor


def two_regions() -> Cache:
    """Six tokens quantized and two in the residual part."""
    stock = Cache(layers=[ExactLayer(residual_length=4) for _ in range(3)])
    forward(stock, IDS[:, :6])
    forward(stock, IDS[:, 6:])
    assert [layer.keys.shape[-2] for layer in stock.layers] == [2, 2, 2]
    return stock


def taken_over(stock: Any, ids: Any = IDS) -> EditableCache:
    cache = make_cache()
    with pytest.warns(ContextWarning, match="dequantized"):
        adopt(cache, stock, ids)
    return cache


def check_cells(cache: EditableCache, ids: Any) -> None:
    for layer in cache.editable_layers:
        assert layer.length == layer.get_seq_length() == ids.shape[1] == cache.get_seq_length()
    for row in range(ids.shape[0]):
        expected = oracles.full(shared_model(), ids[row])
        oracles.check([layer.view()["keys"][row : row + 1] for layer in cache.editable_layers], expected.keys)
        oracles.check([layer.view()["values"][row : row + 1] for layer in cache.editable_layers], expected.values)


def test_b44_both_regions_are_read() -> None:
    """huggingface/transformers#45510, #48700: two storage regions, and half of the operations know one of them."""
    cache = taken_over(two_regions())
    check_cells(cache, IDS)
    with pytest.raises(AssertionError):  # control: other tokens would show
        check_cells(cache, IDS.flip(1))


@pytest.mark.parametrize("operation", ["crop", "reorder", "expand", "select"])
def test_b44_both_regions_follow(operation: str) -> None:
    """huggingface/transformers#45510, #48700: after the take-over, length equals content whatever is done."""
    cache, ids = taken_over(two_regions()), IDS
    if operation == "crop":
        cache.crop(-3)
        ids = ids[:, :5]
    elif operation == "reorder":
        cache.batch_repeat_interleave(2)
        forward(cache, torch.tensor([[7], [9]]))
        cache.reorder_cache(torch.tensor([1, 0]))
        ids = torch.cat((IDS.expand(2, -1), torch.tensor([[9], [7]])), dim=1)
    elif operation == "expand":
        cache.batch_repeat_interleave(3)
        ids = IDS.expand(3, -1)
    else:
        cache.batch_repeat_interleave(3)
        cache.batch_select_indices(torch.tensor([2]))
    assert torch.equal(cache.token_ids, ids)
    check_cells(cache, ids)
    forward(cache, some_ids(2, batch=ids.shape[0]))
    check_cells(cache, torch.cat((ids, some_ids(2, batch=ids.shape[0])), dim=1))


@pytest.mark.parametrize("operation", ["crop", "expand", "select"])
def test_b44_a_stock_cache_whose_regions_disagree_is_refused(operation: str) -> None:
    """huggingface/transformers#45510: stock crop(-3) takes two tokens away and leaves a length of 8."""
    stock = two_regions()
    if operation == "crop":
        for layer in stock.layers:
            layer.crop(-3)
        assert stock.get_seq_length() == 8
    elif operation == "expand":
        stock.batch_repeat_interleave(2)
    else:
        stock.batch_repeat_interleave(2)
        stock.batch_select_indices(torch.tensor([1, 0]))
    cache = make_cache()
    for ids in (IDS, IDS[:, :5], IDS.expand(2, -1)):
        with pytest.raises(LedgerError, match="residual"):
            adopt(cache, stock, ids)
    assert cache.get_seq_length() == 0


def test_b44_a_pending_reorder_is_applied() -> None:
    """huggingface/transformers#48700: a reorder of beams waits in the layer until the next update."""
    ids = some_ids(8, batch=2, seed=33)
    stock = Cache(layers=[ExactLayer(residual_length=4) for _ in range(3)])
    forward(stock, ids[:, :6])
    forward(stock, ids[:, 6:])
    stock.reorder_cache(torch.tensor([1, 0]))
    if getattr(stock.layers[0], "_pending_beam_idx", None) is None:
        pytest.skip("this transformers reorders at once")
    check_cells(taken_over(stock, ids.flip(0)), ids.flip(0))


def on_two_devices() -> tuple[EditableCache, list[str]]:
    """A cache of a model whose middle layer lies on a second device: ``meta``, which every machine has."""
    cache = make_cache()
    cache.append(some_ids(12, seed=32)[0])
    layer: Any = cache.layers[1]
    cells = {name: tensor.to("meta") for name, tensor in layer.view().items()}
    layer.keys, layer.values = cells["keys"], cells["values"]
    return cache, [str(held.device.type) for held in cache.editable_layers]


@pytest.mark.parametrize("operation", ["remove", "reposition", "fork", "crop", "overwrite"])
def test_b46_each_layer_stays_on_its_own_device(operation: str) -> None:
    """huggingface/transformers#46748, #48763, #35164; huggingface/peft#2189: cells on another layer's device."""
    cache, devices = on_two_devices()
    assert devices == ["cpu", "meta", "cpu"]
    if operation == "remove":
        cache.remove((6, 8))
    elif operation == "reposition":
        cache.reposition((0, len(cache.ledger)), position=40)
    elif operation == "fork":
        cache = cache.fork()
    elif operation == "crop":
        cache.crop(-4)
    else:
        for layer in cache.editable_layers:
            one = {name: tensor[..., :1, :].clone() for name, tensor in layer.view().items()}
            layer.overwrite(torch.tensor([3], device=layer.device), one)
    cache.adopt()
    for layer, device in zip(cache.editable_layers, devices, strict=True):
        assert layer.length == len(cache.ledger)
        assert {tensor.device.type for tensor in layer.view().values()} == {device}
        assert layer.device.type == device


def test_b46_a_chunk_is_pasted_on_the_device_of_each_layer() -> None:
    """huggingface/transformers#46748, #35164: what is injected must be moved layer by layer."""
    skill = Skill.precompile(shared_model(), None, some_ids(5, seed=34)[0], name="s")
    assert {tensor.device.type for states in skill.layers for tensor in states.values()} == {"cpu"}
    cache, devices = on_two_devices()
    cache.splice(skill, seam_tokens=0)
    assert [layer.device.type for layer in cache.editable_layers] == devices
    for layer, device in zip(cache.editable_layers, devices, strict=True):
        assert {tensor.device.type for tensor in layer.view().values()} == {device}
        assert layer.length == 17
    expected = make_cache()
    expected.append(some_ids(12, seed=32)[0])
    expected.splice(skill, seam_tokens=0)
    for idx in (0, 2):  # the layers that can be read hold what they hold on one device
        assert torch.equal(cache.editable_layers[idx].view()["keys"], expected.editable_layers[idx].view()["keys"])


def test_b46_mixing_devices_would_show() -> None:
    """Control: torch refuses tensors of the two devices in one operation, as it would with two cards."""
    cache, _ = on_two_devices()
    near, far = (cache.editable_layers[idx].view()["keys"] for idx in (0, 1))
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.equal(near, far)
