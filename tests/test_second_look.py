"""What a second hostile look found: compressed caches in verify, half an image, changed weights, shared modules."""

from __future__ import annotations

import copy

import pytest
import torch
from cache_support import refused
from transformers import DynamicCache
from vision_support import forward, generate, image_ids, inputs, pixels, text_ids, vision_model

from editable_cache import CompatibilityError, EditableCache, LedgerError, Skill, UnsupportedModelError
from editable_cache.adapters import host
from editable_cache.testing import oracles, zoo


@pytest.mark.skipif(host.DUMMY_LAYER is None, reason="compressed caches are plain caches in this transformers")
def test_verify_of_a_compressed_cache() -> None:
    """Its layers keep entries and open windows, not convolution and recurrent states."""
    model = zoo.build("deepseek_v4")
    ids = zoo.ids_for(model, 30, seed=1)
    cache = EditableCache(model)
    cache.append(ids[:10])
    cache.append(ids[10:])
    assert cache.verify().ok
    changed = next(t for value in cache.states() for t in value.leaves.values() if _is_number(t))
    before, layer = changed, next(la for la in cache.kept_layers if la.is_initialized)
    value = layer.state_value()
    path = next(path for path, leaf in value.leaves.items() if _is_number(leaf) and torch.equal(leaf, before))
    layer.set_state_value(value._replace(leaves={**value.leaves, path: before + 1.0}))
    assert not cache.verify().ok


def _is_number(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel() > 0


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3@vlm", "llava"])
def test_the_rest_of_an_image_needs_its_pixels(name: str) -> None:
    """Without them its placeholders would run as text beside half of the image."""
    model = vision_model(name)
    ids = torch.cat((text_ids(6), image_ids(name), text_ids(4, seed=2)))
    cache = EditableCache(model)
    generate(name, cache, inputs(name, ids, pixels(name)), count=2)
    cache.crop(9 - len(cache.token_ids[0]))
    plain = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
    with pytest.raises(LedgerError, match="inside an image"):
        generate(name, cache, plain)
    with pytest.raises(LedgerError, match="inside an image"):
        forward(name, cache, {"input_ids": ids[None, 9:]})
    with pytest.raises(LedgerError, match="no pixels come along"):
        cache.append(ids[9:])
    assert len(cache.token_ids[0]) == 9
    cache.append(text_ids(3, seed=3))  # text behind half an image is what the caller asked for


@pytest.mark.parametrize("name", ["falcon_h1", "mamba2"])
def test_a_crop_does_not_compute_with_other_weights(name: str) -> None:
    """The tokens behind the last kept state would run through other weights than those before them."""
    model = copy.deepcopy(zoo.build(name))
    ids = zoo.ids_for(model, 20, seed=1)
    cache = EditableCache(model)
    cache.append(ids[:10])
    cache.append(ids[10:])
    with torch.no_grad():
        next(w for n, w in model.named_parameters() if w.ndim == 2 and "layers" in n).mul_(1.3)
    with pytest.raises(CompatibilityError):
        cache.crop(-3)
    assert len(cache.token_ids[0]) == 20
    cache.crop(-10)  # the state was kept there: nothing is computed
    assert cache.token_ids[0].tolist() == ids[:10].tolist()
    cache.crop(-10)


def test_a_cache_of_the_inner_model_does_not_disturb_those_of_the_outer() -> None:
    model = zoo.build("llama")
    ids = zoo.ids_for(model, 20, seed=1)
    inner = EditableCache(model.base_model)
    cache = EditableCache(model)
    cache.append(ids[:10])
    with torch.no_grad():
        model(ids[None, 10:], past_key_values=cache)
    assert cache.token_ids[0].tolist() == ids.tolist()
    plain = oracles.full(model, ids, torch.arange(20))
    oracles.check({"logits": cache.next_token_logits()}, {"logits": plain.logits[:, -1]}, 1e-4)
    with pytest.raises(LedgerError):
        model(ids[None], past_key_values=inner)


@pytest.mark.skipif(host.DUMMY_LAYER is None, reason="compressed caches are plain caches in this transformers")
def test_padding_that_was_folded_into_entries_can_not_be_taken_out() -> None:
    """A plain forward with padding is the model's own; a row of it without its padding would be another text."""
    model = zoo.build("deepseek_v4")
    ids = zoo.ids_for(model, 24, seed=1).reshape(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    cache = EditableCache(model)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    with pytest.raises(UnsupportedModelError, match="padding"):
        cache.unstack()
    whole = EditableCache(model)
    with torch.no_grad():
        model(ids, past_key_values=whole)
    assert [row.token_ids[0].tolist() for row in whole.unstack()] == ids.tolist()


@pytest.mark.parametrize("with_model", [False, True])
def test_layers_of_transformers_record_their_past_where_it_is_asked_for(with_model: bool) -> None:
    """Prompt lookup crops what it rejects; sliding layers of transformers can only then."""
    model = zoo.build("moshi")
    ids = zoo.ids_for(model, 12, seed=1)[None]
    found = [
        model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            do_sample=False,
            prompt_lookup_num_tokens=2,
            **{host.cache_argument(model): cache},
        ).tolist()
        for cache in (
            DynamicCache(config=model.config),
            EditableCache(model) if with_model else EditableCache(config=model.config),
        )
    ]
    assert found[0] == found[1]


def test_placeholders_without_pixels_are_no_text() -> None:
    """Library calls carry no pixels, so the model would read the placeholders as words, and nobody would notice."""
    model = vision_model("llava")
    cache = EditableCache(model)
    cache.append(text_ids(5))
    ids = image_ids("llava").flatten()
    for call in (
        lambda: cache.append(ids),
        lambda: cache.insert(ids, 2),
        lambda: cache.sync(torch.cat((text_ids(5).flatten(), ids))),
        lambda: Skill.precompile(model, None, ids, name="x"),
    ):
        with refused(cache, LedgerError, ValueError, "VisionChunk"):
            call()
