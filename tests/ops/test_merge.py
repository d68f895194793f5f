"""Chunks merged without a model are what they are spliced one after the other: cells, and the ledger of each."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_support import shared_model, shared_tokenizer, some_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from vision_support import image_ids, pixels, text_ids, vision_model
from vision_support import inputs as vision_inputs

from editable_cache import CompatibilityError, EditableCache, KVChunk, Skill, SpanError, VisionChunk
from editable_cache.cache.ledger import TENSORS
from editable_cache.chunk import Part, Provenance
from editable_cache.forward.precompile import precompile
from editable_cache.ops import merge
from editable_cache.spec import TensorSpec
from editable_cache.testing import oracles
from editable_cache.testing.zoo import build

FAMILIES = ("llama", "gemma3", "phi", "deepseek_v3", "cohere")
"""Plain, sliding windows, partial rotary, latent attention, interleaved pairs."""

SAME = 1e-6
"""Relative: the later chunks are turned twice, which rounds once more in float32."""


@functools.cache
def chunk(family: str, count: int, seed: int, seen: int = 0, dtype: Any = torch.float32) -> Skill:
    prefix = some_ids(seen, seed=100 + seed)[0] if seen else ""
    ids = some_ids(count, seed=seed)[0]
    return Skill.precompile(shared_model(family, dtype=dtype), None, ids, name=f"chunk {seed}", prefix=prefix)


def some(family: str, **kwargs: Any) -> list[Skill]:
    return [chunk(family, 9, 1, 2, **kwargs), chunk(family, 1, 2, **kwargs), chunk(family, 13, 3, 1, **kwargs)]


def context(model: Any, count: int = 5) -> EditableCache:
    cache = EditableCache(model)
    if count:
        cache.append(some_ids(count)[0])
    return cache


def in_turn(cache: EditableCache, chunks: Sequence[KVChunk], at: int | None = None) -> EditableCache:
    for each in chunks:
        cache.splice(each.renamed(None), at, seam_tokens=0)
        at = None if at is None else at + len(each)
    return cache


def at_once(cache: EditableCache, whole: KVChunk, at: int | None = None) -> EditableCache:
    cache.splice(whole, at, seam_tokens=0)
    return cache


def distance(one: EditableCache, other: EditableCache) -> float:
    """Largest relative difference over all stored tensors."""
    pairs = zip(one.editable_layers, other.editable_layers, strict=True)
    return max(oracles.relative_error(mine.view()[n], t) for mine, theirs in pairs for n, t in theirs.view().items())


def assert_same_cells_and_ledger(one: EditableCache, other: EditableCache) -> None:
    assert distance(one, other) <= SAME
    assert [name for name in TENSORS if not torch.equal(getattr(one.ledger, name), getattr(other.ledger, name))] == []
    assert one.ledger.chunks == other.ledger.chunks
    assert one.ledger.digests == other.ledger.digests


@st.composite
def lists_of_chunks(draw: st.DrawFn) -> list[KVChunk]:
    """One to four chunks of one model: whole or cut, compiled alone or behind something, merged already or not."""
    family = draw(st.sampled_from(FAMILIES))
    chunks: list[KVChunk] = []
    for _ in range(draw(st.integers(1, 4))):
        count, seed, seen = draw(st.sampled_from([1, 4, 13])), draw(st.integers(1, 3)), draw(st.integers(0, 2))
        one: KVChunk = chunk(family, count, seed, seen)
        if draw(st.booleans()):
            start = draw(st.integers(0, len(one) - 1))
            one = one.slice(start, draw(st.integers(start + 1, len(one))))
        chunks.append(Skill.merge([one, chunk(family, 4, 9)], name="pair") if draw(st.booleans()) else one)
    return chunks


@settings(deadline=None, max_examples=60)
@given(chunks=lists_of_chunks(), before=st.sampled_from([0, 1, 7]))
def test_a_merged_chunk_is_its_parts_spliced_in_turn(chunks: list[KVChunk], before: int) -> None:
    model = shared_model(chunks[0].model.model_type.removesuffix("_text"))
    merged = Skill.merge(chunks, name="all")
    first = int(chunks[0].position_ids[0])
    assert merged.position_ids.tolist() == list(range(first, first + len(merged)))
    assert_same_cells_and_ledger(at_once(context(model, before), merged), in_turn(context(model, before), chunks))


@settings(deadline=None, max_examples=30)
@given(chunks=lists_of_chunks(), cut=st.integers(1, 3))
def test_merging_is_associative(chunks: list[KVChunk], cut: int) -> None:
    whole = Skill.merge(chunks, name="all")
    cut = min(cut, len(chunks))
    nested = Skill.merge([Skill.merge(chunks[:cut], name="some"), *chunks[cut:]], name="all")
    assert nested.provenance == whole.provenance
    assert (nested.model, nested.layout, nested.origin) == (whole.model, whole.layout, whole.origin)
    assert torch.equal(nested.position_ids, whole.position_ids)
    for mine, theirs in zip(nested.layers, whole.layers, strict=True):
        assert max(oracles.relative_error(mine[name], theirs[name]) for name in theirs) <= SAME


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_is_isolated(family: str) -> None:
    """FROZEN: a stock forward in which each part sees only itself (parts compiled alone)."""
    chunks = [chunk(family, 9, 1), chunk(family, 4, 2), chunk(family, 13, 3)]
    cache = at_once(context(shared_model(family)), Skill.merge(chunks, name="all"))
    cache.append(some_ids(3, seed=8)[0])
    assert cache.verify().ok
    expected = oracles.frozen(shared_model(family), cache.token_ids[0], cache.positions[0], cache.ledger.groups[0])
    for layer, cells in zip(cache.editable_layers, expected.layers, strict=True):
        for name, tensor in layer.view().items():
            assert oracles.relative_error(tensor, cells[name]) <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_in_the_middle(family: str) -> None:
    whole, parts = (context(shared_model(family)) for _ in range(2))
    at_once(whole, Skill.merge(some(family), name="all"), 3)
    assert_same_cells_and_ledger(whole, in_turn(parts, some(family), 3))
    assert [(span.start, span.stop) for span in whole.ledger.stale] == [(3 + 23, 5 + 23)]


def test_in_every_row() -> None:
    model = shared_model()
    caches = [EditableCache.stack([context(model, 3), context(model, 7)]) for _ in range(2)]
    assert_same_cells_and_ledger(
        at_once(caches[0], Skill.merge(some("llama"), name="all")), in_turn(caches[1], some("llama"))
    )


def test_a_seam_is_computed_at_the_start_of_the_whole() -> None:
    merged = Skill.merge(some("llama"), name="all")
    cache = context(shared_model())
    assert cache.splice(merged, seam_tokens=2).tokens_computed == 2
    assert cache.ledger.groups[0].tolist() == [0] * 7 + [1] * 7 + [2] + [3] * 13
    assert cache.ledger.offsets[0, 5:14].tolist() == [0, 0, *range(2, 9)]
    assert cache.verify().ok
    longer = context(shared_model())
    longer.splice(merged, seam_tokens=11)  # beyond two parts: they are live now, and nobody records them as isolated
    assert longer.ledger.groups[0].tolist() == [0] * 16 + [1] * 12
    assert longer.verify().ok


@pytest.mark.parametrize("family", FAMILIES)
def test_control_without_rotation_it_misses(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = in_turn(context(shared_model(family)), some(family))
    monkeypatch.setattr(merge._Placed, "turns", lambda _: {})
    still = Skill.merge(some(family), name="all")
    monkeypatch.undo()
    assert distance(at_once(context(shared_model(family)), still), expected) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_control_parts_recorded_as_one_chunk_are_wrong(family: str) -> None:
    merged = Skill.merge(some(family), name="all")
    as_one = Provenance("precompiled", some(family)[0].provenance.prefix_ids)
    alone = KVChunk(**{**_values(merged), "provenance": as_one})
    cache = at_once(context(shared_model(family)), alone)
    assert not cache.verify().ok


def _values(skill: KVChunk) -> dict[str, Any]:
    return {name: getattr(skill, name) for name in KVChunk.__dataclass_fields__}


# -- what it is


def test_what_a_merged_skill_says() -> None:
    merged = Skill.merge(some("llama"), name="all")
    assert isinstance(merged, Skill)
    assert (merged.name, merged.text, len(merged)) == ("all", None, 23)
    assert merged.provenance.how == "merged"
    seen = [each.provenance.prefix_ids for each in some("llama")]
    assert merged.provenance.parts == (
        Part(0, 9, seen[0], "chunk 1"),
        Part(9, 10, (), "chunk 2"),
        Part(10, 23, seen[2], "chunk 3"),
    )
    assert merged.parts == merged.provenance.parts
    assert merged.position_ids.tolist() == list(range(2, 25))
    assert str(merged.provenance) == "merged of 3 chunks"


def test_one_chunk_keeps_its_bits_and_its_text() -> None:
    model = shared_model()
    one = Skill.precompile(model, shared_tokenizer(), "the refund was sent", name="one")
    alone = Skill.merge([one], name="other")
    assert (alone.text, alone.name, alone.provenance.how) == (one.text, "other", "merged")
    assert alone.equal_cells(one)
    assert alone.layers[0]["keys"].data_ptr() != one.layers[0]["keys"].data_ptr()
    assert Skill.merge([one, one], name="both").text is None


def test_inputs_stay_as_they_are() -> None:
    chunks = some("llama")
    before = [[{n: t.clone() for n, t in states.items()} for states in each.layers] for each in chunks]
    merged = Skill.merge(chunks, name="all")
    merged.layers[0]["keys"].zero_()
    for each, layers in zip(chunks, before, strict=True):
        for mine, old in zip(each.layers, layers, strict=True):
            assert all(torch.equal(mine[name], old[name]) for name in old)


def test_gaps_of_an_extracted_chunk_close() -> None:
    """What was cut out of positions with a gap is laid down without one, as a splice does."""
    cache = context(shared_model(), 0)
    cache.splice(chunk("llama", 4, 2), seam_tokens=0)
    cache.splice(chunk("llama", 9, 1, 2), position=60, seam_tokens=0)
    piece = cache.extract((0, 13), name="gap")
    assert piece.position_ids.tolist() == [0, 1, 2, 3, *range(60, 69)]
    merged = Skill.merge([piece, chunk("llama", 13, 3)], name="all")
    assert merged.position_ids.tolist() == list(range(26))
    assert_same_cells_and_ledger(
        at_once(context(shared_model()), merged), in_turn(context(shared_model()), [piece, chunk("llama", 13, 3)])
    )


def test_special_ids_are_united_and_the_first_origin_stays() -> None:
    one, other = some("llama")[:2]
    one = replace(one, origin=replace(one.origin, special_ids=((3, "<b>"), (1, "<a>")), repo="org/model"))
    other = replace(other, origin=replace(other.origin, special_ids=((2, "<c>"), (3, "<b>")), attention="eager"))
    merged = Skill.merge([one, other], name="all")
    assert merged.origin == replace(one.origin, special_ids=((1, "<a>"), (2, "<c>"), (3, "<b>")))


def test_it_is_stored_and_loaded(tmp_path: Path) -> None:
    merged = Skill.merge(some("gemma3"), name="all")
    merged.save_pretrained(tmp_path / "merged")
    loaded = Skill.from_pretrained(tmp_path / "merged", model=shared_model("gemma3"))
    assert loaded.equal_cells(merged)
    assert loaded.provenance == merged.provenance
    assert loaded.digest == merged.digest
    cache = at_once(context(shared_model("gemma3")), loaded)
    assert_same_cells_and_ledger(cache, in_turn(context(shared_model("gemma3")), some("gemma3")))
    cache.save_pretrained(tmp_path / "cache")
    again = EditableCache.from_pretrained(tmp_path / "cache", model=shared_model("gemma3"))
    assert again.ledger.same(cache.ledger)
    assert again.verify().ok


def test_in_bfloat16_it_is_rounded_once_more() -> None:
    """Half a unit in the last place, 2**-9, of each turned pair, on top of the rounding that a splice makes."""
    chunks = some("llama", dtype=torch.bfloat16)
    model = shared_model(dtype=torch.bfloat16)
    whole = at_once(context(model), Skill.merge(chunks, name="all"))
    parts = in_turn(context(model), chunks)
    for mine, theirs in zip(whole.editable_layers, parts.editable_layers, strict=True):
        one, other = mine.view()["keys"], theirs.view()["keys"]
        assert torch.equal(one[..., :14, :], other[..., :14, :])  # the first part was not turned by the merge
        assert not torch.equal(one, other)
        pairs = [t.double().unflatten(-1, (2, -1)).norm(dim=-2) for t in (one - other, other)]
        assert float((pairs[0] / pairs[1].clamp_min(1e-6)).max()) <= 3 * 2**-8
        assert torch.equal(mine.view()["values"], theirs.view()["values"])
    assert whole.verify().ok


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava"])
def test_images_between_texts(name: str) -> None:
    """Tokens with one position and with three, of which each frequency turns by its own."""
    model = vision_model(name)
    text = [Skill.precompile(model, None, text_ids(count, count), name=f"text {count}") for count in (4, 7)]
    image = VisionChunk.precompile(model, None, vision_inputs(name, image_ids(name), pixels(name)), name="image")
    chunks = [text[0], image, text[1], image]
    merged = Skill.merge(chunks, name="all")
    assert merged.extent == sum(each.extent for each in chunks)
    assert [(each.start, each.stop) for each in merged.images] == [
        (start + image.images[0].start, start + image.images[0].stop) for start in (4, 11 + len(image))
    ]
    before = EditableCache(model)
    before.append(text_ids(5))
    assert_same_cells_and_ledger(at_once(before.fork(), merged), in_turn(before.fork(), chunks))
    with pytest.raises(SpanError, match="cuts the image"):
        merged.slice(0, 4 + image.images[0].start + 1)


def test_far_away_images_turn_by_every_axis() -> None:
    """The model rounds each position's angle to float32, so that far away equal distances are not equal turns."""
    name, far = "qwen2_5_vl", 120_000
    model = vision_model(name)
    image = VisionChunk.precompile(model, None, vision_inputs(name, image_ids(name), pixels(name)), name="image")
    cache = EditableCache(model)
    cache.splice(Skill.precompile(model, None, text_ids(4), name="text"), position=far, seam_tokens=0)
    merged = Skill.merge([cache.extract("text"), image], name="all")
    cache.splice(image, seam_tokens=0)
    for layer, cells in zip(cache.editable_layers, merged.layers, strict=True):
        assert oracles.relative_error(cells["keys"], layer.view()["keys"]) <= SAME
    assert torch.equal(merged.position_ids, cache.positions[0])
    alike = Skill.merge([cache.extract("text"), replace(image, axes=None, position_ids=image.position_ids)], name="all")
    assert oracles.relative_error(alike.layers[0]["keys"], merged.layers[0]["keys"]) > 1e-5


def test_positions_that_are_stored_as_cells_count_on() -> None:
    chunks = [_counting(each) for each in some("llama")]
    merged = Skill.merge(chunks, name="all")
    assert merged.layers[0]["where"][0, 0, :, 0].tolist() == merged.position_ids.tolist() == list(range(2, 25))
    assert merged.layers[0]["where"].dtype == torch.int64


def _counting(skill: Skill) -> Skill:
    """With a tensor that holds the positions of its tokens."""
    cells = {**skill.layers[0], "where": skill.position_ids[None, None, :, None].clone()}
    holder = replace(skill.layout[0], tensors=(*skill.layout[0].tensors, TensorSpec("where", counter=True)))
    return replace(skill, layers=(cells, *skill.layers[1:]), layout=(holder, *skill.layout[1:]))


# -- cutting


@settings(deadline=None, max_examples=60)
@given(start=st.integers(0, 22), length=st.integers(1, 23))
def test_a_slice_knows_its_parts(start: int, length: int) -> None:
    """ISO: what the slice says that each piece had seen gives the piece's cells."""
    merged, stop = Skill.merge(some("llama"), name="all"), min(start + length, 23)
    piece = merged.slice(start, stop)
    cache = at_once(context(shared_model()), piece)
    assert cache.verify().ok
    assert int(cache.ledger.groups.max()) == len(piece.parts)


def test_an_empty_slice_is_stored(tmp_path: Path) -> None:
    piece = Skill.merge(some("llama"), name="all").slice(9, 9)
    assert len(piece) == 0
    Skill._of(piece, None).save_pretrained(tmp_path)
    assert len(Skill.from_pretrained(tmp_path)) == 0


def test_extract_gives_the_parts_back() -> None:
    merged = Skill.merge(some("llama"), name="all")
    cache = at_once(context(shared_model()), merged)
    back = cache.extract("all", name="all")
    assert back.provenance.how == "merged"
    assert [replace(part, name=None) for part in merged.parts] == list(back.parts)
    assert back.equal_cells(replace(merged, position_ids=back.position_ids, layers=back.layers))
    again = at_once(context(shared_model(), 2), back)
    assert again.verify().ok
    assert distance(again, in_turn(context(shared_model(), 2), some("llama"))) <= SAME


def test_extract_of_what_is_not_isolated_says_so() -> None:
    cache = at_once(context(shared_model()), Skill.merge(some("llama"), name="all"))
    mixed = cache.extract((2, 12))
    assert (mixed.provenance.how, mixed.parts[0].note) == ("extracted", "holds cells of an isolated chunk")
    assert cache.extract((15, 20)).provenance == Provenance("extracted", some("llama")[2].provenance.prefix_ids)


def test_extract_of_a_chunk_with_a_hole() -> None:
    """What follows the hole had seen what stood in it."""
    cache = at_once(context(shared_model()), chunk("llama", 13, 3, 1))
    cache.remove((8, 11))
    piece = cache.extract((5, 15), name="holed")
    assert [len(part.prefix_ids) for part in piece.parts] == [1, 7]
    assert at_once(context(shared_model(), 3), piece).verify().ok


# -- notes and refusals


def test_a_note_marks_its_own_part_only() -> None:
    noted = replace(chunk("llama", 4, 2), provenance=Provenance("extracted", note="stale: a reason"))
    chunks = [chunk("llama", 9, 1), noted, chunk("llama", 4, 3)]
    merged = Skill.merge(chunks, name="all")
    assert [part.note for part in merged.parts] == ["", "stale: a reason", ""]
    cache = at_once(context(shared_model()), merged)
    assert_same_cells_and_ledger(cache, in_turn(context(shared_model()), chunks))
    assert cache.ledger.stale == in_turn(context(shared_model()), chunks).ledger.stale
    assert [(span.start, span.stop) for span in cache.ledger.stale] == [(14, 18)]
    whole = Skill.merge([replace(merged, provenance=merged.provenance.noted("stored as int8"))], name="all")
    stored = "stored as int8"
    assert [part.note for part in whole.parts] == [stored, f"stale: a reason; {stored}", stored]


def test_tokenizers_count_only_where_both_are_named() -> None:
    plain, one = (chunk("llama", 4, seed) for seed in (1, 2))
    named = replace(one, model=replace(one.model, tokenizer="t1"))
    other = replace(one, model=replace(one.model, tokenizer="t2"))
    assert Skill.merge([plain, named, plain], name="all").model.tokenizer == "t1"
    with pytest.raises(CompatibilityError, match="chunk 2: tokenizer: expected t1, got t2"):
        Skill.merge([plain, named, other], name="all")


REFUSED: dict[str, Any] = {
    "weights": (lambda c: replace(c, model=replace(c.model, weights="others")), "chunk 1: weights"),
    "dtype": (lambda c: replace(c, model=replace(c.model, dtype="float16")), "chunk 1: dtype"),
    "no layout": (lambda c: replace(c, layout=()), "chunk 1: expected a layout, got none"),
    "layout": (
        lambda c: replace(c, layout=(replace(c.layout[0], layer_idx=7), *c.layout[1:])),
        "the layout of the first",
    ),
    "heads": (
        lambda c: replace(c, layers=tuple({n: t[:, :1] for n, t in states.items()} for states in c.layers)),
        "chunk 1: expected heads",
    ),
    "a tensor too many": (
        lambda c: replace(c, layers=tuple({**states, "more": states["keys"]} for states in c.layers)),
        "chunk 1: expected",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    spoil, message = REFUSED[what]
    with pytest.raises(CompatibilityError, match=message) as raised:
        Skill.merge([chunk("llama", 4, 1), spoil(chunk("llama", 9, 2))], name="all")
    assert raised.value.reasons


def test_all_alike_but_against_their_layout() -> None:
    spoiled = REFUSED["a tensor too many"][0](chunk("llama", 9, 2))
    with pytest.raises(CompatibilityError, match="the tensors of its layout"):
        Skill.merge([spoiled, spoiled], name="all")


def test_recurrent_chunks_are_refused() -> None:
    one = chunk("falcon_h1", 9, 1)
    with pytest.raises(CompatibilityError, match="recurrent layers, which need a live seam"):
        Skill.merge([one, one], name="all")


def test_what_is_no_chunk_or_has_no_token() -> None:
    empty = Skill.precompile(shared_model(), None, some_ids(0)[0], name="empty")
    with pytest.raises(SpanError, match="at least one chunk with a token"):
        Skill.merge([], name="all")
    with pytest.raises(SpanError, match="at least one chunk with a token"):
        Skill.merge([empty], name="all")
    with pytest.raises(CompatibilityError, match="got str as number 1"):
        Skill.merge([empty, "text"], name="all")  # type: ignore[list-item]
    with pytest.raises(CompatibilityError, match="expected a name"):
        Skill.merge([chunk("llama", 4, 1)], name="a/b")
    assert Skill.merge([empty, chunk("llama", 4, 1), empty], name="all").parts == (Part(0, 4, (), "chunk 1"),)


def test_blocks_of_chunked_attention_are_those_of_each_part() -> None:
    model = build("llama4_text")
    size = model.config.attention_chunk_size
    ids = some_ids(3 * size)[0] % 200
    one = precompile(model, None, ids[:size], name="one", prefix="")
    other = precompile(model, None, ids[:6], name="other", prefix=ids[:6])
    cache = EditableCache(model)
    at_once(cache, Skill.merge([one, one], name="fits"))  # each begins where a block does
    assert cache.verify().ok
    with pytest.raises(SpanError, match=r"The next slot that fits is"):
        at_once(context(model, 1), Skill.merge([one, one], name="later"))
    with pytest.raises(SpanError, match="Splice its parts one by one"):
        at_once(context(model, 0), Skill.merge([other, one], name="nowhere"))
