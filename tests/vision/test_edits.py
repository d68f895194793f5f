"""Edits around an image: removing, inserting and moving text or the image, snapshots, forks, batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
    values_of,
    vision_model,
)

from editable_cache import EditableCache, LedgerError, SpanError
from editable_cache.testing import oracles

AFTER = 7


def context(name: str, before: int = 9) -> EditableCache:
    """Text, an image that has not seen it, text."""
    cache = EditableCache(vision_model(name))
    cache.append(text_ids(before, 1), name="before")
    cache.splice(chunk(name), seam_tokens=0)
    cache.append(text_ids(AFTER, 2), name="after")
    return cache


def check_image(name: str, cache: EditableCache, start: int, tolerance: float = 1e-4) -> float:
    """Largest error of the image's cells at ``start`` against a stock forward of ids and pixels at its positions."""
    stop = start + len(image_ids(name))
    ids = torch.cat((cache.token_ids[0, :start], image_ids(name)))
    expected = reference(name, ids, start, stop, own_positions(name, ids))
    cells = [
        *zip(keys_of(cache, start, stop), expected.keys, strict=True),
        *zip(values_of(cache, start, stop), expected.values, strict=True),
    ]
    return max(oracles.relative_error(mine, theirs[..., start:stop, :]) for mine, theirs in cells)


def places(cache: EditableCache) -> torch.Tensor:
    found = cache.ledger.places(slice(None))
    return found if found.dim() == 3 else found[None]


@pytest.mark.parametrize("name", FAMILIES)
def test_text_before_an_image_goes_and_comes(name: str) -> None:
    """The image and everything behind it move as the model itself would number the new prompt."""
    cache = context(name)
    cache.remove((5, 9))
    assert check_image(name, cache, 5) <= 1e-4
    assert torch.equal(places(cache)[:, 0], own_positions(name, cache.token_ids[0]))
    cache.insert(text_ids(30, 6), at=5)
    assert check_image(name, cache, 35) <= 1e-4
    assert torch.equal(places(cache)[:, 0], own_positions(name, cache.token_ids[0]))
    cache.remove((20, 21))
    wrong = cache.extract("image")
    off = [keys.clone() for keys in keys_of(cache)]
    cache.reposition("image", position=int(wrong.position_ids[0]) + 1)  # control: one too far
    assert check_image(name, cache, 34) > 1e-3
    cache.reposition("image", position=int(wrong.position_ids[0]))
    assert check_image(name, cache, 34) <= 1e-4
    assert max(oracles.relative_error(a, b) for a, b in zip(keys_of(cache), off, strict=True)) <= 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_an_image_goes_and_what_follows_closes_up(name: str) -> None:
    cache = context(name)
    cache.remove("image")
    assert cache.positions[0].tolist() == list(range(9 + AFTER))
    assert not cache.ledger.images.any()
    cache.recompute("after")
    expected = forward(name, None, {"input_ids": torch.cat((text_ids(9, 1), text_ids(AFTER, 2)))[None]})
    assert oracles.relative_error(cache.next_token_logits(), expected[:, -1]) <= 1e-4


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "glm4v", "llava"])
def test_an_image_moves_to_another_place_in_the_order(name: str) -> None:
    cache = context(name)
    cache.reposition("image", to=4)
    assert check_image(name, cache, 4) <= 1e-4
    assert torch.equal(places(cache)[:, 0], own_positions(name, cache.token_ids[0]))
    cache.reposition("image", to=9)
    assert torch.equal(places(cache)[:, 0], own_positions(name, cache.token_ids[0]))
    assert check_image(name, cache, 9) <= 1e-4
    cache.reposition("after", to=9)
    assert torch.equal(places(cache)[:, 0], own_positions(name, cache.token_ids[0]))
    assert check_image(name, cache, 9 + AFTER) <= 1e-4


@pytest.mark.parametrize("name", ["qwen2_vl", "internvl"])
def test_text_behind_an_image_is_computed_again(name: str) -> None:
    """Cells of text can be recomputed over the image's cells; those of the image need its pixels."""
    cache = context(name)
    before = keys_of(cache)
    cache.recompute("after")
    assert max(oracles.relative_error(a, b) for a, b in zip(keys_of(cache), before, strict=True)) <= 1e-5
    cache.recompute([(0, 3), (len(cache.ledger) - 2, len(cache.ledger))])
    with pytest.raises(LedgerError, match="stand for an image"):
        cache.recompute(slice(None))
    with pytest.raises(LedgerError, match="pixels"):
        cache.verify()
    with pytest.raises(LedgerError, match="holds images"):
        cache.sync(cache.token_ids[0])


def test_no_operation_cuts_an_image() -> None:
    cache = context("qwen2_vl")
    for operation in (
        lambda: cache.remove((5, 12)),
        lambda: cache.remove(slice(13, None)),
        lambda: cache.insert(text_ids(3, 3), at=13),
        lambda: cache.reposition((12, 14), to=0),
    ):
        with pytest.raises(SpanError, match="inside an image"):
            operation()
    assert check_image("qwen2_vl", cache, 9) <= 1e-4


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "llava"])
def test_forks_and_checkpoints_keep_their_images(name: str) -> None:
    cache = EditableCache(vision_model(name))
    cache.append(text_ids(9, 1))
    cache.checkpoint("text")
    fork = cache.fork()
    cache.splice(chunk(name, 7))
    fork.splice(chunk(name, 8))
    assert cache.ledger.digests != fork.ledger.digests
    mine, theirs = (generate(name, c, c.inputs(text_ids(3, 4))).sequences for c in (cache, fork))
    assert not torch.equal(mine, theirs)
    cache.rollback("text")
    assert cache.ledger.digests == ()
    cache.splice(chunk(name, 7))
    assert torch.equal(generate(name, cache, cache.inputs(text_ids(3, 4))).sequences, mine)


# -- batches


@pytest.mark.parametrize("name", [*SEVERAL_AXES, "llava", "gemma3@vlm"])
def test_a_row_with_an_image_beside_a_row_of_text(name: str) -> None:
    """Two rows through generate equal each alone, tokens, logits and positions."""
    with_image = torch.cat((text_ids(9, 1), image_ids(name), text_ids(5, 2)))
    text = text_ids(12, 3)
    padding = len(with_image) - len(text)
    ids = torch.stack((with_image, torch.cat((torch.zeros(padding, dtype=torch.int64), text))))
    given = inputs(name, ids, pixels(name))
    given["attention_mask"][1, :padding] = 0
    cache = EditableCache(vision_model(name))
    both = generate(name, cache, given)
    alone = [
        generate(name, EditableCache(vision_model(name)), inputs(name, with_image, pixels(name))),
        generate(name, EditableCache(vision_model(name)), inputs(name, text)),
    ]
    for row, single in enumerate(alone):
        length = single.sequences.shape[1]
        assert torch.equal(both.sequences[row, -length:], single.sequences[0])
        for mine, theirs in zip(both.logits, single.logits, strict=True):
            assert oracles.relative_error(mine[row], theirs[0]) <= 1e-4
    assert (cache.ledger.images > 0).any(dim=1).tolist() == [True, False]
    more = torch.cat((both.sequences, text_ids(3, 5).expand(2, -1)), dim=1)
    mask = torch.cat((given["attention_mask"], torch.ones(2, more.shape[1] - ids.shape[1]).long()), dim=1)
    again = generate(name, cache, {"input_ids": more, "attention_mask": mask})
    for row, single in enumerate((with_image, text)):
        whole = more[row, -(len(single) + more.shape[1] - ids.shape[1]) :]
        fresh = EditableCache(vision_model(name))
        one = generate(name, fresh, inputs(name, whole, *([pixels(name)] if row == 0 else [])))
        assert torch.equal(again.sequences[row, -5:], one.sequences[0, -5:])


@pytest.mark.parametrize("name", SEVERAL_AXES)
def test_stacked_and_taken_apart(name: str) -> None:
    image, text = context(name), EditableCache(vision_model(name))
    text.append(text_ids(12, 3))
    alone = [generate(name, c.fork(), c.inputs(text_ids(3, 5))).sequences[0, -5:] for c in (image, text)]
    both = EditableCache.stack([image, text])
    assert torch.equal(both.ledger.axes[0], image.ledger.axes[0])
    assert not both.ledger.axes[1].any()
    rows = both.unstack()
    assert torch.equal(rows[0].ledger.images, image.ledger.images)
    assert rows[0].ledger.image_at(0, 11) == image.ledger.image_at(0, 11)
    out = generate(name, both, both.inputs(text_ids(3, 5))).sequences
    for row, expected in enumerate(alone):
        assert torch.equal(out[row, -5:], expected)


def test_stacked_rows_keep_their_own_images() -> None:
    name = "llava"
    caches = []
    for seed in (7, 8):
        cache = EditableCache(vision_model(name))
        cache.splice(chunk(name, seed))
        caches.append(cache)
    both = EditableCache.stack(caches)
    for row, cache in enumerate(caches):
        assert both.image_spans(row) == cache.image_spans() == chunk(name, 7 + row).images
        assert both.unstack()[row].image_spans() == cache.image_spans()
    again = [generate(name, cache, cache.inputs(text_ids(3, 5))).sequences[0] for cache in caches]
    rows = torch.stack([torch.cat((chunk(name).token_ids, text_ids(3, 5)))] * 2)
    assert torch.equal(
        generate(name, both, inputs(name, rows, pixels(name, 7), pixels(name, 8))).sequences[1], again[1]
    )
    with pytest.raises(LedgerError, match="of row 1 is another one"):
        generate(name, EditableCache.stack(caches[:1] * 2), inputs(name, rows, pixels(name, 7), pixels(name, 8)))


def test_several_rows_take_one_image_chunk() -> None:
    name = "qwen2_5_vl"
    cache = EditableCache(vision_model(name))
    cache.append(torch.stack((text_ids(9, 1), text_ids(9, 3))))
    cache.splice(chunk(name), seam_tokens=0)
    single: Any = EditableCache(vision_model(name))
    single.append(text_ids(9, 1))
    single.splice(chunk(name), seam_tokens=0)
    assert_same_row = [torch.equal(a[:1], b) for a, b in zip(keys_of(cache), keys_of(single), strict=True)]
    assert all(assert_same_row)
    assert cache.ledger.images[1].tolist() == cache.ledger.images[0].tolist()


def test_assert_same_would_see_another_image() -> None:
    name = "qwen2_vl"
    ids = torch.cat((text_ids(9, 1), image_ids(name), text_ids(5, 2)))
    runs = [generate(name, EditableCache(vision_model(name)), inputs(name, ids, pixels(name, seed))) for seed in (7, 8)]
    with pytest.raises(AssertionError):
        assert_same(*runs)
