"""Field reports, class 9: identity and staleness. (Other models, weights, dtypes in full: tests/test_bad_input.py.)"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_support import make_cache, make_context, shared_model, shared_tokenizer, some_ids
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from editable_cache import CompatibilityError, EditableCache, Skill
from editable_cache.adapters import identify
from editable_cache.spec import ModelIdentity, compare
from editable_cache.testing import oracles
from editable_cache.testing.tiny_models import tiny_model


@pytest.mark.parametrize("case", ["seed", "dtype", "theta"])
def test_b47_the_producer_is_in_the_file(case: str, tmp_path: Any) -> None:
    """MemTensor/MemOS#2300: a cache made by one model loads into another with the same shapes."""
    other = {
        "seed": lambda: tiny_model("llama", seed=1),
        "dtype": lambda: tiny_model("llama", dtype=torch.bfloat16),
        "theta": lambda: tiny_model("llama_linear"),
    }[case]()
    make_context().save_pretrained(tmp_path / "cache")
    Skill.precompile(shared_model(), shared_tokenizer(), "If the order", name="s").save_pretrained(tmp_path / "skill")
    for load in (EditableCache, Skill):
        folder = tmp_path / ("cache" if load is EditableCache else "skill")
        with pytest.raises(CompatibilityError) as caught:
            load.from_pretrained(folder, model=other)
        assert caught.value.reasons
        assert load.from_pretrained(folder, model=shared_model()) is not None
        assert load.from_pretrained(folder, model=tiny_model("llama")) is not None  # the same weights, another object


@pytest.mark.parametrize("where", ["key", "norm", "embedding"])
def test_b50_weights_updated_after_the_skill_was_made(where: str, tmp_path: Any) -> None:
    """InternLM/lmdeploy#4917; sgl-project/sglang#26792; RLinf/RLinf#96: old KV is served, also from disk."""
    model = tiny_model("llama")
    skill = Skill.precompile(model, shared_tokenizer(), "If the order is pending", name="s")
    skill.save_pretrained(tmp_path)
    cache = EditableCache(model, tokenizer=shared_tokenizer())
    weight = {
        "key": model.model.layers[0].self_attn.k_proj.weight,
        "norm": model.model.layers[1].input_layernorm.weight,
        "embedding": model.model.embed_tokens.weight,
    }[where]
    index = int(skill.token_ids[0]) if where == "embedding" else 7
    with torch.no_grad():
        weight[index] += 0.05
    with pytest.raises(CompatibilityError, match="weights"):
        cache.splice(skill)
    with pytest.raises(CompatibilityError, match="weights"):
        Skill.from_pretrained(tmp_path, model=model)
    with torch.no_grad():
        weight[index] -= 0.05
    with torch.no_grad():
        weight.copy_(dict(tiny_model("llama").named_parameters())[_name_of(model, weight)])
    cache.splice(Skill.from_pretrained(tmp_path, model=model))
    assert cache.verify().ok


def _name_of(model: Any, wanted: Any) -> str:
    return next(name for name, weight in model.named_parameters() if weight is wanted)


def test_b51_no_two_contents_share_an_identity() -> None:
    """vllm-project/vllm#12621, #44701; openvinotoolkit/openvino.genai#3722: weak hashes, fields joined bare."""
    base = Skill.precompile(shared_model(), None, [1, 23], name="a")
    variants = [
        base,
        Skill.precompile(shared_model(), None, [12, 3], name="a"),
        Skill.precompile(shared_model(), None, [1, 2, 3], name="a"),
        replace(base, position_ids=base.position_ids + 1),
        replace(base, model=replace(base.model, adapters="None")),
        replace(base, model=replace(base.model, config="x", weights="y|z")),
        replace(base, model=replace(base.model, config="x|y", weights="z")),
        replace(base, provenance=replace(base.provenance, prefix_ids=(1, 23))),
        replace(base, provenance=replace(base.provenance, prefix_ids=(12, 3))),
        replace(base, provenance=replace(base.provenance, note="1")),
    ]
    assert len({chunk.digest for chunk in variants}) == len(variants)
    assert base.renamed("b").digest == base.digest  # a name is a label
    assert compare(base.model, replace(base.model, adapters="None"))


def test_b51_ids_are_compared_on_use() -> None:
    """sgl-project/sglang#24638: no check of tokens on a hit."""
    from editable_cache import LedgerError

    cache = make_cache()
    cache.append([5, 23, 7, 8])
    with pytest.raises(LedgerError, match="slot 1"):
        shared_model().generate(torch.tensor([[5, 24, 7, 8, 9]]), cache=cache, max_new_tokens=2)


@pytest.mark.parametrize("change", ["order", "enum", "word"])
def test_b53_a_tool_that_changes(change: str) -> None:
    """QwenLM/qwen-code#6338; Lakr233/FlowDown#273: reordered keys, or an edited tool keeps its cached form."""
    tool = {"name": "refund", "order": {"status": ["pending", "delivered"]}, "text": "refund the order"}
    changed = {
        "order": {key: tool[key] for key in reversed(tool)},
        "enum": {**tool, "order": {"status": ["pending", "lost"]}},
        "word": {**tool, "text": "refund an order"},
    }[change]
    old, new = (Skill.precompile(shared_model(), shared_tokenizer(), json.dumps(t), name="t") for t in (tool, changed))
    assert old.digest != new.digest
    cache = make_cache()
    cache.splice(old)
    plan = cache.sync(new.token_ids, dry_run=True)
    assert 0 < plan.count("keep") < len(old)
    cache.sync(new.token_ids)
    assert torch.equal(cache.token_ids[0], new.token_ids)
    fresh = cache.layers[0].keys[..., plan.count("keep") :, :]
    expected = oracles.full(shared_model(), new.token_ids).keys[0][..., plan.count("keep") :, :]
    oracles.check(fresh, expected)


def test_an_identity_is_taken_of_what_counts() -> None:
    """LMCache/LMCache#2961: what does not change a key must not refuse, what does must."""
    model = tiny_model("llama")
    before = identify(model)
    model.config._name_or_path = "elsewhere"
    model.generation_config.temperature = 0.3
    model.config.use_cache = False
    assert identify(model) == before
    model.config.rms_norm_eps = 1e-3
    assert compare(before, identify(model))[0].what == "config.rms_norm_eps"
    assert isinstance(before, ModelIdentity)
    assert some_ids(1).shape == (1, 1)


HARMLESS = {
    "auto_map": {"AutoModelForCausalLM": "org/x--modeling.X"},
    "unsloth_version": "2025.1",
    "temperature": 0.3,
    "task_specific_params": {},
    "keys_to_ignore_at_inference": ["past"],
    "router_aux_loss_coef": 0.1,
    "hidden_dropout": 0.1,
}


@pytest.mark.parametrize("field", sorted(HARMLESS))
def test_what_no_key_depends_on_does_not_refuse(field: str) -> None:
    """Fine-tuning tools and generation write such fields into the config; the weights are equal."""
    model = copy.deepcopy(shared_model())
    setattr(model.config, field, HARMLESS[field])
    assert identify(model) == identify(shared_model())
    model.config.what_nobody_knows = HARMLESS[field]
    assert identify(model) != identify(shared_model())


@pytest.mark.parametrize("place", ["/home/me/data", r"C:\me\data", "d:/me/data", "~/me/data", "\\\\me\\share"])
def test_no_path_of_this_machine_is_in_the_identity(place: str, tmp_path: Path) -> None:
    model = copy.deepcopy(shared_model())
    model.config.place = place
    model.config.places = {"one": [place, "org/model", "linear"]}
    config = json.loads(identify(model).config)
    assert config["place"] == ""
    assert config["places"] == {"one": ["", "org/model", "linear"]}


def test_a_folder_is_no_repository_wherever_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model loaded from `clients/secret` keeps that name, which looks like one of the Hub's from another folder."""
    name = "clients/secret"
    shared_model().save_pretrained(tmp_path / name)
    shared_tokenizer().save_pretrained(tmp_path / name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name).eval(), AutoTokenizer.from_pretrained(name)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert model.config._name_or_path == tokenizer.name_or_path == name
    origin = Skill.precompile(model, tokenizer, "order", name="s").origin
    assert (origin.repo, origin.tokenizer) == ("", "")
    snapshot = tmp_path / "cache" / "models--clients--secret" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").write_text("{}")
    origin = Skill.precompile(model, tokenizer, "order", name="s").origin
    assert (origin.repo, origin.tokenizer) == (name, name)
