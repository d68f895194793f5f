"""Which models a published skill is refused for, each with its reason; and dtypes that it is converted to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import HubServer
from skill_support import SKILL, TEXT, builds_of, built, payloads_fetched, tokenizer, turned
from transformers import AutoModelForCausalLM

from editable_cache import CompatibilityError, EditableCache, Skill
from editable_cache.errors import Reason
from editable_cache.testing.tiny_models import tiny_config, tiny_model, tiny_tokenizer

# peft 0.21 reads a property that transformers 5.24 is about to rename
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def refused(source: str | Path, model: Any, **options: Any) -> tuple[Reason, ...]:
    """The reasons that ``from_pretrained`` gives, all of which stand in its message too."""
    with pytest.raises(CompatibilityError) as caught:
        Skill.from_pretrained(source, model=model, **options)
    reasons: tuple[Reason, ...] = caught.value.reasons
    assert reasons
    for reason in reasons:
        assert f"{reason.what.split(': ')[-1]}: expected {reason.expected}, got {reason.got}" in str(caught.value)
    return reasons


def facts(reasons: tuple[Reason, ...]) -> set[str]:
    return {reason.what.split(": ")[-1] for reason in reasons}


def lora(alpha: int = 8, targets: tuple[str, ...] = ("k_proj", "v_proj"), **options: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install -e '.[dev]'")
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=4, lora_alpha=alpha, target_modules=list(targets), init_lora_weights=False, task_type="CAUSAL_LM", **options
    )
    return peft.get_peft_model(tiny_model("llama"), config).eval()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a skill of the tiny Llama; no hub."""
    built()[1].save_pretrained(tmp_path / "skill")
    return tmp_path / "skill"


# -- other weights, settings, models


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.input_layernorm.weight"])
def test_one_changed_norm_weight_is_seen(saved: Path, name: str, exact: bool) -> None:
    model = tiny_model("llama")
    assert Skill.from_pretrained(saved, model=model, exact=exact).equal_cells(built()[1])  # control
    with torch.no_grad():
        model.get_parameter(name)[5] += 1e-3
    assert facts(refused(saved, model, exact=exact)) == {"weights"}


def test_the_same_weights_from_disk_are_the_same(saved: Path, tmp_path: Path) -> None:
    built()[0].save_pretrained(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert Skill.from_pretrained(saved, model=again, tokenizer=tokenizer()).equal_cells(built()[1])
    cache = EditableCache(again, tokenizer=tokenizer())
    cache.append("You are a support agent.\n")
    cache.splice(Skill.from_pretrained(saved, model=again))
    assert cache.verify().ok


def other_layers() -> Any:
    config = tiny_config("llama")
    config.num_hidden_layers = 2
    return AutoModelForCausalLM.from_config(config).eval()


OTHERS = {
    "rope theta": (turned, {"config.rope_parameters", "rotary"}),
    "layer count": (other_layers, {"config.num_hidden_layers", "weights"}),
    "dtype": (lambda: built(torch.bfloat16)[0], {"dtype", "weights"}),
    "model type": (lambda: built(family="qwen3")[0], {"model_type", "weights"}),
    "seed": (lambda: built(seed=1)[0], {"weights"}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_model_is_refused_with_its_reasons(hub: HubServer, what: str) -> None:
    make, wanted = OTHERS[what]
    built()[1].push_to_hub(SKILL)
    hub.log.clear()
    reasons = refused(SKILL, make())
    assert wanted <= facts(reasons)
    if what != "model type":  # which has a config of its own
        assert facts(reasons) - {"config.layer_types"} == wanted
    assert payloads_fetched(hub) == []


def test_another_tokenizer_is_refused_where_it_is_known(saved: Path) -> None:
    model = built()[0]
    other = tiny_tokenizer()
    other.add_tokens(["refunds!"])
    assert facts(refused(saved, model, tokenizer=other)) == {"tokenizer"}
    assert Skill.from_pretrained(saved, model=model).equal_cells(built()[1])
    assert Skill.from_pretrained(saved, model=model, tokenizer=tiny_tokenizer()).equal_cells(built()[1])


def test_a_model_with_an_adapter_is_another_one(saved: Path) -> None:
    wrapped = lora()
    assert facts(refused(saved, wrapped)) == {"adapters", "weights"}
    with wrapped.disable_adapter():  # its weights are still there, and count
        assert facts(refused(saved, wrapped)) == {"weights"}
    assert Skill.from_pretrained(saved, model=wrapped.unload()).equal_cells(built()[1])


def test_a_skill_of_an_adapted_model(tmp_path: Path) -> None:
    wrapped = lora()
    skill = Skill.precompile(wrapped, tokenizer(), TEXT, name="refunds")
    assert skill.origin.adapters == (("default", 2.0),)
    skill.save_pretrained(tmp_path)
    assert Skill.from_pretrained(tmp_path, model=lora()).equal_cells(skill)  # the same adapter again
    assert facts(refused(tmp_path, lora(alpha=16))) == {"adapters"}  # another scale
    assert {"adapters", "weights"} <= facts(refused(tmp_path, built()[0]))  # none
    with wrapped.disable_adapter():
        assert facts(refused(tmp_path, wrapped)) == {"adapters"}
    assert Skill.from_pretrained(tmp_path, model=wrapped).equal_cells(skill)
    with torch.no_grad():
        wrapped.get_parameter("base_model.model.model.layers.2.self_attn.v_proj.lora_B.default.weight")[0, 0] += 0.01
    assert facts(refused(tmp_path, wrapped)) == {"weights"}


@pytest.mark.parametrize("targets", [("up_proj",), ("down_proj", "gate_proj")])
def test_an_adapter_of_the_mlp_alone_counts_too(saved: Path, targets: tuple[str, ...]) -> None:
    assert "adapters" in facts(refused(saved, lora(targets=targets)))


def test_every_candidate_is_listed_with_every_reason(hub: HubServer) -> None:
    for _, skill in (built(), built(torch.bfloat16), built(family="qwen3")):
        skill.push_to_hub(SKILL)
    with pytest.raises(CompatibilityError) as caught:
        Skill.from_pretrained(SKILL, model=built(seed=5)[0])
    found: dict[str, set[str]] = {label: set() for label in builds_of(hub)}
    for reason in caught.value.reasons:
        label, fact = reason.what.split(": ")
        found[label].add(fact)
    by_kind = {"-".join(label.split("-")[:2]): facts for label, facts in found.items()}
    assert by_kind["llama-float32"] == {"weights"}
    assert by_kind["llama-bfloat16"] == {"weights", "dtype"}
    assert {"model_type", "weights"} < by_kind["qwen3-float32"]
    assert all(label in str(caught.value) for label in found)
    assert "pass dtype=" not in str(caught.value)


# -- another dtype, when asked


def coarse(dtype: torch.dtype = torch.float32, factor: int = 1) -> Any:
    """A tiny Llama whose weights every dtype holds exactly, its second layer's values ``factor**2`` times as large."""
    model = tiny_model("llama", dtype=dtype)
    with torch.no_grad():
        for weight, exact in zip(model.parameters(), tiny_model("llama").parameters(), strict=True):
            weight.copy_((exact * 64).round().clamp(-256, 256) / 64)
        model.model.layers[1].self_attn.v_proj.weight *= factor
        model.model.layers[1].input_layernorm.weight *= factor
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_build_in_another_dtype_is_converted_when_asked(hub: HubServer, dtype: torch.dtype) -> None:
    skill, name = Skill.precompile(coarse(), tokenizer(), TEXT, name="refunds"), str(dtype).removeprefix("torch.")
    skill.push_to_hub(SKILL)
    model = coarse(dtype)
    with pytest.raises(CompatibilityError, match=r"pass dtype= to convert its cells") as caught:
        Skill.from_pretrained(SKILL, model=model)
    assert facts(caught.value.reasons) == {"dtype", "weights"}
    back = Skill.from_pretrained(SKILL, model=model, tokenizer=tokenizer(), dtype=name)
    again = Skill.from_pretrained(SKILL, model=model, dtype=dtype)
    assert back.equal_cells(again)
    for mine, theirs in zip(back.layers, skill.layers, strict=True):
        assert all(torch.equal(mine[key], theirs[key].to(dtype)) for key in theirs)
    assert back.provenance.note == f"converted from float32 to {name}"
    assert again.model.tokenizer == skill.model.tokenizer  # still compared by a splice
    own = Skill.precompile(model, tokenizer(), TEXT, name="refunds")
    assert not own.equal_cells(back)  # control: a cast is not what the model computes

    cache = EditableCache(model, tokenizer=tokenizer())
    cache.append("You are a support agent.\n")
    cache.splice(back)
    assert f"converted from float32 to {name}" in str(cache.report()).replace("\n", " ")
    checked = cache.verify()
    assert checked.stale_tokens == len(back) - 1  # all but the seam: nothing computes such cells again
    assert "15 stale tokens without an oracle" in str(checked)
    exact = EditableCache(model, tokenizer=tokenizer())
    exact.append("You are a support agent.\n")
    exact.splice(own)
    assert exact.verify().stale_tokens == 0  # control
    inputs = cache.inputs("Question: may I?\nAnswer:")
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert out.shape[1] == inputs["input_ids"].shape[1] + 4


def test_a_fitting_build_is_taken_before_a_converted_one(hub: HubServer) -> None:
    built()[1].push_to_hub(SKILL)
    model, own = built(torch.bfloat16)
    own.push_to_hub(SKILL)
    assert Skill.from_pretrained(SKILL, model=model, dtype="bfloat16").equal_cells(own)


def test_cells_in_16_bits_can_serve_a_model_in_32(hub: HubServer) -> None:
    skill = built(torch.bfloat16)[1]
    skill.push_to_hub(SKILL)
    back = Skill.from_pretrained(SKILL, model=built()[0], dtype="float32")
    assert torch.equal(back.layers[0]["keys"], skill.layers[0]["keys"].float())
    assert back.provenance.note == "converted from bfloat16 to float32"
    assert facts(refused(SKILL, built(seed=1)[0], dtype="float32")) == {"dtype", "weights"}


def test_weights_that_16_bits_round_otherwise_are_refused(saved: Path) -> None:
    """float16 keeps other bits than bfloat16 does, so nothing shows that they are of one model."""
    assert facts(refused(saved, tiny_model("llama", dtype=torch.float16), dtype="float16")) == {"dtype", "weights"}


def test_converted_smaller_storage_says_both(tmp_path: Path) -> None:
    built()[1].save_pretrained(tmp_path, storage="int8")
    model = built(torch.bfloat16)[0]
    note = Skill.from_pretrained(tmp_path, model=model, dtype="bfloat16").provenance.note
    assert note == "stored as int8; converted from float32 to bfloat16"


@pytest.mark.parametrize("exact", [False, True])
def test_other_weights_are_not_converted(saved: Path, exact: bool) -> None:
    other = tiny_model("llama", seed=1, dtype=torch.bfloat16)
    assert facts(refused(saved, other, dtype="bfloat16", exact=exact)) == {"dtype", "weights"}
    near = tiny_model("llama", dtype=torch.bfloat16)
    with torch.no_grad():
        near.model.norm.weight[0] *= 1.01
    assert facts(refused(saved, near, dtype="bfloat16", exact=exact)) == {"dtype", "weights"}


def test_a_rounded_rope_is_not_converted(saved: Path) -> None:
    cast = tiny_model("llama").to(torch.bfloat16)  # rounds the frequencies too
    assert "rotary" in facts(refused(saved, cast, dtype="bfloat16"))


@pytest.mark.parametrize("dtype", ["float16", torch.float32, "int8", "nonsense"])
def test_only_the_dtype_of_the_model_can_be_asked_for(saved: Path, dtype: Any) -> None:
    with pytest.raises(CompatibilityError, match="expected dtype= the dtype of model=, bfloat16"):
        Skill.from_pretrained(saved, model=built(torch.bfloat16)[0], dtype=dtype)
    with pytest.raises(CompatibilityError, match="which was not given"):
        Skill.from_pretrained(saved, dtype=dtype)


def test_states_of_recurrent_layers_are_not_converted(tmp_path: Path) -> None:
    skill = Skill.precompile(tiny_model("falcon_h1"), tokenizer(), TEXT, name="refunds")
    skill.save_pretrained(tmp_path)
    low = tiny_model("falcon_h1", dtype=torch.bfloat16)
    assert {"dtype", "weights"} <= facts(refused(tmp_path, low, dtype="bfloat16"))
    with pytest.raises(CompatibilityError) as caught:
        Skill.from_pretrained(tmp_path, model=low)
    assert "pass dtype=" not in str(caught.value)


def test_cells_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for factor in (1, 256):
        Skill.precompile(coarse(factor=factor), tokenizer(), TEXT, name="refunds").save_pretrained(tmp_path)
        low = coarse(torch.float16, factor)
        assert all(bool(weight.isfinite().all()) for weight in low.parameters())
        if factor == 1:
            assert len(Skill.from_pretrained(tmp_path, model=low, dtype="float16"))  # control
        else:
            with pytest.raises(CompatibilityError, match="not finite in float16"):
                Skill.from_pretrained(tmp_path, model=low, dtype="float16")


def test_a_conversion_says_so_wherever_it_goes(saved: Path, tmp_path: Path) -> None:
    model = built(torch.bfloat16)[0]
    back = Skill.from_pretrained(saved, model=model, dtype="bfloat16")
    back.save_pretrained(tmp_path / "again")
    manifest = json.loads((tmp_path / "again" / "manifest.json").read_text())
    assert manifest["provenance"]["note"] == "converted from float32 to bfloat16"
    assert Skill.from_pretrained(tmp_path / "again", model=model).provenance == back.provenance
