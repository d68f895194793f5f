"""Tiny random vision-language models whose tokens have three positions, some with the head sizes of published ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from editable_cache.testing.tiny_models import draw_weights

IMAGE, VIDEO, START, END = 300, 301, 302, 303
"""Ids of the image and video placeholders and of the marks around them."""

FIRST_TEXT_ID, LAST_TEXT_ID = 5, 290
PATCH = 4
PATCH_VALUES = 3 * 2 * PATCH * PATCH
"""Numbers in one patch: colours x frames x height x width."""


class Family(NamedTuple):
    """A row: transformers' name, how its rotary embedding is set, its vision tower."""

    model_type: str
    sections: tuple[int, int, int]
    published_sections: tuple[int, int, int]
    published_theta: float
    partial: float
    vision: Mapping[str, Any]


_TOWER: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": 2}
_WIDE = {**_TOWER, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48}

FAMILIES: dict[str, Family] = {
    "Qwen2-VL": Family(
        "qwen2_vl", (2, 3, 3), (16, 24, 24), 1e6, 1.0, {**_TOWER, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    ),
    "Qwen2.5-VL": Family(
        "qwen2_5_vl", (2, 3, 3), (16, 24, 24), 1e6, 1.0, {**_WIDE, "window_size": 16, "fullatt_block_indexes": [1]}
    ),
    "Qwen3-VL": Family(
        "qwen3_vl",
        (4, 2, 2),
        (24, 20, 20),
        5e6,
        1.0,
        {**_WIDE, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
    "GLM-4V": Family("glm4v", (1, 1, 2), (8, 12, 12), 1e4, 0.5, {**_WIDE, "image_size": 16}),
}


def tiny_vision_model(name: str) -> PreTrainedModel:
    """Three layers of four heads of 16 channels, a vision tower of two layers; float32, evaluation mode."""
    family = FAMILIES[name]
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return _built(family, sizes, family.sections, 1e4)


def published_model(name: str) -> PreTrainedModel:
    """One layer with the head size, sections and theta of the published checkpoints; else as small as it goes."""
    family = FAMILIES[name]
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 128}
    return _built(family, {**sizes, "hidden_size": 128}, family.published_sections, family.published_theta)


def _built(family: Family, sizes: Mapping[str, int], sections: tuple[int, int, int], theta: float) -> PreTrainedModel:
    text = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": theta,
            "mrope_section": list(sections),
            "partial_rotary_factor": family.partial,
        },
        **sizes,
    }
    vision = dict(family.vision)
    vision["hidden_size" if "embed_dim" in vision else "out_hidden_size"] = text["hidden_size"]
    config = AutoConfig.for_model(
        family.model_type,
        text_config=copy.deepcopy(text),
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    draw_weights(model)
    return model.eval()
