"""Image chunks: compiled alone, moved by one distance on all axes, held against stock forwards of ids and pixels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from vision_support import (
    FAMILIES,
    SEVERAL_AXES,
    Expected,
    StandIn,
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
    values_of,
    vision_model,
)

from editable_cache import EditableCache, KVChunk, LedgerError, Skill, SpanError, VisionChunk
from editable_cache.adapters import measured
from editable_cache.ops import rotate_into, rotation
from editable_cache.testing import oracles

AFTER = 7


def spliced(name: str, count: int, piece: KVChunk | None = None, **options: Any) -> EditableCache:
    """Text, the image chunk with no token recomputed, text."""
    cache = EditableCache(vision_model(name))
    cache.append(text_ids(count, 1), name="before")
    cache.splice(chunk(name) if piece is None else piece, seam_tokens=0, **options)
    cache.append(text_ids(AFTER, 2), name="after")
    return cache


def joined(name: str, count: int) -> tuple[Any, int, int]:
    ids = torch.cat((text_ids(count, 1), image_ids(name), text_ids(AFTER, 2)))
    return ids, count, count + len(image_ids(name))


def errors(cache: EditableCache, expected: Expected) -> tuple[float, float]:
    """Of all keys and values, and of the logits after the last token."""
    cells = zip([*keys_of(cache), *values_of(cache)], [*expected.keys, *expected.values], strict=True)
    logits = oracles.relative_error(cache.next_token_logits(), expected.logits[:, -1])
    return max(oracles.relative_error(mine, theirs) for mine, theirs in cells), logits


@pytest.mark.parametrize("count", [9, 37])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_spliced_image_equals_a_stock_forward(name: str, count: int) -> None:
    """FROZEN: one stock forward of ids and pixels in which the image does not see the text before it."""
    ids, start, stop = joined(name, count)
    positions = own_positions(name, ids)
    cache, expected = spliced(name, count), reference(name, ids, start, stop, positions)
    assert max(errors(cache, expected)) <= 1e-4
    mine = cache.ledger.places(slice(None))
    assert torch.equal(mine if mine.dim() == 3 else mine.expand(len(positions), -1, -1), positions[:, None])
    assert torch.equal(cache.token_ids[0], ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_position_off_shows(name: str) -> None:
    ids, start, stop = joined(name, 9)
    expected = reference(name, ids, start, stop, own_positions(name, ids))
    off = replace(chunk(name), position_ids=chunk(name).position_ids + 1)
    assert min(errors(spliced(name, 9, off), expected)) > 1e-3


@pytest.mark.parametrize("name", SEVERAL_AXES)
def test_moving_the_temporal_axis_alone_shows(name: str) -> None:
    """The chunk pretends that its height and width move too far by what they would not move by."""
    ids, start, stop = joined(name, 9)
    expected = reference(name, ids, start, stop, own_positions(name, ids))
    piece, model = chunk(name), vision_model(name)
    assert piece.axes is not None
    cache = spliced(name, 9)
    delta = cache.positions[0, start] - piece.position_ids[0]
    for layer, facts in zip(cache.editable_layers, measured(model).layers, strict=True):
        rotary = facts.tensors[0].rotary
        assert rotary is not None
        assert rotary.axes is not None
        assert set(rotary.axes) == {0, 1, 2}
        keys = layer.view()["keys"][..., start:stop, :]
        assert oracles.relative_error(_back(keys, rotary, int(delta)), keys) > 1e-2
        layer.view()["keys"][..., start:stop, :] = _back(keys, rotary, int(delta))
    assert min(errors(cache, expected)) > 1e-2


def _back(keys: Any, rotary: Any, delta: int) -> Any:
    """Keys with their height and width turned back."""
    turned, out, here = torch.empty_like(keys), keys.clone(), torch.zeros(keys.shape[-2], dtype=torch.int64)
    rotate_into(turned, keys, rotation(rotary, here + delta, here))
    count = len(rotary.inv_freq)
    for index in (i for i, axis in enumerate(rotary.axes) if axis):
        pair = (index, index + count) if rotary.layout == "half" else (2 * index, 2 * index + 1)
        out[..., [rotary.start + c for c in pair]] = turned[..., [rotary.start + c for c in pair]]
    return out


@pytest.mark.parametrize("name", SEVERAL_AXES)
def test_far_away_each_frequency_turns_by_its_own_axis(name: str) -> None:
    """The model rounds each position's angle to float32, so far away even equal distances are not equal turns.

    Layer 0 only: what deeper layers compute from such angles changes itself.
    """
    far, piece, model = 120_000, chunk(name), vision_model(name)
    cache = EditableCache(model)
    cache.append(text_ids(3, 1))
    cache.splice(piece, seam_tokens=0, position=far)
    ids = torch.cat((text_ids(3, 1), piece.token_ids))
    assert int(cache.positions[0, 3]) == far
    expected = reference(name, ids, 3, len(ids), cache.ledger.places(slice(None))[:, 0]).keys[0][..., 3:, :]
    assert oracles.relative_error(keys_of(cache, 3)[0], expected) <= 1e-6
    rotary = measured(model).layers[0].tensors[0].rotary
    assert rotary is not None
    alike, keys = torch.empty_like(expected), piece.layers[0]["keys"]
    rotate_into(alike, keys, rotation(rotary, piece.position_ids, cache.positions[0, 3:]))
    assert oracles.relative_error(alike, expected) > 1e-5  # control: every frequency by the first axis


@pytest.mark.parametrize("name", FAMILIES)
def test_text_right_behind_an_image(name: str) -> None:
    """Without a mark after the image, text goes on behind its largest position."""
    piece = chunk(name)
    cache = spliced(name, 9, piece.slice(0, len(piece) - 1))
    ids = torch.cat((text_ids(9, 1), image_ids(name)[:-1], text_ids(AFTER, 2)))
    positions = own_positions(name, ids)
    assert max(errors(cache, reference(name, ids, 9, 9 + len(piece) - 1, positions))) <= 1e-4
    assert torch.equal(cache.positions[0], positions[0])


@pytest.mark.parametrize("name", SEVERAL_AXES)
def test_text_at_its_slot_number_shows(name: str) -> None:
    ids, start, stop = joined(name, 9)
    expected = reference(name, ids, start, stop, own_positions(name, ids))
    cache = spliced(name, 9)
    assert cache.positions[0, stop] < stop
    wrong = EditableCache(vision_model(name))
    wrong.append(text_ids(9, 1))
    wrong.splice(chunk(name), seam_tokens=0)
    given = {"input_ids": text_ids(AFTER, 2)[None], "position_ids": torch.arange(stop, stop + AFTER)[None]}
    assert oracles.relative_error(forward(name, wrong, given), expected.logits[:, stop:]) > 1e-2


@pytest.mark.parametrize("name", FAMILIES)
def test_generate_goes_on_from_a_spliced_image(name: str) -> None:
    """Greedy tokens equal those of the stock model over the same cells and the model's own positions."""
    cache, model = spliced(name, 9), vision_model(name)
    given = cache.inputs(text_ids(3, 4))
    length = given["input_ids"].shape[1]
    stock, ids = DynamicCache(config=model.config), given["input_ids"]
    for index, (keys, values) in enumerate(zip(keys_of(cache), values_of(cache), strict=True)):
        stock.update(keys.clone(), values.clone(), index)
    after = cache.positions.max() + 1
    expected = []
    fed = ids[:, len(cache.ledger) :]
    for _ in range(4):
        places = (after + torch.arange(fed.shape[1]))[None]
        logits = forward(name, stock, {"input_ids": fed, "position_ids": places})
        expected.append(int(logits[0, -1].argmax()))
        after, fed = after + fed.shape[1], logits[:, -1].argmax(-1, keepdim=True)
    assert generate(name, cache, given, 4).sequences[0, length:].tolist() == expected


def test_the_same_image_given_again_is_the_same() -> None:
    """A prompt with the image that stands in the cache goes on without encoding it again."""
    name = "qwen2_vl"
    ids, _, _ = joined(name, 9)
    cache, other = spliced(name, 9), spliced(name, 9)
    prompt = torch.cat((ids, text_ids(3, 4)))
    tower, calls = vision_model(name).get_submodule("model.visual"), []
    handle = tower.register_forward_hook(lambda *_: calls.append(1))
    with_image = generate(name, cache, inputs(name, prompt, pixels(name)))
    handle.remove()
    assert not calls
    assert_same(with_image, generate(name, other, other.inputs(text_ids(3, 4))))


@pytest.mark.parametrize("name", ["qwen3_vl", "llava"])
def test_an_image_in_the_middle_makes_room(name: str) -> None:
    model, piece = vision_model(name), chunk(name)
    cache = EditableCache(model)
    cache.append(text_ids(9, 1), name="before")
    cache.append(text_ids(AFTER, 2), name="after")
    cache.splice(piece, at=9, seam_tokens=0)
    ids, start, stop = joined(name, 9)
    expected = reference(name, ids, start, stop, own_positions(name, ids))
    cells = zip([k[..., start:stop, :] for k in keys_of(cache)], expected.keys, strict=True)
    assert max(oracles.relative_error(mine, theirs[..., start:stop, :]) for mine, theirs in cells) <= 1e-4
    cache.recompute("after")
    assert max(errors(cache, expected)) <= 1e-4


@pytest.mark.parametrize("name", ["qwen2_5_vl", "mistral3"])
def test_save_and_load(name: str, tmp_path: Path) -> None:
    piece, model = chunk(name), vision_model(name)
    piece.save_pretrained(tmp_path / "image")
    loaded = VisionChunk.from_pretrained(tmp_path / "image", model=model)
    assert loaded.images == piece.images
    assert loaded.images[0].digest in (tmp_path / "image" / "manifest.json").read_text()
    assert loaded.equal_cells(piece)
    assert loaded.digest == piece.digest
    mine, theirs = spliced(name, 9), spliced(name, 9, loaded)
    assert mine.ledger.same(theirs.ledger)
    mine.save_pretrained(tmp_path / "cache")
    back = EditableCache.from_pretrained(tmp_path / "cache", model=model)
    assert back.ledger.same(mine.ledger)
    assert torch.equal(back.next_token_logits(), mine.next_token_logits())


def test_a_cut_out_image_is_spliced_elsewhere() -> None:
    name = "qwen2_vl"
    cache = spliced(name, 9)
    piece = cache.extract("image", name="copy")
    assert piece.images == chunk(name).images
    assert piece.axes is not None
    again = spliced(name, 37, piece)
    ids, start, stop = joined(name, 37)
    assert max(errors(again, reference(name, ids, start, stop, own_positions(name, ids)))) <= 1e-4


def test_seam_tokens_end_in_front_of_the_image() -> None:
    name = "qwen2_vl"
    cache = EditableCache(vision_model(name))
    cache.append(text_ids(9, 1))
    outcome = cache.splice(chunk(name), seam_tokens=4)
    assert outcome.tokens_computed == 1
    assert cache.ledger.images[0, 9:].tolist() == [0, 1, 1, 1, 1, 1, 1, 0]


def test_a_processor_makes_the_tensors() -> None:
    name = "qwen2_vl"
    processor = StandIn(name, "<user>{}</user>")
    piece = VisionChunk.precompile(vision_model(name), processor, pixels(name), name="image")
    assert processor.texts == ["<v><image></v>"]
    assert piece.text == "<v><image></v>"
    assert piece.equal_cells(chunk(name))
    silent = StandIn(name, "<user></user>")
    with pytest.raises(SpanError, match="pass text="):
        VisionChunk.precompile(vision_model(name), silent, pixels(name), name="image")


def test_what_no_chunk_is_made_of() -> None:
    name = "qwen2_vl"
    model = vision_model(name)
    with pytest.raises(SpanError, match="expected pixels"):
        VisionChunk.precompile(model, None, {"input_ids": text_ids(5)[None]}, name="image")
    with pytest.raises(SpanError, match="tensors by name"):
        VisionChunk.precompile(model, None, "picture.png", name="image")
    with pytest.raises(SpanError, match="of one text"):
        VisionChunk.precompile(model, None, inputs(name, image_ids(name)[None].repeat(2, 1), pixels(name)), name="x")
    text = Skill.precompile(model, None, text_ids(5), name="text")
    with pytest.raises(LedgerError, match="stand for an image"):
        spliced(name, 9).recompute("image")
    assert text.images == ()
    with pytest.raises(SpanError, match="cuts the image"):
        chunk(name).slice(0, 4)
    assert chunk(name).slice(1, 8).images[0].start == 0


def test_compiled_behind_a_prefix() -> None:
    """What the chunk saw while it was compiled goes with it, and its positions start behind."""
    name = "qwen2_vl"
    given = inputs(name, image_ids(name), pixels(name))
    piece = VisionChunk.precompile(vision_model(name), None, given, name="image", prefix=[5, 6, 7])
    assert piece.provenance.prefix_ids == (5, 6, 7)
    assert int(piece.position_ids[0]) == 3
    stock = DynamicCache()
    forward(name, stock, inputs(name, torch.cat((torch.tensor([5, 6, 7]), image_ids(name))), pixels(name)))
    layers: list[Any] = stock.layers
    for mine, layer in zip(piece.layers, layers, strict=True):
        assert oracles.relative_error(mine["keys"], layer.keys[..., 3:, :]) <= 1e-4


@pytest.mark.parametrize("name", SEVERAL_AXES)
def test_a_mark_that_stands_one_back_runs_where_it_stands(name: str) -> None:
    """MiniCPM-V puts rows and columns of the mark in front of an image one position back; a seam keeps to that."""
    piece = chunk(name)
    assert piece.axes is not None
    axes = piece.axes.clone()
    axes[0] = -1
    cache = EditableCache(vision_model(name))
    cache.append(text_ids(9, 1))
    cache.splice(replace(piece, axes=axes), seam_tokens=1)
    assert cache.ledger.places(slice(9, 10))[:, 0, 0].tolist() == [9, 8, 8]
    ids = torch.cat((text_ids(9, 1), piece.token_ids))
    for back, near in ((1, True), (0, False)):
        positions = own_positions(name, ids)
        positions[1:, 9] -= back
        expected = reference(name, ids, 10, 10, positions).keys[0][..., 9:10, :]
        error = oracles.relative_error(keys_of(cache, 9, 10)[0], expected)
        assert error <= 1e-5 if near else error > 1e-2
    cache.recompute((9, 10))
    assert cache.ledger.places(slice(9, 10))[:, 0, 0].tolist() == [9, 8, 8]
