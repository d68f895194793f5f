"""Field reports, class 9, for what lies on disk: whose cells a file holds, and of what."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_support import Snapshot, make_cache, shared_model, shared_tokenizer
from vision_support import MARK_AFTER, MARK_BEFORE, chunk, generate, image_ids, inputs, pixels, text_ids, vision_model

from editable_cache import CompatibilityError, EditableCache, EditableCacheError, KVChunk, Skill, VisionChunk
from editable_cache.testing.tiny_models import tiny_model

IDS = list(range(20, 40))

OTHERS: dict[str, Callable[[], Any]] = {
    "another seed": lambda: tiny_model("llama", seed=1),
    "another dtype": lambda: tiny_model("llama", dtype=torch.bfloat16),
    "another rope theta": lambda: theta(500_000.0),
}


def theta(value: float) -> Any:
    from editable_cache.testing.tiny_models import draw_weights, tiny_config

    config = tiny_config("llama")
    config.rope_parameters = {**config.rope_parameters, "rope_theta": value}
    model = type(shared_model())(config).eval()
    draw_weights(model)
    return model


@pytest.mark.parametrize("case", OTHERS)
def test_b47_other_producers(case: str, tmp_path: Path) -> None:
    """MemTensor/MemOS#2300: refused when loaded for them, and when loaded for nobody and spliced."""
    other = OTHERS[case]()
    Skill.precompile(shared_model(), None, IDS, name="s").save_pretrained(tmp_path)
    with pytest.raises(CompatibilityError) as caught:
        Skill.from_pretrained(tmp_path, model=other)
    differs = {reason.what.split(".")[0] for reason in caught.value.reasons}
    assert differs & {"weights", "dtype", "config", "rotary"}
    cache = EditableCache(other)
    cache.append([1, 2, 3])
    before = Snapshot(cache)
    with pytest.raises(CompatibilityError):
        cache.splice(Skill.from_pretrained(tmp_path))
    before.check(cache)


def test_b47_one_theta_is_a_control() -> None:
    model = theta(10_000.0)
    cache = EditableCache(model)
    cache.splice(Skill.precompile(shared_model(), None, IDS, name="s"))
    assert cache.verify().ok


def test_b47_another_dtype_is_converted_with_a_notice(tmp_path: Path) -> None:
    """MemTensor/MemOS#2300: "refused or converted with a notice": refused, and converted where it is asked for."""
    single = tiny_model("llama", dtype=torch.bfloat16).float()
    half = tiny_model("llama", dtype=torch.bfloat16)
    Skill.precompile(single, None, IDS, name="s").save_pretrained(tmp_path)
    with pytest.raises(CompatibilityError, match="dtype"):
        Skill.from_pretrained(tmp_path, model=half)
    converted = Skill.from_pretrained(tmp_path, model=half, dtype="bfloat16")
    assert "converted from float32 to bfloat16" in converted.provenance.note
    cache = EditableCache(half)
    cache.splice(converted)
    assert "converted from float32 to bfloat16" in str(cache.report())


def test_b51_names_and_salts_are_not_joined_bare() -> None:
    """vllm-project/vllm#12621, #44701: ("a", "b|c") and ("a|b", "c") share a key. A skill's salt is its note."""
    base = Skill.precompile(shared_model(), None, IDS, name="s")

    def salted(adapters: str, note: str) -> KVChunk:
        return replace(
            base, model=replace(base.model, adapters=adapters), provenance=replace(base.provenance, note=note)
        )

    variants = [salted("a", "b|c"), salted("a|b", "c"), salted("", "None"), salted("None", ""), salted("", ""), base]
    assert len({each.digest for each in variants}) == 5
    assert salted("", "").digest == base.digest
    moved = replace(base, position_ids=base.position_ids + 7)
    assert moved.digest != base.digest
    texts = [Skill.precompile(shared_model(), None, ids, name="s").digest for ids in ([1, 23], [12, 3], [1, 2, 3])]
    assert len(set(texts)) == 3


def test_b51_identities_survive_a_file(tmp_path: Path) -> None:
    base = Skill.precompile(shared_model(), None, IDS, name="s")
    digests = set()
    for number, note in enumerate(["", "b|c", "b", "c"]):
        one = replace(base, provenance=replace(base.provenance, note=note))
        one.save_pretrained(tmp_path / str(number))
        loaded = Skill.from_pretrained(tmp_path / str(number))
        assert loaded.digest == one.digest
        digests.add(loaded.digest)
    assert len(digests) == 4


def one_pixel(name: str) -> VisionChunk:
    picture = pixels(name)
    picture["pixel_values"] = picture["pixel_values"].clone()
    picture["pixel_values"].view(-1)[0] += 1e-3
    given = inputs(name, image_ids(name), picture)
    return VisionChunk.precompile(vision_model(name), None, given, name="image")


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava"])
def test_b52_images_of_one_grid_are_others(name: str, tmp_path: Path) -> None:
    """LMCache/LMCache#4086, #690: equal placeholder ids, another image, or one pixel: another identity, on disk too."""
    first, second, third = chunk(name), chunk(name, seed=8), one_pixel(name)
    assert torch.equal(first.token_ids, second.token_ids)
    assert torch.equal(first.token_ids, third.token_ids)
    loaded = []
    for number, each in enumerate((first, second, third)):
        each.save_pretrained(tmp_path / str(number))
        loaded.append(VisionChunk.from_pretrained(tmp_path / str(number), model=vision_model(name)))
    assert len({each.digest for each in loaded}) == 3
    assert len({each.images[0].digest for each in loaded}) == 3
    assert loaded[0].digest == first.digest


def test_b52_a_prompt_with_another_image_is_refused(tmp_path: Path) -> None:
    """vllm-project/vllm#20261: the cells of A under a prompt that carries B."""
    name = "qwen2_5_vl"
    assert {MARK_BEFORE, MARK_AFTER} <= set(image_ids(name).tolist())
    chunk(name).save_pretrained(tmp_path)
    prompt = torch.cat((text_ids(4), image_ids(name), text_ids(3, seed=2)))

    def cached() -> EditableCache:
        cache = EditableCache(vision_model(name))
        cache.append(prompt[:4])
        cache.splice(VisionChunk.from_pretrained(tmp_path, model=vision_model(name)))
        return cache

    good = cached()
    generate(name, good, inputs(name, prompt[None], pixels(name)), count=2)
    cache = cached()
    before = Snapshot(cache)
    with pytest.raises(EditableCacheError, match="image"):
        generate(name, cache, inputs(name, prompt[None], pixels(name, seed=8)), count=2)
    before.check(cache)


@pytest.mark.parametrize("change", ["order", "enum", "word"])
def test_b53_a_stored_tool_is_found_by_its_ids(change: str, tmp_path: Path) -> None:
    """QwenLM/qwen-code#6338: a stored tool whose text changed must never serve its old cells."""
    tool = {"name": "refund", "order": {"status": ["pending", "delivered"]}, "text": "refund the order"}
    changed = {
        "order": {key: tool[key] for key in reversed(tool)},
        "enum": {**tool, "order": {"status": ["pending", "lost"]}},
        "word": {**tool, "text": "refund an order"},
    }[change]
    for name, each in (("old", tool), ("new", changed)):
        made = Skill.precompile(shared_model(), shared_tokenizer(), json.dumps(each), name="tool")
        made.save_pretrained(tmp_path / name)
    old, new = (Skill.from_pretrained(tmp_path / name, model=shared_model()) for name in ("old", "new"))
    assert old.name == new.name
    assert old.digest != new.digest
    assert old.token_ids.tolist() != new.token_ids.tolist()
    cache = make_cache()
    cache.splice(old)
    cache.sync(new.token_ids)
    fresh = EditableCache(shared_model(), tokenizer=shared_tokenizer())
    fresh.append(new.token_ids)
    assert torch.equal(cache.token_ids, fresh.token_ids)
    kept = next(i for i, pair in enumerate(zip(old.token_ids, new.token_ids, strict=False)) if pair[0] != pair[1])
    assert torch.allclose(cache.layers[2].keys[..., kept:, :], fresh.layers[2].keys[..., kept:, :], atol=1e-4)
    assert not torch.allclose(
        old.layers[2]["keys"][..., kept : kept + 1, :], new.layers[2]["keys"][..., kept : kept + 1, :]
    )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft 0.21 with transformers 5.24
@pytest.mark.parametrize("targets", [["k_proj", "v_proj"], ["up_proj"]], ids=["attention", "mlp"])
@pytest.mark.parametrize("switch", ["off", "another", "half the scale", "merged"])
def test_b48_a_stored_skill_of_another_adapter_is_refused(switch: str, targets: list[str], tmp_path: Path) -> None:
    """ggml-org/llama.cpp#26207; vllm-project/vllm#44250: KV of adapter A is reused for B, or for the base."""
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install -e '.[dev]'")

    def lora() -> Any:
        return peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)

    wrapped = peft.get_peft_model(tiny_model("llama"), lora()).eval()
    model = wrapped.get_base_model()
    Skill.precompile(model, None, IDS, name="s").save_pretrained(tmp_path)
    assert Skill.from_pretrained(tmp_path, model=model).model.adapters  # the same adapter, still on
    if switch == "off":
        wrapped.base_model.disable_adapter_layers()
    elif switch == "another":
        wrapped.add_adapter("other", lora())
        wrapped.set_adapter("other")
    elif switch == "merged":
        wrapped.merge_adapter()
    else:
        for module in wrapped.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling = {name: scale / 2 for name, scale in module.scaling.items()}
    with pytest.raises(CompatibilityError) as caught:
        Skill.from_pretrained(tmp_path, model=model)
    assert {reason.what for reason in caught.value.reasons} & {"adapters", "weights"}
