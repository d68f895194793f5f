"""An unedited cache with images is a DynamicCache: tokens, logits, positions; through `generate` and bare forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from vision_support import (
    FAMILIES,
    SEVERAL_AXES,
    assert_same,
    forward,
    generate,
    image_ids,
    inputs,
    own_positions,
    pixels,
    text_ids,
    vision_model,
)

from editable_cache import EditableCache
from editable_cache.testing import oracles


def prompt(name: str, after: int = 7) -> torch.Tensor:
    return torch.cat((text_ids(9, 1), image_ids(name), text_ids(after, 2)))


def stock(name: str) -> DynamicCache:
    return DynamicCache(config=vision_model(name).config)


@pytest.mark.parametrize("name", FAMILIES)
def test_generate_is_that_of_a_dynamic_cache(name: str) -> None:
    given, cache = inputs(name, prompt(name), pixels(name)), EditableCache(vision_model(name))
    expected = generate(name, stock(name), given)
    actual = generate(name, cache, given)
    assert_same(actual, expected, 2e-5)
    other = generate(name, stock(name), inputs(name, prompt(name), pixels(name, 8)))
    assert oracles.relative_error(other.logits[0], expected.logits[0]) > 1e-2  # the image matters
    length = len(prompt(name))
    assert torch.equal(cache.token_ids, expected.sequences[:, :-1])
    assert torch.equal(
        cache.ledger.places(slice(0, length)).expand(len(own_positions(name, prompt(name))), 1, -1)
        if name not in SEVERAL_AXES
        else cache.ledger.places(slice(0, length)),
        own_positions(name, prompt(name))[:, None],
    )
    held = (cache.ledger.images[0] > 0).nonzero()[:, 0]
    places = (prompt(name) == vision_model(name).config.image_token_id).nonzero()[:, 0]
    assert set(places.tolist()) <= set(held.tolist())
    assert int(held.min()) == int(places.min())
    assert int(held.max()) == int(places.max())


@pytest.mark.parametrize("name", FAMILIES)
def test_bare_forwards_are_those_of_a_dynamic_cache(name: str) -> None:
    """The image first, then text token by token."""
    given = inputs(name, prompt(name), pixels(name))
    cache, other = EditableCache(vision_model(name)), stock(name)
    assert oracles.relative_error(forward(name, cache, given), forward(name, other, given)) <= 2e-5
    places = own_positions(name, prompt(name))
    assert torch.equal(cache.positions[0], places[0])
    for step, token in enumerate(text_ids(3, 5)):
        mine = forward(name, cache, {"input_ids": token[None, None]})
        at = {"position_ids": (places.max() + 1 + step)[None, None]}
        assert oracles.relative_error(mine, forward(name, other, {"input_ids": token[None, None], **at})) <= 2e-5
    assert cache.positions[0, -3:].tolist() == [int(places.max()) + 1 + step for step in range(3)]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_second_turn_with_a_second_image(name: str) -> None:
    """`generate` with everything so far and another image equals one from an empty cache; the first is not encoded."""
    first = prompt(name)
    cache = EditableCache(vision_model(name))
    no_image = {"suppress_tokens": [vision_model(name).config.image_token_id]}
    answer = generate(name, cache, inputs(name, first, pixels(name, 7)), 3, **no_image).sequences[0]
    whole = torch.cat((answer, text_ids(4, 3), image_ids(name), text_ids(5, 4)))
    given = inputs(name, whole, pixels(name, 7), pixels(name, 8))
    actual = generate(name, cache, given)
    assert_same(actual, generate(name, stock(name), given))
    fresh = EditableCache(vision_model(name))
    generate(name, fresh, given)
    assert torch.equal(cache.ledger.places(slice(None)), fresh.ledger.places(slice(None)))
    assert [cache.ledger.image_at(0, s) for s in range(len(whole))] == [
        fresh.ledger.image_at(0, s) for s in range(len(whole))
    ]


@pytest.mark.parametrize("name", ["qwen2_vl", "glm4v", "llava", "gemma3@vlm"])
def test_only_the_new_tokens_and_their_image(name: str) -> None:
    """A bare forward of new tokens with an image of their own, behind a cache."""
    cache, whole = EditableCache(vision_model(name)), prompt(name)
    forward(name, cache, {"input_ids": whole[None, :5]})
    given = inputs(name, whole[5:], pixels(name))
    del given["attention_mask"]
    actual = forward(name, cache, given)
    other = stock(name)
    expected = forward(name, other, inputs(name, whole, pixels(name)))[:, 5:]
    assert oracles.relative_error(actual, expected) <= 1e-4
    assert torch.equal(cache.positions[0], own_positions(name, whole)[0])


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "llava"])
def test_sampled_and_searched(name: str) -> None:
    given = inputs(name, prompt(name), pixels(name))
    for options in ({"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}, {"prefill_chunk_size": 5}):
        results = []
        for cache in (EditableCache(vision_model(name)), stock(name)):
            torch.manual_seed(3)
            results.append(generate(name, cache, given, **options).sequences)
        assert torch.equal(*results), options


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_a_covered_prompt_runs_its_last_token_again(name: str) -> None:
    given, cache = inputs(name, prompt(name), pixels(name)), EditableCache(vision_model(name))
    forward(name, cache, given)
    assert_same(generate(name, cache, given), generate(name, stock(name), given))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_videos_keep_the_models_own_numbering(name: str) -> None:
    """Text behind a long video starts before its last frame in the installed transformers: no rule, but a record."""
    model: Any = vision_model(name)
    video = model.config.video_token_id
    ids = torch.cat((text_ids(5, 1), torch.full((9,), video), text_ids(4, 2)))[None]
    kind = torch.where(ids == video, 2, 0)
    grid = torch.tensor([[9, 2, 2]])
    values = torch.randn(36, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(2))
    given = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": kind,
        "pixel_values_videos": values,
        "video_grid_thw": grid,
    }
    cache = EditableCache(model)
    assert_same(generate(name, cache, given), generate(name, stock(name), given), 2e-5)
    expected = model.model.get_rope_index(ids, mm_token_type_ids=kind, video_grid_thw=grid)[0]
    assert torch.equal(cache.ledger.places(slice(0, ids.shape[1])), expected)
    assert cache.ledger.images[0, 5:14].unique().tolist() == [1]
