"""Tiny random vision-language models, their images, and stock references."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, DynamicCache, PreTrainedModel

from editable_cache import EditableCache, VisionChunk
from editable_cache.adapters import host
from editable_cache.testing import oracles
from editable_cache.testing.tiny_models import VOCAB_SIZE, draw_weights
from editable_cache.testing.zoo import build

MARK_BEFORE, MARK_AFTER, ROW_END = 140, 141, 142
"""Text ids that stand around images here."""

FIRST_TEXT_ID, LAST_TEXT_ID = 20, 120


class Expected(NamedTuple):
    """What a stock forward left: logits ``[1, n, vocab]``, keys and values of every layer."""

    logits: Tensor
    keys: list[Tensor]
    values: list[Tensor]


class Family(NamedTuple):
    """How many tokens an image has, its tensors, and what differs from the zoo's config of the model type."""

    tokens: int
    tensors: Callable[[Tensor], dict[str, Tensor]]
    shape: tuple[int, ...]
    vision: Mapping[str, Any] = {}
    top: Mapping[str, Any] = {}
    rows: int = 1
    base: str = ""
    text: Mapping[str, Any] = {}


GRID = (1, 4, 6)


def _patches(values: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": values, "image_grid_thw": torch.tensor([GRID])}


def _plain(values: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": values}


def _sized(values: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": values, "image_sizes": torch.tensor([values.shape[-2:]])}


FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family(6, _patches, (24, 3 * 2 * 14 * 14)),
    "qwen2_5_vl": Family(6, _patches, (24, 3 * 2 * 14 * 14)),
    "qwen3_vl": Family(6, _patches, (24, 3 * 2 * 16 * 16)),
    "glm4v": Family(6, _patches, (24, 3 * 2 * 14 * 14)),
    "gemma3@vlm": Family(4, _plain, (1, 3, 64, 64), {"image_size": 64}, {"mm_tokens_per_image": 4}),
    "llava": Family(16, _plain, (1, 3, 56, 56), {"image_size": 56}),
    "mistral3": Family(6, _sized, (1, 3, 56, 84), rows=2),
    "internvl": Family(8, _plain, (2, 3, 56, 56), {"image_size": (56, 56)}, {"image_seq_length": 4}),
    "smolvlm": Family(8, _plain, (1, 2, 3, 128, 128), {"image_size": 128}, rows=2),
    "idefics3": Family(8, _plain, (1, 2, 3, 128, 128), {"image_size": 128}, rows=2),
}

READING = Family(
    6,
    _patches,
    (24, 3 * 2 * 14 * 14),
    base="qwen2_5_vl",
    top={"image_token_id": VOCAB_SIZE, "video_token_id": VOCAB_SIZE + 1},
    text={"vocab_size": VOCAB_SIZE + 8},
)
"""A Qwen2.5-VL whose ids are those of the tiny tokenizer, for texts."""

SEVERAL_AXES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")


@functools.cache
def vision_model(name: str) -> PreTrainedModel:
    """Float32, evaluation mode, weights strong enough that a wrong position shows; nobody may change it."""
    family = FAMILIES[name]
    config = copy.deepcopy(build(family.base or name).config)
    for key, value in family.vision.items():
        setattr(config.vision_config, key, value)
    for key, value in family.text.items():
        setattr(config.text_config, key, value)
    for key, value in family.top.items():
        setattr(config, key, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    draw_weights(model)
    for part in (model.generation_config, model.config, model.config.get_text_config()):
        part.eos_token_id, part.pad_token_id = None, 0
    return model.eval()


def text_ids(count: int, seed: int = 1) -> Tensor:
    """Plain text, int64 ``[count]``."""
    return torch.randint(FIRST_TEXT_ID, LAST_TEXT_ID, (count,), generator=torch.Generator().manual_seed(seed))


def image_ids(name: str) -> Tensor:
    """A mark, the placeholders of one image (in rows), a mark."""
    family, model = FAMILIES[name], vision_model(name)
    row = [model.config.image_token_id] * (family.tokens // family.rows)
    ids = [MARK_BEFORE, *row]
    for _ in range(family.rows - 1):
        ids += [ROW_END, *row]
    return torch.tensor([*ids, MARK_AFTER])


def pixels(name: str, seed: int = 7) -> dict[str, Tensor]:
    """One image as its model takes it."""
    family = FAMILIES[name]
    return family.tensors(torch.randn(family.shape, generator=torch.Generator().manual_seed(seed)))


def kinds(name: str, ids: Tensor) -> dict[str, Tensor]:
    """Which tokens of ``ids`` ``[batch, n]`` stand for images, as the model's processor says it."""
    is_image = (ids == vision_model(name).config.image_token_id).long()
    if name.startswith(("qwen", "glm")):
        return {"mm_token_type_ids": is_image}
    return {"token_type_ids": is_image} if name.startswith("gemma3") else {}


def inputs(name: str, ids: Tensor, *images: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a processor makes of ``ids`` ``[n]`` or ``[batch, n]`` with the images that they name."""
    ids = ids[None] if ids.dim() == 1 else ids
    stacked = {key: torch.cat([image[key] for image in images]) for key in images[0]} if images else {}
    if images and stacked["pixel_values"].dim() == 5:
        stacked["pixel_values"] = torch.cat([image["pixel_values"] for image in images], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **kinds(name, ids), **stacked}


def generate(name: str, cache: Any, given: Mapping[str, Any], count: int = 5, **options: Any) -> Any:
    """Greedy, with logits of every step."""
    model = vision_model(name)
    chosen = {
        "max_new_tokens": count,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        host.cache_argument(model): cache,
    }
    return model.generate(**given, **{**chosen, **options})


def forward(name: str, cache: Any, given: Mapping[str, Any]) -> Tensor:
    """Logits of a plain call, as a user writes it."""
    model = vision_model(name)
    with torch.no_grad():
        logits: Tensor = model(**given, **{host.cache_argument(model): cache}).logits
    return logits


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-4) -> None:
    """Same tokens and logits of every step."""
    assert torch.equal(actual.sequences, expected.sequences)
    for mine, theirs in zip(actual.logits, expected.logits, strict=True):
        assert oracles.relative_error(mine, theirs) <= tolerance


def chunk(name: str, seed: int = 7) -> VisionChunk:
    return _chunk(name, seed)


@functools.cache
def _chunk(name: str, seed: int) -> VisionChunk:
    return VisionChunk.precompile(
        vision_model(name), None, inputs(name, image_ids(name), pixels(name, seed)), name="image"
    )


def own_positions(name: str, ids: Tensor) -> Tensor:
    """The positions ``[num_axes, n]`` that the model itself gives to a prompt with one image."""
    model: Any = vision_model(name)
    if name not in SEVERAL_AXES:
        return torch.arange(len(ids))[None]
    given = inputs(name, ids, pixels(name))
    grid, kind = given["image_grid_thw"], given["mm_token_type_ids"]
    positions: Tensor = model.model.get_rope_index(ids[None], image_grid_thw=grid, mm_token_type_ids=kind)[0]
    return positions[:, 0]


def reference(name: str, ids: Tensor, start: int, stop: int, positions: Tensor) -> Expected:
    """One stock forward of ids and pixels in which tokens ``[start, stop)`` do not see what stands before them."""
    model = vision_model(name)
    seen = torch.ones(len(ids), len(ids), dtype=torch.bool)
    seen[start:stop, :start] = False
    mask = oracles.masks(model, seen)
    if name.startswith("gemma3"):  # tokens of an image see each other in both directions
        slots = (ids == model.config.image_token_id).nonzero()[:, 0]
        for one in mask.values() if isinstance(mask, dict) else [mask]:
            one[..., slots[:, None], slots] = 0.0
    cache = DynamicCache()
    given: dict[str, Any] = {**inputs(name, ids, pixels(name)), "attention_mask": mask}
    given["position_ids"] = positions[:, None] if len(positions) > 1 else positions
    logits = forward(name, cache, given)
    layers: list[Any] = cache.layers
    return Expected(logits, [layer.keys for layer in layers], [layer.values for layer in layers])


def keys_of(cache: EditableCache, start: int = 0, stop: int | None = None) -> list[Tensor]:
    return [layer.view()["keys"][..., start:stop, :] for layer in cache.editable_layers]


def values_of(cache: EditableCache, start: int = 0, stop: int | None = None) -> list[Tensor]:
    return [layer.view()["values"][..., start:stop, :] for layer in cache.editable_layers]


class StandIn:
    """Says what a processor says: which ids and tensors a text with one image has."""

    def __init__(self, name: str, template: str, tokenizer: Any = None) -> None:
        self.name, self.template, self.tokenizer = name, template, tokenizer
        self.texts: list[str] = []

    def apply_chat_template(self, turns: list[dict[str, Any]], *, tokenize: bool) -> str:
        assert not tokenize
        shown = [part["text"] if part["type"] == "text" else "<v><image></v>" for part in turns[0]["content"]]
        return self.template.format("".join(shown))

    def __call__(self, *, text: list[str], images: Any, return_tensors: str, add_special_tokens: bool) -> Any:
        assert return_tensors == "pt"
        assert not add_special_tokens
        self.texts += text
        return inputs(self.name, image_ids(self.name), images)
