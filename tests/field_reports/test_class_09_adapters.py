"""Field report B48: keys and values computed under one adapter, reused under another or under the base model.

ggml-org/llama.cpp#26207, vllm-project/vllm#44250, LMCache/LMCache#2961.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from editable_cache import CompatibilityError, EditableCache, Skill
from editable_cache.testing.tiny_models import tiny_model

peft = pytest.importorskip("peft", reason="peft is not installed: pip install -e '.[dev]'")

# peft 0.21 reads a property that transformers 5.24 is about to rename
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

IDS = list(range(20, 40))


def lora(targets: list[str], **changes: Any) -> Any:
    return peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM", **changes
    )


def adapted(targets: list[str]) -> Any:
    torch.manual_seed(3)
    return peft.get_peft_model(tiny_model("llama"), lora(targets)).eval()


def base_of(wrapped: Any) -> Any:
    return wrapped.get_base_model()


def disable(wrapped: Any) -> None:
    wrapped.base_model.disable_adapter_layers()


def other_adapter(wrapped: Any) -> None:
    wrapped.add_adapter("other", lora(["k_proj", "v_proj"]))
    wrapped.set_adapter("other")


def half_scale(wrapped: Any) -> None:
    for module in wrapped.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling = {name: scale / 2 for name, scale in module.scaling.items()}


def merge(wrapped: Any) -> None:
    wrapped.merge_adapter()


@pytest.mark.parametrize("targets", [["k_proj", "v_proj"], ["up_proj"]], ids=["attention", "mlp"])
@pytest.mark.parametrize("switch", [disable, other_adapter, half_scale, merge])
def test_b48_a_chunk_of_another_adapter_is_refused(switch: Callable[[Any], None], targets: list[str]) -> None:
    wrapped = adapted(targets)
    model = base_of(wrapped)
    skill = Skill.precompile(model, None, IDS, name="s")
    cache = EditableCache(model)
    cache.append([1, 2, 3])
    cache.fork().splice(skill)  # the same adapter, still on: accepted
    before = [layer.keys.clone() for layer in cache.editable_layers]
    switch(wrapped)
    with pytest.raises(CompatibilityError) as caught:
        cache.splice(skill)
    assert {reason.what for reason in caught.value.reasons} & {"adapters", "weights"}
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.editable_layers, before, strict=True))


def test_b48_an_adapter_on_the_mlp_changes_deeper_keys() -> None:
    """Why an adapter that touches no projection of keys or values counts too."""
    wrapped = adapted(["up_proj"])
    model = base_of(wrapped)
    on = Skill.precompile(model, None, IDS, name="s")
    disable(wrapped)
    off = Skill.precompile(model, None, IDS, name="s")
    assert torch.equal(on.layers[0]["keys"], off.layers[0]["keys"])
    assert not torch.allclose(on.layers[1]["keys"], off.layers[1]["keys"], atol=1e-2)


def test_b48_switched_off_and_on_again_is_the_same_model() -> None:
    wrapped = adapted(["k_proj"])
    model = base_of(wrapped)
    skill = Skill.precompile(model, None, IDS, name="s")
    cache = EditableCache(model)
    disable(wrapped)
    with pytest.raises(CompatibilityError):
        cache.splice(skill)
    wrapped.base_model.enable_adapter_layers()
    cache.splice(skill)
    assert cache.verify().ok
