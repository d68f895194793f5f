"""accelerate: weights that lie on the CPU or on disk and are loaded for the time of each layer's forward."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_support import shared_model
from transformers import AutoModelForCausalLM
from wrapper_support import CHUNK, HEAD, check_edits, check_generate, check_splice

from editable_cache import CompatibilityError, EditableCache, Skill, UnsupportedModelError
from editable_cache.adapters import host, identify, weights_state
from editable_cache.testing.tiny_models import tiny_model

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install -e '.[dev]'")

# safetensors 0.8 reads storage through a class that torch is about to remove
pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")

ON_DISK = ("model.layers.1", "model.layers.2", "model.norm", "lm_head")
MAP = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu"} | dict.fromkeys(ON_DISK, "disk")

KINDS = ["cpu_offload", "disk_offload", "dispatch_model", "from_pretrained"]


def offloaded(kind: str, folder: Path, family: str = "llama") -> Any:
    model, cpu = tiny_model(family), torch.device("cpu")
    if kind == "cpu_offload":
        return accelerate.cpu_offload(model, execution_device=cpu)
    if kind == "disk_offload":
        return accelerate.disk_offload(model, str(folder / "offload"), execution_device=cpu)
    if kind == "dispatch_model":
        return accelerate.dispatch_model(model, MAP, main_device="cpu", offload_dir=str(folder / "offload"))
    model.save_pretrained(folder / "model")
    loaded = AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map=MAP, offload_folder=str(folder / "offload"), dtype=torch.float32
    )
    loaded.generation_config.eos_token_id = None
    return loaded


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_whole_story_with_an_offloaded_model(kind: str, family: str, tmp_path: Path) -> None:
    model, plain = offloaded(kind, tmp_path, family), shared_model(family)
    assert any(parameter.is_meta for parameter in model.parameters())
    check_edits(check_splice(model, plain))
    check_edits(check_generate(model, plain))
    assert any(parameter.is_meta for parameter in model.parameters())  # as it was


@pytest.mark.parametrize("kind", KINDS)
def test_an_offloaded_model_is_the_same_model(kind: str, tmp_path: Path) -> None:
    model, plain = offloaded(kind, tmp_path), shared_model()
    assert identify(model) == identify(plain)
    assert identify(model) != identify(tiny_model("llama", seed=1))
    assert host.device_of(model).type == "cpu"
    before = weights_state(model)
    cache = EditableCache(model)
    cache.append(HEAD)
    cache.splice(Skill.precompile(plain, None, CHUNK, name="s"))  # compiled where the weights were at hand
    assert weights_state(model) == before
    assert cache.verify().ok


def test_tied_weights_that_are_offloaded(tmp_path: Path) -> None:
    model, plain = tiny_model("smollm3"), tiny_model("smollm3")
    assert plain.get_input_embeddings().weight is plain.lm_head.weight
    model = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert identify(model) == identify(plain)
    check_splice(model, plain)


def test_a_weight_that_changes_in_memory_is_noticed(tmp_path: Path) -> None:
    model = offloaded("cpu_offload", tmp_path)
    cache, skill = EditableCache(model), Skill.precompile(model, None, CHUNK, name="s")
    cache.append(HEAD)
    hook = model.model.layers[1].self_attn.k_proj._hf_hook
    with torch.no_grad():
        hook.weights_map["weight"][3, 3] += 0.5
    with pytest.raises(CompatibilityError, match="weights"):
        cache.splice(skill)
    with torch.no_grad():
        hook.weights_map["weight"][3, 3] -= 0.5


def test_a_file_of_weights_that_changes_is_noticed(tmp_path: Path) -> None:
    model = offloaded("disk_offload", tmp_path)
    cache, skill = EditableCache(model), Skill.precompile(model, None, CHUNK, name="s")
    cache.append(HEAD)
    file = next((tmp_path / "offload").glob("model.layers.1.self_attn.k_proj.weight.dat"))
    content = bytearray(file.read_bytes())
    content[7] ^= 0x40
    file.write_bytes(content)
    os.utime(file, ns=(0, 1_000_000_000))
    with pytest.raises(CompatibilityError, match="weights"):
        cache.splice(skill)


def test_a_model_without_weights_is_refused() -> None:
    model = tiny_model("llama").to("meta")
    with pytest.raises(UnsupportedModelError, match="meta device"):
        identify(model)
