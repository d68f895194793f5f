"""Quantized weights: the model computes with them, and the fingerprint reads what is inside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cache_support import generate
from transformers import DynamicCache
from wrapper_support import CHUNK, HEAD, check_edits, check_generate, check_splice

from editable_cache import CompatibilityError, EditableCache, Skill, UnsupportedModelError
from editable_cache.adapters import identify, weights_state
from editable_cache.testing.tiny_models import tiny_model


def int8(family: str = "llama", *, dynamic: bool = False, seed: int = 0) -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed: pip install torchao")
    model = tiny_model(family, seed=seed)
    kind = "Int8DynamicActivationInt8WeightConfig" if dynamic else "Int8WeightOnlyConfig"
    quantization.quantize_(model, getattr(quantization, kind)())
    return model


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_whole_story_with_int8_weights(family: str) -> None:
    model, plain = int8(family), tiny_model(family)
    assert type(model.model.layers[0].self_attn.k_proj.weight).__name__ != "Parameter"
    check_edits(check_splice(model, copy.deepcopy(model)))
    check_edits(check_generate(model, copy.deepcopy(model)))
    with pytest.raises(AssertionError):  # control: its cells are not those of the exact weights
        check_splice(model, plain)


def test_int8_weights_have_an_identity() -> None:
    model = int8()
    assert identify(model) == identify(int8())
    assert identify(model).weights != identify(tiny_model("llama")).weights
    assert identify(model).weights != identify(int8(seed=1)).weights
    assert identify(model).weights != identify(int8(dynamic=True)).weights  # the same numbers, read otherwise
    assert weights_state(model) == weights_state(model)


@pytest.mark.parametrize("part", ["qdata", "scale"])
def test_int8_weights_that_change_are_noticed(part: str) -> None:
    model = int8()
    cache, skill = EditableCache(model), Skill.precompile(model, None, CHUNK, name="s")
    cache.append(HEAD)
    cache.fork().splice(skill)
    weight = model.model.layers[1].self_attn.k_proj.weight
    with torch.no_grad():
        getattr(weight, part)[3] += 1
    with pytest.raises(CompatibilityError, match="weights"):
        cache.splice(skill)


def test_quantized_activations_are_refused_by_measurement() -> None:
    """Their scale hangs on the values themselves, so the same token is not the same cell at two places."""
    model = int8(dynamic=True)
    with pytest.raises(UnsupportedModelError, match="self-test"):
        Skill.precompile(model, None, CHUNK, name="s")
    cache = EditableCache(model)
    out = generate(cache, CHUNK[None], model=model)
    assert torch.equal(out.sequences, generate(DynamicCache(), CHUNK[None], model=model).sequences)


class _Packed(torch.nn.Linear):
    """A layer whose weights are an object that torch can't look into, as torch.ao's quantized modules have."""

    def get_extra_state(self) -> Any:
        return (torch.ones(2), None, 3)

    def set_extra_state(self, state: Any) -> None: ...


def test_weights_outside_of_parameters_count() -> None:
    model, plain = tiny_model("llama"), tiny_model("llama")
    model.model.layers[0].self_attn.k_proj.__class__ = _Packed
    first = identify(model).weights
    assert first != identify(plain).weights
    model.model.layers[0].self_attn.k_proj._packed_params = object()
    assert weights_state(model) != weights_state(plain)
    state = weights_state(model)
    model.model.layers[0].self_attn.k_proj._packed_params = [object()]
    assert weights_state(model) != state


def test_weights_that_cannot_be_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    model.model.layers[0].self_attn.k_proj.__class__ = _Packed
    monkeypatch.setattr(_Packed, "get_extra_state", lambda self: object())
    with pytest.raises(UnsupportedModelError, match="can't be compared"):
        identify(model)


def test_weights_of_every_float_format_have_a_state() -> None:
    model = tiny_model("llama")
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool):
        model.register_buffer("extra", torch.ones(4).to(dtype))
        state = weights_state(model)
        identify(model)
        model.extra = torch.zeros(4).to(dtype)
        assert weights_state(model) != state


def test_weights_made_under_inference_mode_have_a_state() -> None:
    with torch.inference_mode():
        model = tiny_model("llama")
    assert identify(model) == identify(tiny_model("llama"))
    cache = EditableCache(model)
    cache.append(HEAD)
    assert cache.verify().ok
