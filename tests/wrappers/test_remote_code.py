"""A model whose class comes with its checkpoint (``trust_remote_code``) is measured like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from wrapper_support import CHUNK, HEAD, check_edits, check_generate, check_splice

from editable_cache import EditableCache, Skill, UnsupportedModelError
from editable_cache.adapters import identify
from editable_cache.testing.tiny_models import tiny_model

CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM


class HouseConfig(LlamaConfig):
    model_type = "house_model"


class HouseForCausalLM(LlamaForCausalLM):
    config_class = HouseConfig

    def __init__(self, config):
        super().__init__(config)
        if config.trick == "absolute":
            self.places = torch.nn.Embedding(2048, config.hidden_size)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, inputs_embeds=None, **kwargs):
        if inputs_embeds is None:
            inputs_embeds = self.model.embed_tokens(input_ids)
        if self.config.trick == "absolute":
            past = 0 if cache is None else cache.get_seq_length()
            places = torch.arange(past, past + inputs_embeds.shape[1])[None] if position_ids is None else position_ids
            inputs_embeds = inputs_embeds + self.places(places)
        return super().forward(
            inputs_embeds=inputs_embeds, attention_mask=attention_mask, position_ids=position_ids, cache=cache, **kwargs
        )
"""


def from_folder(folder: Path, trick: str) -> Any:
    """A checkpoint in a folder with its own code, loaded as from a hub."""
    model = tiny_model("llama")
    model.save_pretrained(folder)
    (folder / "modeling_house.py").write_text(CODE, encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "house_model", "architectures": ["HouseForCausalLM"], "trick": trick}
    config["auto_map"] = {
        "AutoConfig": "modeling_house.HouseConfig",
        "AutoModelForCausalLM": "modeling_house.HouseForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    loaded.generation_config.eos_token_id = None
    return loaded


@pytest.fixture(autouse=True)
def _modules_in_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("transformers.dynamic_module_utils", "transformers.utils.hub"):
        monkeypatch.setattr(f"{place}.HF_MODULES_CACHE", str(tmp_path / "modules"), raising=False)


def test_remote_code_that_rotates_is_handled(tmp_path: Path) -> None:
    model, plain = from_folder(tmp_path / "model", "none"), tiny_model("llama")
    assert type(model).__module__.startswith("transformers_modules")
    assert identify(model).model_type == "house_model"
    check_edits(check_splice(model, plain))
    check_edits(check_generate(model, plain))


def test_remote_code_with_learned_positions_is_refused(tmp_path: Path) -> None:
    """The config says rotary, the code does more: only a measurement can tell."""
    model = from_folder(tmp_path / "model", "absolute")
    with pytest.raises(UnsupportedModelError) as caught:
        Skill.precompile(model, None, CHUNK, name="s")
    assert caught.value.reasons
    cache = EditableCache(model)
    cache.append(HEAD)  # what needs no proof still works
    assert cache.get_seq_length() == len(HEAD)
