"""What can't be done with images, and says so: other attention, images outside of tokens, other numberings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from vision_support import (
    FAMILIES,
    Family,
    assert_same,
    chunk,
    forward,
    generate,
    image_ids,
    inputs,
    pixels,
    text_ids,
    vision_model,
)

from editable_cache import EditableCache, LedgerError, UnsupportedModelError, VisionChunk
from editable_cache.adapters import host, measured
from editable_cache.adapters.images import num_axes, number
from editable_cache.testing import oracles
from editable_cache.testing.zoo import build


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three more types, whose images are no chunks."""
    for name, family in {
        "paligemma": Family(16, FAMILIES["llava"].tensors, (1, 3, 56, 56), {"image_size": 56}),
        "qwen3_5@vlm": FAMILIES["qwen3_vl"],
        "mllama@vlm": Family(1, FAMILIES["llava"].tensors, (1, 1, 1, 3, 56, 56)),
    }.items():
        monkeypatch.setitem(FAMILIES, name, family)


def prompt(name: str) -> torch.Tensor:
    return torch.cat((text_ids(9, 1), image_ids(name), text_ids(7, 2)))


@pytest.mark.usefixtures("families")
def test_paligemma_reads_prompts_in_both_directions() -> None:
    """Unedited it is a DynamicCache; nothing of it moves, since a chunk alone is read otherwise than in a prompt."""
    name = "paligemma"
    model = vision_model(name)
    given = inputs(name, prompt(name), pixels(name))
    expected = generate(name, DynamicCache(config=model.config), given)
    cache = EditableCache(model)
    assert_same(generate(name, cache, given), expected, 2e-5)
    with pytest.raises(UnsupportedModelError) as caught:
        VisionChunk.precompile(model, None, inputs(name, image_ids(name), pixels(name)), name="image")
    assert any(reason.what == "prefill without a mask" for reason in caught.value.reasons)
    before = cache.positions.clone()
    with pytest.raises(UnsupportedModelError, match="measured"):
        cache.remove((2, 4))
    assert torch.equal(cache.positions, before)


@pytest.mark.usefixtures("families")
def test_mllama_keeps_images_outside_of_its_tokens() -> None:
    name = "mllama@vlm"
    model = build(name)
    cache, ids = EditableCache(model), text_ids(9, 1)[None]
    images = {
        "pixel_values": torch.randn(1, 1, 1, 3, 56, 56),
        "aspect_ratio_ids": torch.ones(1, 1).long(),
        "aspect_ratio_mask": torch.ones(1, 1, 1).long(),
        "cross_attention_mask": torch.ones(1, 9, 1, 1).long(),
    }
    name_of = host.cache_argument(model)
    with torch.no_grad():
        expected = model(input_ids=ids, **{name_of: DynamicCache(config=model.config)}).logits
        assert oracles.relative_error(model(input_ids=ids, **{name_of: cache}).logits, expected) <= 2e-5
        with pytest.raises(UnsupportedModelError, match="outside of its tokens"):
            model(input_ids=ids, **{name_of: EditableCache(model)}, **images)
        with pytest.raises(UnsupportedModelError, match="outside of its tokens"):
            model.generate(ids, **{name_of: EditableCache(model)}, max_new_tokens=1, **images)
    cache.append(text_ids(5, 2))
    assert len(cache.ledger) == 14


@pytest.mark.usefixtures("families")
def test_hybrids_take_images_with_the_prompt() -> None:
    name = "qwen3_5@vlm"
    model = vision_model(name)
    given, cache = inputs(name, prompt(name), pixels(name)), EditableCache(model)
    assert_same(generate(name, cache, given), generate(name, DynamicCache(config=model.config), given), 2e-5)
    assert num_axes(model) == 3
    assert cache.ledger.axes.any()
    with pytest.raises(UnsupportedModelError, match="recurrent state"):
        VisionChunk.precompile(model, None, inputs(name, image_ids(name), pixels(name)), name="image")
    with pytest.raises(LedgerError, match="stand for an image"):
        cache.remove((5, 7))
    assert cache.ledger.digests


def test_hunyuan_counts_rows_and_columns_of_an_image_from_zero() -> None:
    """The numbering that no one distance moves; the self-test refuses the model already."""
    model = build("hunyuan_vl")
    assert num_axes(model) == 4
    assert measured(model).against_moving
    ids = torch.full((1, 6), model.config.image_token_id)
    arguments = {"image_grid_thw": torch.tensor([[1, 4, 4]])}
    valid = torch.ones(ids.shape, dtype=torch.bool)
    here, there = (number(model, ids, torch.tensor([at]), valid, arguments) for at in (2, 31))
    assert set((there - here)[:, 0, 2].tolist()) == {0, 29}


def test_images_without_a_token_are_refused() -> None:
    name = "llava"
    given = inputs(name, text_ids(9), pixels(name))
    for call in (forward, generate):
        cache = EditableCache(vision_model(name))
        with pytest.raises(UnsupportedModelError, match="placeholders"):
            call(name, cache, given)
        assert not len(cache.ledger)


def test_a_cache_that_ends_inside_an_image() -> None:
    name = "qwen2_vl"
    given: dict[str, Any] = inputs(name, prompt(name), pixels(name))
    cache = EditableCache(vision_model(name))
    forward(name, cache, given)
    cache.crop(-12)
    assert int(cache.ledger.images[0, -1]) == 1
    with pytest.raises(LedgerError, match="inside an image"):
        generate(name, cache, given)
    cache.crop(-3)
    assert_same(generate(name, cache, given), generate(name, EditableCache(vision_model(name)), given))


def test_chunks_of_other_models_are_refused() -> None:
    cache = EditableCache(vision_model("qwen2_5_vl"))
    with pytest.raises(Exception, match="another model"):
        cache.splice(chunk("qwen2_vl"))
