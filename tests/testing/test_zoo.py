"""The zoo of tiny models: every type of the installed transformers, live in all its parts, the same every time."""

from __future__ import annotations

import copy
import random
import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, Cache, LlamaConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from editable_cache.adapters import host
from editable_cache.testing import zoo
from editable_cache.testing.zoo import __main__ as command
from editable_cache.testing.zoo import building, configs, overrides

CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
IMAGE_TEXT = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

REPRESENTATIVE = (
    "llama",
    "gpt2",
    "gemma3_text",
    "gemma3n_text",
    "mistral:sliding",
    "llama4_text",
    "deepseek_v32",
    "falcon:alibi",
    "phi3:longrope",
    "qwen2_vl",
    "falcon_h1",
    "qwen3_next",
    "mamba2",
    "lfm2",
)
RECURRENT = ("falcon_h1", "qwen3_next", "mamba2", "lfm2", "jamba")

TIMM, PIXELS = "requires the timm library", "needs pixel inputs"
FAILURES = {
    "gemma3n": TIMM,
    "gemma3n@vlm": TIMM,
    "gemma4_assistant": "shared_kv_states cannot be None",  # it reads another model's keys and values
    "gemma4_unified_assistant": "shared_kv_states cannot be None",
    "diffusion_gemma": "logits (1, 256, 256) for 3 tokens",  # it fills a canvas
    "florence2": "logits (1, 1, 256) for 3 tokens",  # text goes to its encoder
    "t5gemma2": "exactly one of input_ids or inputs_embeds",  # as above, and its decoder has no default
    "llama4@vlm": "no attribute 'image_outputs'",  # transformers' own output class lacks the field
    "pi0": "required positional argument: 'state'",  # it answers with a robot's actions
    "blip": PIXELS,
    "blip-2": PIXELS,
    "idefics": PIXELS,
    "instructblip": PIXELS,
    "instructblipvideo": PIXELS,
    "kosmos-2": PIXELS,
    "pix2struct": PIXELS,
    "pp_formulanet": PIXELS,
    "udop": PIXELS,
    "vision-encoder-decoder": PIXELS,
}
"""What transformers 5.24 can't run on text alone, each with a part of the reason."""


def logits_of(model: PreTrainedModel, ids: Tensor, cache: Cache | None = None) -> Tensor:
    """The last token's logits, [vocab]."""
    arguments = {} if cache is None else {host.cache_argument(model): cache}
    with torch.no_grad():
        return model(input_ids=ids[None], **arguments).logits[0, -1]


def filled(model: PreTrainedModel, ids: Tensor) -> Cache:
    with torch.no_grad():
        output = model(input_ids=ids[None], use_cache=True)
    return next(value for value in output.values() if isinstance(value, Cache))


def zeroed(cache: Cache, *names: str) -> Cache:
    """A copy of the cache in which the named tensors, or tuples and dicts of tensors, of every layer are zero."""
    changed = copy.deepcopy(cache)
    for layer in changed.layers:
        for name in set(names) & set(vars(layer)):
            value = getattr(layer, name)
            for tensor in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
                if isinstance(tensor, Tensor):
                    tensor.zero_()
    return changed


def effect_of(model: PreTrainedModel, *names: str) -> float:
    """How far the next token's logits move, relative to the largest, when the named cache tensors are zeroed."""
    ids = zoo.ids_for(model, 13, 3)
    cache = filled(model, ids[:12])
    before = logits_of(model, ids[12:], copy.deepcopy(cache))
    after = logits_of(model, ids[12:], zeroed(cache, *names))
    return float((after - before).abs().max() / before.abs().max())


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {name: zoo.build(name) for name in dict.fromkeys((*REPRESENTATIVE, *RECURRENT))}


# -- names


def test_every_type_of_both_maps_has_a_name() -> None:
    names = zoo.model_types()
    assert len(names) == len(set(names)) == len(CAUSAL) + len(IMAGE_TEXT)
    assert {name for name in names if not name.endswith("@vlm")} == {*CAUSAL, *IMAGE_TEXT}
    assert {name.removesuffix("@vlm") for name in names if name.endswith("@vlm")} == {*CAUSAL} & {*IMAGE_TEXT}


def test_variants_name_an_installed_type() -> None:
    assert set(zoo.variants()) <= set(overrides.VARIANTS)
    assert {name.split(":")[0] for name in zoo.variants()} <= set(zoo.model_types())
    assert {"llama:yarn", "llama:dynamic", "phi3:longrope", "falcon:alibi"} <= set(zoo.variants())


def test_every_row_gives_its_reason() -> None:
    assert all(row.reason for row in (*overrides.ROWS.values(), *overrides.VARIANTS.values()))


@pytest.mark.parametrize("name", ["no_such_type", "llama:no_such_feature", "llama@vlm"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(zoo.ZooError, match=name):
        zoo.build(name)


def test_a_type_that_needs_an_image_says_so() -> None:
    with pytest.raises(zoo.ZooError, match=r"blip: needs pixel inputs: .*pixel_values"):
        zoo.build("blip")


# -- models


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_model_is_tiny_and_live(name: str, models: dict[str, PreTrainedModel]) -> None:
    model = models[name]
    assert not model.training
    assert sum(parameter.numel() for parameter in model.parameters()) < 2_000_000
    ids = zoo.ids_for(model, 12, 1)
    other = ids.clone()
    other[-5] = ids[-5] % 100 + 9  # near the end: every window and state reaches it
    logits = logits_of(model, ids)
    assert torch.isfinite(logits).all()
    assert float((logits_of(model, other) - logits).abs().max() / logits.abs().max()) > 1e-2
    assert float(logits.softmax(-1).max()) < 0.99


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "falcon:alibi", "falcon_h1", "qwen3_next", "jamba"])
def test_keys_and_values_matter(name: str, models: dict[str, PreTrainedModel]) -> None:
    assert effect_of(models[name], "keys") > 1e-2
    assert effect_of(models[name], "values") > 1e-2


@pytest.mark.parametrize("name", RECURRENT)
def test_states_matter(name: str, models: dict[str, PreTrainedModel]) -> None:
    assert effect_of(models[name], "conv_states") > 1e-2
    if name != "lfm2":  # convolutions are all it has
        assert effect_of(models[name], "recurrent_states") > 1e-2


def test_a_default_initialisation_would_hide_a_dead_state(models: dict[str, PreTrainedModel]) -> None:
    config = copy.deepcopy(models["falcon_h1"].config)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config).eval()
    assert effect_of(plain, "recurrent_states") < 1e-3 < effect_of(models["falcon_h1"], "recurrent_states")


@pytest.mark.parametrize("name", ["llama", "qwen2_vl", "falcon_h1", "deepseek_v32", "llama:yarn", "llama:linear"])
def test_positions_matter_far_out(name: str) -> None:
    model = zoo.build(name)
    ids, positions = zoo.ids_for(model, 6, 1)[None], torch.arange(6)[None]
    apart = positions + torch.tensor([[0, 0, 0, 7, 7, 7]]) + 100_000
    with torch.no_grad():
        near, far = (model(input_ids=ids, position_ids=where).logits[0, -1] for where in (positions, apart))
    assert torch.isfinite(far).all()
    assert float((far - near).abs().max() / near.abs().max()) > 1e-2


def test_every_kind_of_layer_is_there(models: dict[str, PreTrainedModel]) -> None:
    kinds = {name: set(models[name].config.get_text_config().layer_types) for name in ("gemma3_text", "qwen3_next")}
    assert kinds == {
        "gemma3_text": {"sliding_attention", "full_attention"},
        "qwen3_next": {"linear_attention", "full_attention"},
    }
    assert models["mistral:sliding"].config.sliding_window == models["gemma3_text"].config.sliding_window == 8


def test_a_feature_that_is_off_stays_off(models: dict[str, PreTrainedModel]) -> None:
    assert CONFIG_MAPPING["phi3"]().sliding_window is None
    assert models["phi3:longrope"].config.sliding_window is None


def test_sections_fit_the_small_head(models: dict[str, PreTrainedModel]) -> None:
    rope = models["qwen2_vl"].config.get_text_config().rope_parameters
    assert sum(rope["mrope_section"]) == 8
    assert configs.small_sections([24, 20, 20], 8) == [4, 2, 2]
    assert min(configs.small_sections([11, 11, 10], 4)) == 1


def test_a_fixed_table_is_not_drawn() -> None:
    table = zoo.build("marian").get_decoder().embed_positions.weight
    assert torch.equal(table[0], torch.tensor([0.0] * 32 + [1.0] * 32))  # sines and cosines of position 0


# -- the same every time


@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_name_and_seed_fix_the_weights(name: str, models: dict[str, PreTrainedModel]) -> None:
    first, again, other = (model.state_dict() for model in (models[name], zoo.build(name), zoo.build(name, seed=1)))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


def test_a_variant_has_weights_of_its_own(models: dict[str, PreTrainedModel]) -> None:
    assert not torch.equal(models["llama"].lm_head.weight, zoo.build("llama:linear").lm_head.weight)


def test_generators_of_the_caller_are_untouched() -> None:
    torch.manual_seed(7)
    random.seed(7)
    expected = torch.rand(3), random.random()
    torch.manual_seed(7)
    random.seed(7)
    zoo.build("jamba")
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


def test_dtype_and_attention_are_honoured() -> None:
    model = zoo.build("llama", dtype=torch.bfloat16, attn_implementation="eager")
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    assert zoo.build("llama").config._attn_implementation == "sdpa"
    assert zoo.build("gemma2").config._attn_implementation == "eager"  # it has no sdpa


@pytest.mark.parametrize("name", ["llama", "bart", "qwen2_vl"])
def test_generation_runs_to_its_length(name: str) -> None:
    model = zoo.build(name)
    assert model.config.get_text_config(decoder=True).eos_token_id is not None
    assert model.generation_config.eos_token_id is model.generation_config.forced_eos_token_id is None
    out = model.generate(zoo.ids_for(model, 4, 0)[None], max_new_tokens=24, do_sample=False)
    assert out.shape == (1, 28)


def test_ids_are_plain_text(models: dict[str, PreTrainedModel]) -> None:
    model = models["qwen2_vl"]
    ids = zoo.ids_for(model, 500, 0)
    assert ids.dtype == torch.int64
    assert ids.shape == (500,)
    assert torch.equal(ids, zoo.ids_for(model, 500, 0))
    assert not torch.equal(ids, zoo.ids_for(model, 500, 1))
    special = {model.config.image_token_id, model.config.video_token_id, 0, 1, 2}
    assert special.isdisjoint(ids.tolist())
    assert int(ids.max()) < model.config.image_token_id < model.config.get_text_config().vocab_size


# -- what a newer transformers may bring


class NewConfig(LlamaConfig):
    """A type that this library has never heard of."""

    model_type = "zoo_new_type"
    new_hidden_size: int = 9_000
    index_topk: int = 2_048


@pytest.fixture
def new_type(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, NewConfig.model_type, NewConfig)
    monkeypatch.setitem(CAUSAL, NewConfig.model_type, "LlamaForCausalLM")
    return NewConfig.model_type


def test_a_new_type_is_built_by_the_general_rule(new_type: str) -> None:
    assert new_type in zoo.model_types()
    config: Any = zoo.build(new_type).config
    assert isinstance(config, AutoConfig.for_model(new_type).__class__)
    assert (config.hidden_size, config.num_key_value_heads, config.head_dim) == (64, 2, 16)
    assert (config.max_position_embeddings, config.index_topk, config.new_hidden_size) == (131_072, 64, 64)


def test_a_type_that_stays_large_is_refused_before_it_takes_memory(
    monkeypatch: pytest.MonkeyPatch, new_type: str
) -> None:
    monkeypatch.setattr(building, "MAX_ELEMENTS", 1_000)
    with pytest.raises(zoo.ZooError, match=r"elements, \(256, 64\) the largest, are no small model"):
        zoo.build(new_type)


# -- all of it


def test_the_command_prints_a_line_for_each_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["zoo", "gemma3_text", "blip"])
    command.main()
    first, second = capsys.readouterr().out.splitlines()
    assert re.match(r"OK   gemma3_text .* sdpa .* DynamicCache\[2 DynamicSlidingWindowLayer, 2 DynamicLayer\]", first)
    assert re.match(r"FAIL blip .* needs pixel inputs", second)


@pytest.mark.slow
def test_the_whole_zoo_but_for_the_known_failures() -> None:
    found = {}
    for name in (*zoo.model_types(), *zoo.variants()):
        try:
            zoo.build(name)
        except zoo.ZooError as error:
            found[name] = str(error)
    assert set(found) == set(FAILURES) & set(zoo.model_types())
    assert {name: told for name, told in found.items() if FAILURES[name] not in told} == {}
