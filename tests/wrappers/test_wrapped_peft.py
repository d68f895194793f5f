"""PEFT: a model with LoRA is cached through the PeftModel, through the tuner inside it, and through the base model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_support import forward, generate
from wrapper_support import CHUNK, HEAD, check_edits, check_generate, check_splice

from editable_cache import EditableCache, LedgerError, Skill, UnsupportedModelError
from editable_cache.adapters import identify
from editable_cache.adapters.wrappers import inner_model
from editable_cache.cache.watch import is_watched
from editable_cache.testing.tiny_models import tiny_model

peft = pytest.importorskip("peft", reason="peft is not installed: pip install -e '.[dev]'")

# peft 0.21 reads a property that transformers 5.24 is about to rename
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def lora(targets: list[str], **changes: Any) -> Any:
    return peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM", **changes
    )


def adapted(family: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(3)
    return peft.get_peft_model(tiny_model(family), lora(["k_proj", "v_proj", "up_proj"], **changes)).eval()


def merged(wrapped: Any, family: str = "llama") -> Any:
    """A plain model with the adapter's weights added to its own."""
    weights = {name: t.clone() for name, t in wrapped.get_base_model().state_dict().items()}
    plain = tiny_model(family)
    with torch.no_grad():
        for name, weight in plain.state_dict().items():
            prefix = name.removesuffix(".weight")
            base = weights.get(name, weights.get(f"{prefix}.base_layer.weight"))
            weight.copy_(base)
            if f"{prefix}.lora_A.default.weight" in weights:
                low, high = (weights[f"{prefix}.lora_{side}.default.weight"] for side in "AB")
                weight.add_(2.0 * high @ low)  # lora_alpha / r
    return plain


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_whole_story_through_a_peft_model(family: str) -> None:
    wrapped = adapted(family)
    plain = merged(wrapped, family)
    check_edits(check_splice(wrapped, plain))
    check_edits(check_generate(wrapped, plain))
    with pytest.raises(AssertionError):  # control: without the adapter it is another model
        check_generate(wrapped, tiny_model(family))


@pytest.mark.parametrize("caller", ["peft", "tuner", "base"])
@pytest.mark.parametrize("owner", ["peft", "tuner", "base"])
def test_owner_and_caller_may_be_any_of_the_wrappings(owner: str, caller: str) -> None:
    wrapped = adapted()
    views = {"peft": wrapped, "tuner": wrapped.base_model, "base": wrapped.get_base_model()}
    cache = EditableCache(views[owner])
    assert cache.model is views["base"]
    forward(cache, HEAD[None], model=views[caller])
    assert torch.equal(cache.token_ids[0], HEAD)
    generate(cache, cache.inputs(CHUNK)["input_ids"], model=views[caller])
    assert cache.ledger.ids_known
    assert cache.verify().ok
    other = EditableCache(tiny_model("llama"))
    with pytest.raises(LedgerError, match="belongs to another"):  # control: not any model
        forward(other, HEAD[None], model=views[caller])


def test_hooks_go_with_the_last_cache() -> None:
    wrapped = adapted()
    cache = EditableCache(wrapped)
    assert is_watched(wrapped.get_base_model())
    assert not is_watched(wrapped)
    del cache
    assert not is_watched(wrapped.get_base_model())


def test_a_skill_fits_however_the_model_is_handed_over() -> None:
    wrapped = adapted()
    assert identify(wrapped) == identify(wrapped.base_model) == identify(wrapped.get_base_model())
    cache = EditableCache(wrapped.get_base_model())
    cache.append(HEAD)
    cache.splice(Skill.precompile(wrapped, None, CHUNK, name="s"))
    assert cache.verify().ok
    assert inner_model(wrapped) is wrapped.get_base_model()


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_prompt_learning_is_refused(kind: str) -> None:
    """Its virtual tokens have no ids, and prefix tuning swaps the caller's cache for its own."""
    make = {"prompt": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}[kind]
    wrapped = peft.get_peft_model(tiny_model("llama"), make(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    for use in (EditableCache, identify, lambda model: Skill.precompile(model, None, CHUNK, name="s")):
        with pytest.raises(UnsupportedModelError, match="prompt learning"):
            use(wrapped)
    cache = EditableCache(wrapped.get_base_model())  # the base model inside is an ordinary one
    cache.append(HEAD)
    assert cache.verify().ok
    if kind == "prefix":
        with pytest.raises(LedgerError, match="expected one cache"):
            forward(cache, CHUNK[None], model=wrapped)
        assert torch.equal(cache.token_ids[0], HEAD)
    else:
        forward(cache, CHUNK[None], model=wrapped)
        assert (cache.token_ids[0, len(HEAD) :] == -1).all()  # embeddings, so nobody can say what they were
        with pytest.raises(LedgerError, match="unknown"):
            cache.verify()


def test_adapters_chosen_by_the_call_are_refused() -> None:
    wrapped = adapted()
    wrapped.add_adapter("other", lora(["k_proj"]))
    cache = EditableCache(wrapped)
    cache.append(HEAD)
    ids = cache.inputs(CHUNK)["input_ids"]
    for call in (
        lambda: forward(cache, CHUNK[None], model=wrapped, adapter_names=["other"]),
        lambda: generate(cache, ids, model=wrapped, adapter_names=["other"]),
    ):
        with pytest.raises(UnsupportedModelError, match="adapter_names"):
            call()
        assert torch.equal(cache.token_ids[0], HEAD)
    generate(cache, ids, model=wrapped)  # nothing of the refused call is left on the model
    assert cache.verify().ok


def test_an_activated_lora_is_refused() -> None:
    """It is on for the tokens behind its invocation only: what a cell holds depends on the call."""
    wrapped = adapted(alora_invocation_tokens=CHUNK[2:4].tolist())
    cache = EditableCache(wrapped)
    with pytest.raises(UnsupportedModelError, match="activated LoRA"):
        generate(cache, CHUNK[None], model=wrapped)
    assert cache.get_seq_length() == 0


def test_data_parallelism_in_threads_is_refused() -> None:
    """Each replica would write its rows into the same cache."""
    with pytest.raises(UnsupportedModelError, match="DataParallel"):
        EditableCache(torch.nn.DataParallel(tiny_model("llama")))
