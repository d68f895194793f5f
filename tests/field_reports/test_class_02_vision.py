"""Field reports, class 2: positions on several axes, state on the model; and the image part of B52."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from vision_support import (
    FAMILIES,
    SEVERAL_AXES,
    assert_same,
    chunk,
    forward,
    generate,
    image_ids,
    inputs,
    keys_of,
    own_positions,
    pixels,
    reference,
    text_ids,
    vision_model,
)

from editable_cache import EditableCache, LedgerError, VisionChunk
from editable_cache.adapters import host
from editable_cache.testing import oracles


def with_image(name: str) -> Any:
    return inputs(name, torch.cat((text_ids(9, 1), image_ids(name), text_ids(5, 2))), pixels(name))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_b11_three_axis_positions_move_alike(name: str) -> None:
    """ggml-org/llama.cpp#13865: the shift used one axis; text behind an image stands at max + 1, not at its slot."""
    cache = EditableCache(vision_model(name))
    cache.append(text_ids(9, 1))
    cache.splice(chunk(name), seam_tokens=0)
    cache.append(text_ids(4, 2))
    ids = cache.token_ids[0]
    start, stop = 9, 9 + len(image_ids(name))
    own = own_positions(name, ids)
    assert torch.equal(cache.ledger.places(slice(None))[:, 0], own)
    assert int(cache.positions[0, stop]) == int(own[:, :stop].max()) + 1 < stop
    for moved, worst in ((own, 1e-4), (own + torch.tensor([[0], [1], [1]]), None)):
        expected = reference(name, ids, start, stop, moved)
        error = max(oracles.relative_error(a, b) for a, b in zip(keys_of(cache), expected.keys, strict=True))
        assert error <= worst if worst is not None else error > 1e-2


@pytest.mark.parametrize("name", SEVERAL_AXES)
def test_b12_two_caches_take_turns(name: str) -> None:
    """huggingface/transformers#43952, #39749, #45381: the rope delta of one prompt enters the other's positions."""
    model: Any = vision_model(name)
    text = inputs(name, text_ids(12, 3))
    steps = text_ids(5, 6)

    def alone(given: Any) -> list[torch.Tensor]:
        cache = EditableCache(model)
        return [forward(name, cache, given), *(forward(name, cache, {"input_ids": s[None, None]}) for s in steps)]

    def stock(given: Any) -> DynamicCache:
        cache = DynamicCache(config=model.config)
        forward(name, cache, given)
        return cache

    expected = [alone(with_image(name)), alone(text)]
    for order in ((0, 1), (1, 0)):
        caches = [EditableCache(model), EditableCache(model)]
        given = [with_image(name), text]
        found: list[list[torch.Tensor]] = [[], []]
        for index in order:
            found[index].append(forward(name, caches[index], given[index]))
        for step in steps:
            for index in order:
                found[index].append(forward(name, caches[index], {"input_ids": step[None, None]}))
        for mine, theirs in zip(found, expected, strict=True):
            assert max(oracles.relative_error(a, b) for a, b in zip(mine, theirs, strict=True)) <= 2e-5
    # control: the stock cache of the text prompt takes the image's delta
    cache = stock(text)
    stock(with_image(name))
    wrong = forward(name, cache, {"input_ids": steps[:1][None]})
    assert oracles.relative_error(wrong, expected[1][1]) > 1e-2
    model.model.rope_deltas = None


@pytest.mark.parametrize("name", SEVERAL_AXES)
def test_b12_generate_takes_turns(name: str) -> None:
    """The same through `generate`, one token at a time, with a batch of another size between."""
    model: Any = vision_model(name)
    prompts = [with_image(name), inputs(name, text_ids(12, 3))]
    expected = [generate(name, EditableCache(model), given, 4).sequences for given in prompts]
    caches, sequences = [EditableCache(model), EditableCache(model)], [given["input_ids"] for given in prompts]
    for _ in range(4):
        for index in (0, 1):
            given = prompts[index] if not len(caches[index].ledger) else {}
            given = {**given, "input_ids": sequences[index], "attention_mask": torch.ones_like(sequences[index])}
            sequences[index] = generate(name, caches[index], given, 1).sequences
        model.model.rope_deltas = torch.tensor([[17], [23]])  # what a batch of two, somewhere else, leaves behind
    for mine, theirs in zip(sequences, expected, strict=True):
        assert torch.equal(mine, theirs)
    model.model.rope_deltas = None


@pytest.mark.parametrize("name", SEVERAL_AXES)
def test_b12_a_fresh_model_knows_no_delta(name: str, tmp_path: Path) -> None:
    """A cache with an image goes on in a process that never saw one."""
    cache = EditableCache(vision_model(name))
    forward(name, cache, with_image(name))
    cache.save_pretrained(tmp_path / "cache")
    fresh: Any = vision_model.__wrapped__(name)
    assert fresh.model.rope_deltas is None
    loaded = EditableCache.from_pretrained(tmp_path / "cache", model=fresh)
    step = text_ids(1, 8)[None]
    with torch.no_grad():
        mine = fresh(input_ids=step, **{host.cache_argument(fresh): loaded}).logits
    assert oracles.relative_error(mine, forward(name, cache, {"input_ids": step})) <= 1e-6
    assert fresh.model.rope_deltas is None


@pytest.mark.parametrize("name", FAMILIES)
def test_b52_same_ids_other_image(name: str) -> None:
    """LMCache/LMCache#4086, vllm-project/vllm#20261, sgl-project/sglang#2151: cells found by placeholder ids."""
    given = inputs(name, image_ids(name), pixels(name))
    other = {key: value.clone() for key, value in given.items()}
    other["pixel_values"].view(-1)[17] += 0.25
    first, second = (VisionChunk.precompile(vision_model(name), None, g, name="image") for g in (given, other))
    assert torch.equal(first.token_ids, second.token_ids)
    assert first.digest != second.digest
    assert first.images != second.images
    cache = EditableCache(vision_model(name))
    cache.splice(first)
    prompt = torch.cat((image_ids(name), text_ids(4, 2)))
    images = [{k: v for k, v in g.items() if k in pixels(name)} for g in (given, other)]
    before = cache.ledger
    with pytest.raises(LedgerError, match="another one than the cache saw"):
        generate(name, cache, inputs(name, prompt, images[1]))
    with pytest.raises(LedgerError, match="another one than the cache saw"):
        forward(name, cache, inputs(name, prompt, images[1]))
    assert cache.ledger.same(before)
    right = generate(name, cache.fork(), inputs(name, prompt, images[0]))
    assert_same(generate(name, cache, {k: v for k, v in inputs(name, prompt).items() if "kinds" not in k}), right)


def test_b52_placeholders_that_no_image_filled() -> None:
    name = "llava"
    cache = EditableCache(vision_model(name))
    with pytest.raises(LedgerError, match="no pixels come along"):
        cache.append(image_ids(name))
    forward(name, cache, {"input_ids": image_ids(name)[None]})  # by hand: the placeholder's own embedding
    with pytest.raises(LedgerError, match="expected no image"):
        generate(name, cache, inputs(name, torch.cat((image_ids(name), text_ids(3))), pixels(name)))
