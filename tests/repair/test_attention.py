"""Attention seen from outside: weights, output projection, residual stream, and what is left behind."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from editable_cache import BusyError, UnsupportedModelError
from editable_cache.adapters.attention import PREFIX, AttentionCall, tracing
from editable_cache.testing.oracles import check, relative_error
from editable_cache.testing.tiny_models import tiny_model

IDS = torch.arange(7, 27)[None]  # longer than the tiny window of 8
FAMILIES = ("llama", "qwen3", "gemma3", "gemma2", "smollm3", "mistral", "gpt_neox", "phi", "deepseek_v3")


def seen(model: Any, ids: Tensor = IDS, **kwargs: Any) -> tuple[list[dict[str, Tensor]], Any]:
    calls: list[dict[str, Tensor]] = []

    def record(call: AttentionCall) -> None:
        weights = call.weights(0, call.num_queries)
        calls.append(
            {
                "weights": weights,
                "hidden": call.hidden[0].clone(),
                "output": call.output.clone(),
                "whole": call.projected(call.mixed(weights, 0, call.total)),
                "pieces": sum(
                    (call.projected(call.mixed(weights[..., a:b], a, b)) for a, b in ((0, 3), (3, call.total))),
                    torch.zeros(()),
                ),
                "bare": call.projected(torch.zeros_like(call.mixed(weights, 0, call.total))),
            }
        )

    with torch.no_grad(), tracing(model, record):
        out = model(input_ids=ids, **kwargs)
    return calls, out


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_eager(family: str) -> None:
    eager = tiny_model(family, attn_implementation="eager")
    with torch.no_grad():
        expected = eager(input_ids=IDS, output_attentions=True, output_hidden_states=True)
    sdpa = tiny_model(family)  # eager too where there is no sdpa
    for model in (eager, sdpa):
        calls, out = seen(model)
        assert torch.equal(out.logits, model(input_ids=IDS).logits)
        assert len(calls) == len(expected.attentions)
        for layer, call in enumerate(calls):
            check(call["weights"], expected.attentions[layer][0], 1e-5, f"{family} layer {layer}")
            check(call["hidden"], expected.hidden_states[layer][0], 1e-5, f"{family} residual {layer}")


def test_the_window_and_the_cap_matter() -> None:
    """Negative control: without mask or cap the weights are others."""

    def without(change: dict[str, Any], family: str) -> float:
        worst = 0.0

        def record(call: AttentionCall) -> None:
            nonlocal worst
            other = copy.copy(call)
            for name, value in change.items():
                object.__setattr__(other, name, value)
            n = call.num_queries
            worst = max(worst, relative_error(other.weights(0, n), call.weights(0, n)))

        model = tiny_model(family)
        with torch.no_grad(), tracing(model, record):
            model(input_ids=IDS)
        return worst

    assert without({"softcap": None}, "gemma2") > 1e-3
    assert without({"mask": None, "causal": True}, "gemma3") > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_projection_is_the_models_own(family: str) -> None:
    """The whole output through W_O is what the output module says, without its bias; parts of it add up to it."""
    model = tiny_model(family)
    said: list[Tensor] = []
    handles = [
        module.register_forward_hook(lambda module, args, out: said.append(out[0] - by_bias(module)))
        for name, module in model.named_modules()
        if name.endswith(("self_attn.o_proj", "self_attn.dense", "attention.dense"))
    ]
    calls, _ = seen(model)
    for handle in handles:
        handle.remove()
    assert len(said) == len(calls)
    for call, out in zip(calls, said, strict=True):
        check(call["whole"], out, 1e-5)
        check(call["pieces"], out, 1e-5)
        assert not call["bare"].any()


def by_bias(module: nn.Module) -> Tensor:
    bias = getattr(module, "bias", None)
    return torch.zeros(()) if bias is None else bias


def test_projection_by_hand() -> None:
    model: Any = tiny_model("llama", attn_implementation="eager")
    with torch.no_grad():
        expected = model(input_ids=IDS, output_attentions=True)
        layer = expected.past_key_values.layers[1]
        weights = expected.attentions[1][0]  # [4, n, n]; values have 2 heads
        values = layer.values[0].repeat_interleave(2, dim=0)
        heads = [weights[h, :, 2:6] @ values[h, 2:6] for h in range(4)]
        by_hand = torch.cat(heads, dim=-1) @ model.model.layers[1].self_attn.o_proj.weight.T
    found: list[Tensor] = []

    def record(call: AttentionCall) -> None:
        found.append(call.projected(call.mixed(call.weights(0, call.num_queries)[..., 2:6], 2, 6)))

    with torch.no_grad(), tracing(model, record):
        model(input_ids=IDS)
    check(found[1], by_hand, 1e-5)
    assert relative_error(found[0], by_hand) > 1e-2


def test_a_wrapped_projection_counts_whole() -> None:
    """Something around the Linear, as PEFT puts it there, is applied as it stands, without its constant part."""

    class Wrapped(nn.Module):
        def __init__(self, inside: nn.Linear) -> None:
            super().__init__()
            self.inside, self.in_features = inside, inside.in_features

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(3.0 * self.inside(x) + 1.0)

    plain, wrapped = tiny_model("llama"), tiny_model("llama")
    first: Any = wrapped.model.layers[0].self_attn  # type: ignore[union-attr, index]
    first.o_proj = Wrapped(first.o_proj)
    check(seen(wrapped)[0][0]["whole"], 3.0 * seen(plain)[0][0]["whole"], 1e-5)


def state(model: Any) -> Any:
    return (
        dict(vars(model.config)),
        dict(AttentionInterface._global_mapping),
        dict(AttentionMaskInterface._global_mapping),
        [len(module._forward_pre_hooks) for module in model.modules()],
        [len(module._forward_hooks) for module in model.modules()],
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_nothing_is_left_behind(attention: str) -> None:
    model: Any = tiny_model("gemma3", attn_implementation=attention)
    before = state(model)
    seen(model)
    assert state(model) == before
    assert model.config._attn_implementation == attention
    with tracing(model, lambda call: None):
        assert model.config._attn_implementation.startswith(PREFIX)
        assert state(model) != before
    assert state(model) == before
    with pytest.raises(ZeroDivisionError), tracing(model, lambda call: None):
        raise ZeroDivisionError
    assert state(model) == before

    def fail(call: AttentionCall) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), tracing(model, fail):
        model(input_ids=IDS)
    assert state(model) == before


def test_twice_at_once_is_refused() -> None:
    model = tiny_model("llama")
    first, second = tracing(model, lambda call: None), tracing(model, lambda call: None)
    with first, pytest.raises(BusyError, match="already"), second:
        pass


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_models_outside_the_interface_are_refused_or_unseen(family: str) -> None:
    model: Any = tiny_model(family)
    if family == "gpt2":
        with pytest.raises(UnsupportedModelError, match="name"), tracing(model, lambda call: None):
            pass
    else:
        assert seen(model)[0] == []  # whoever needs them says so


def test_other_implementations_are_refused() -> None:
    model: Any = tiny_model("llama")
    model.config._attn_implementation_internal = "flex_attention"
    before = state(model)
    refusal = pytest.raises(UnsupportedModelError, match="sdpa or eager, got flex_attention")
    with refusal, tracing(model, lambda call: None):
        pass
    assert state(model) == before


def test_attention_that_is_something_else_is_noticed() -> None:
    model: Any = tiny_model("llama", attn_implementation="eager")
    names = inspect.unwrap(type(model.model.layers[0].self_attn).forward).__globals__
    real = names["eager_attention_forward"]

    def doubled(*args: Any, **kwargs: Any) -> Any:
        out, weights = real(*args, **kwargs)
        return 2 * out, weights

    names["eager_attention_forward"] = doubled
    try:
        with pytest.raises(UnsupportedModelError, match="not the softmax"):
            seen(model)
    finally:
        names["eager_attention_forward"] = real
