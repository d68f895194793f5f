"""Token mixers are found by what they write, fed again in call order, and left without a trace."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from recurrent_models import CONFIGS, build, cache_factory, ids, positions
from torch import nn
from transformers import DynamicCache

from editable_cache import UnsupportedModelError
from editable_cache.adapters import host
from editable_cache.adapters.mixers import MixerMap, find_mixers, recording, replaying
from editable_cache.adapters.states import Slot, cache_tensors, slots

EXPECTED = {
    "bamba": ["model.layers.0.mamba", "model.layers.1.self_attn", "model.layers.2.mamba"],
    "falcon_h1": [f"model.layers.{i}.{name}" for i in range(2) for name in ("mamba", "self_attn")],
    "nemotron_h": ["model.layers.0.mixer", "model.layers.2.mixer", "model.layers.3.mixer"],
    "kimi_linear": [f"model.layers.{i}.self_attn" for i in range(3)],
    "lfm2": ["model.layers.0.conv", "model.layers.1.self_attn", "model.layers.2.conv"],
    "zaya": [f"model.layers.{i}.self_attn{part}" for i in range(3) for part in ("", ".qkv_proj")],
    "mamba2": ["backbone.layers.0.mixer", "backbone.layers.1.mixer"],
}
"""By eye, from the modeling files."""


def hooks_on(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def found(name: str) -> tuple[Any, MixerMap, DynamicCache]:
    model = build(name)
    cache = cache_factory(model)()
    return model, find_mixers(model, ids(6, 1), positions(1, 6), cache), cache


@pytest.mark.parametrize("name", EXPECTED)
def test_the_mixers_are_those_of_the_modeling_file(name: str) -> None:
    _, mixers, _ = found(name)
    assert [call.name for call in mixers.calls] == EXPECTED[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_state_and_every_key_has_one_writer(name: str) -> None:
    model, mixers, cache = found(name)
    assert mixers.slots == slots(cache)
    assert sum(len(call.slots) for call in mixers.calls) == len(mixers.slots)
    filled = {int(key.split(".")[0]) for key in cache_tensors(cache) if key.endswith("keys")}
    assert sorted(layer for call in mixers.calls for layer in call.layers) == sorted(filled)
    assert all(not isinstance(model.get_submodule(mixer), nn.ModuleList) for mixer in mixers.names)


def test_a_shared_block_is_told_apart_by_call_order() -> None:
    model = copy.deepcopy(build("zamba"))
    model.model.layers[3].shared_transf = model.model.layers[1].shared_transf
    mixers = find_mixers(model, ids(6, 1), positions(1, 6), cache_factory(model)())
    attention = [call for call in mixers.calls if call.layers]
    assert len({call.name for call in attention}) == 1
    assert [call.layers for call in attention] == [(1,), (3,)]
    assert [call.slots for call in mixers.calls if call.slots] == [(Slot(i, 0),) for i in range(4)]


def test_nothing_is_left_behind() -> None:
    model = build("falcon_h1")
    before = hooks_on(model), [set(vars(module)) for module in model.modules()]
    cache = cache_factory(model)()
    mixers = find_mixers(model, ids(6, 1), positions(1, 6), cache)
    with recording(model, mixers) as recorded:
        host.run(model, ids(3, 2), cache, position_ids=positions(7, 3))
    with replaying(model, mixers, recorded):
        host.run(model, ids(3, 2), cache, position_ids=positions(10, 3))
    assert (hooks_on(model), [set(vars(module)) for module in model.modules()]) == before
    assert all("update" not in vars(layer) and "update_conv_state" not in vars(layer) for layer in cache.layers)


@pytest.mark.parametrize("where", ["find", "record", "replay"])
def test_nothing_is_left_behind_when_the_model_raises(where: str) -> None:
    model, mixers, _ = found("bamba")
    cache, before = cache_factory(model)(), hooks_on(model)
    too_large = torch.full((1, 3), model.config.vocab_size)
    contexts = {"record": recording(model, mixers), "replay": replaying(model, mixers, [])}
    with pytest.raises(IndexError), contexts.get(where, nullcontext()):
        find_mixers(model, too_large, None, cache)
    assert hooks_on(model) == before
    assert all(not {"update", "update_conv_state"} & set(vars(layer)) for layer in cache.layers)


@pytest.mark.parametrize("name", CONFIGS)
def test_frozen_inputs_decide_what_the_cache_holds(name: str) -> None:
    """Other ids with the recorded inputs fill the cache as the recorded ids did; without them they don't."""
    model, mixers, _ = found(name)

    def filled(tokens: torch.Tensor, context: Any) -> Mapping[str, torch.Tensor]:
        cache = cache_factory(model)()
        with context:
            host.run(model, tokens, cache, position_ids=positions(1, 6))
        return cache_tensors(cache)

    cache = cache_factory(model)()
    with recording(model, mixers) as recorded:
        host.run(model, ids(6, 1), cache, position_ids=positions(1, 6))
    expected = cache_tensors(cache)
    replayed = filled(ids(6, 2), replaying(model, mixers, recorded))
    other = filled(ids(6, 2), recording(model, mixers))
    assert all(torch.equal(replayed[key], expected[key]) for key in expected)
    assert not any(torch.equal(other[key], expected[key]) for key in expected)


def test_a_slice_of_the_recorded_tokens() -> None:
    model, mixers, _ = found("bamba")
    cache = cache_factory(model)()
    with recording(model, mixers) as recorded:
        host.run(model, ids(6, 1), cache, position_ids=positions(1, 6))
    part = cache_factory(model)()
    with replaying(model, mixers, recorded, slice(0, 4)):
        host.run(model, ids(4, 2), part, position_ids=positions(1, 4))
    assert torch.allclose(part.layers[1].keys, cache.layers[1].keys[..., :4, :], atol=1e-6)


@pytest.mark.parametrize("change", ["reversed", "too few", "too many"])
def test_another_order_of_calls_is_refused(change: str) -> None:
    model, mixers, _ = found("bamba")
    with recording(model, mixers) as recorded:
        host.run(model, ids(6, 1), cache_factory(model)())
    changed = {"reversed": recorded[::-1], "too few": recorded[:-1], "too many": [*recorded, recorded[0]]}[change]
    with (
        pytest.raises(UnsupportedModelError, match="Replay of recorded layer inputs"),
        replaying(model, mixers, changed),
    ):
        host.run(model, ids(6, 1), cache_factory(model)())


class _Careful(nn.Module):
    """Tries a module that raises, and goes on with another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.broken, self.inner = nn.Bilinear(1, 1, 1), inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with suppress(TypeError):
            self.broken()
        return self.inner(*args, **kwargs)


def test_a_module_that_raised_inside_the_model_is_not_running_any_more() -> None:
    model = copy.deepcopy(build("bamba"))
    model.model.layers[0].feed_forward = _Careful(model.model.layers[0].feed_forward)
    mixers = find_mixers(model, ids(6, 1), positions(1, 6), cache_factory(model)())
    assert [call.name for call in mixers.calls] == EXPECTED["bamba"]
