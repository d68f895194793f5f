"""Caches that fold windows of tokens into entries: kept as a whole, spliced where windows start."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_support import POLICY, assert_same_output, failing_at, generate, refused, shared_tokenizer
from compressed_support import (
    ALIGNMENT,
    blind,
    cut_overlap,
    forward,
    frozen_reference,
    ids_of,
    model,
    stock,
)
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

from editable_cache import (
    ArtifactError,
    CompatibilityError,
    EditableCache,
    LedgerError,
    Skill,
    SpanError,
    UnsupportedModelError,
)
from editable_cache.adapters import compressed, host, measured, probe
from editable_cache.chunk import Compressed
from editable_cache.forward import checks
from editable_cache.spec import CompressedLayerSpec, ModelSpec
from editable_cache.testing import oracles
from editable_cache.testing.compressed import contents, frozen_behind

pytestmark = pytest.mark.skipif(
    host.DUMMY_LAYER is None, reason="this transformers keeps compressed caches in another form: plain caches there"
)

QUERY = ids_of(7, 99)


def skill_of(ids: Tensor, **kwargs: Any) -> Skill:
    return Skill.precompile(model(), None, ids, name="chunk", **kwargs)


def cache_with(*parts: Tensor) -> EditableCache:
    cache = EditableCache(model())
    for part in parts:
        cache.append(part)
    return cache


def check_same(cache: Any, expected: Any) -> None:
    found, wanted = contents(cache), contents(expected)
    assert {name: t.shape for name, t in found.items()} == {name: t.shape for name, t in wanted.items()}
    oracles.check(found, wanted)


def check_full(cache: EditableCache, ids: Tensor) -> None:
    """Everything is what a stock prefill of ``ids`` leaves."""
    expected, logits = stock(ids)
    assert torch.equal(cache.token_ids[0], ids)
    assert not cache.ledger.stale
    check_same(cache, expected)
    oracles.check(cache.next_token_logits(), logits[:, -1])


# -- drop-in


@pytest.mark.parametrize("lengths", [[30], [5, 1, 1, 9, 14], [1] * 14])
def test_forwards_are_those_of_a_stock_cache(lengths: list[int]) -> None:
    parts = ids_of(sum(lengths)).split(lengths)
    for cache in (EditableCache(model()), EditableCache(config=model().config)):
        expected = DynamicCache(config=model().config)
        for part in parts:
            assert torch.equal(forward(cache, part), forward(expected, part))
            assert cache.get_seq_length() == expected.get_seq_length()
        found, wanted = contents(cache), contents(expected)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert cache.token_ids.shape == (1, sum(lengths))


def test_rows_of_unseen_tokens_are_counted() -> None:
    cache = EditableCache(config=model().config)
    forward(cache, torch.stack((ids_of(9), ids_of(9, 2))))
    assert cache.token_ids.shape == (2, 9)


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {"prefill_chunk_size": 5}]
)
def test_generate_is_that_of_a_stock_cache(options: dict[str, Any]) -> None:
    ids = ids_of(17)[None]
    for cache in (EditableCache(model()), EditableCache(config=model().config)):
        outputs = []
        for each in (cache, DynamicCache(config=model().config)):
            torch.manual_seed(3)
            outputs.append(generate(each, ids, model=model(), **options))
        assert_same_output(*outputs)


def test_new_stock_caches_keep_their_own_layers() -> None:
    EditableCache(model())
    names = [type(layer).__name__ for layer in DynamicCache(config=model().config).layers]
    assert names[:3] == ["DynamicSlidingWindowLayer", "DeepseekV4CSACache", "DeepseekV4HCACache"]
    assert not any(kind.__name__.startswith("Kept") for kind in DYNAMIC_LAYER_TYPE_MAPPING.values())


# -- the self-test


def test_the_self_test_finds_what_rotates() -> None:
    spec = measured(model())
    assert not spec.against_moving
    assert spec.compressed is not None
    assert spec.compressed.alignment == ALIGNMENT
    assert spec.positions == "slots"
    main, compress = (model().model.rotary_emb.get_buffer(f"{name}_inv_freq") for name in ("main", "compress"))
    for layer in spec.compressed.layers:
        rotaries = dict(layer.rotaries)
        names = {path for path in rotaries if path != ("values",)}
        assert names == {("keys",)} | {("compressed_kv", name) for name in _entries(layer.layer_idx)}
        for path, rotary in rotaries.items():
            assert rotary.layout == "interleaved"
            assert (rotary.start, rotary.stop) == ((8, 16) if path[-1] == "indexer" else (24, 32))
            expected = main if layer.rate is None else compress
            torch.testing.assert_close(torch.tensor(rotary.inv_freq), expected)


def _entries(layer_idx: int) -> tuple[str, ...]:
    return ((), ("compressor", "indexer"), ("compressor",), ("compressor", "indexer"), ("compressor",))[layer_idx]


def test_the_self_test_sees_windows_that_are_cut_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed.CompressedSpec, "alignment", 1)
    found = compressed.examine_compressed(model(), [37], 2048, 1e-4)
    assert any("compressed_kv" in reason.what for reason in found.reasons)
    assert any("logits" in reason.what for reason in found.reasons)


# -- splice

PLACES = [(24, 36), (24, 29), (12, 11), (36, 7), (24, 3), (12, 1), (48, 60)]


@pytest.mark.parametrize(("start", "count"), PLACES)
def test_splice_equals_the_frozen_reference(start: int, count: int) -> None:
    prefix, ids = ids_of(start, start), ids_of(count, 100 + count)
    cache = cache_with(prefix)
    outcome = cache.splice(skill_of(ids))
    assert (outcome.tokens_computed, outcome.tokens_pasted) == (0, count)
    expected = frozen_reference(prefix, ids)
    check_same(cache, expected)
    oracles.check(forward(cache, QUERY), forward(expected, QUERY))
    check_same(cache, expected)  # what follows is folded into the same windows
    with pytest.raises(AssertionError):  # control: a plain prefill is something else
        check_same(cache, stock(prefix, ids, QUERY)[0])


@pytest.mark.parametrize(("start", "count"), [(24, 36), (24, 29), (12, 11), (36, 7)])
def test_splice_equals_a_pass_in_which_the_chunk_is_blind(
    start: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, ids = ids_of(start, start), ids_of(count, 100 + count)
    expected, _ = stock(prefix)
    cut_overlap(expected)
    with blind(monkeypatch, start):
        forward(expected, ids)
    cache = cache_with(prefix)
    cache.splice(skill_of(ids))
    check_same(cache, expected)
    oracles.check(forward(cache, QUERY), forward(expected, QUERY))
    with pytest.raises(AssertionError):  # control: with sight of the prefix it would be another one
        check_same(cache, stock(prefix, ids, QUERY)[0])


def test_splice_into_an_empty_cache_is_a_prefill() -> None:
    ids = ids_of(20)
    cache = EditableCache(model())
    cache.splice(skill_of(ids))
    check_same(cache, stock(ids)[0])


def test_the_overlap_with_the_window_before_is_cut() -> None:
    prefix, ids = ids_of(24, 24), ids_of(36, 136)
    cache = cache_with(prefix)
    cache.splice(skill_of(ids))
    with pytest.raises(AssertionError, match="compressed_kv"):
        check_same(cache, frozen_reference(prefix, ids, cut=False))


def test_several_chunks_and_live_tokens_between() -> None:
    first, second = ids_of(29, 5), ids_of(24, 6)
    cache = cache_with(ids_of(12, 7))
    cache.splice(skill_of(first))
    cache.append(ids_of(7, 8))
    cache.splice(skill_of(second), name="second")
    expected = frozen_reference(ids_of(12, 7), first)
    forward(expected, ids_of(7, 8))
    with_second = frozen_behind(model(), expected, second)
    check_same(cache, with_second)
    oracles.check(forward(cache, QUERY), forward(with_second, QUERY))


def test_a_chunk_may_have_seen_whole_windows() -> None:
    seen, ids, prefix = ids_of(ALIGNMENT, 3), ids_of(17, 4), ids_of(36, 5)
    cache = cache_with(prefix)
    cache.splice(skill_of(ids, prefix=seen))
    expected = frozen_reference(prefix, ids, seen)
    check_same(cache, expected)
    oracles.check(forward(cache, QUERY), forward(expected, QUERY))
    with pytest.raises(AssertionError):
        check_same(cache_with(prefix, ids, QUERY), expected)
    with pytest.raises(SpanError, match=f"multiple of {ALIGNMENT} tokens, got 5"):
        skill_of(ids, prefix=seen[:5])


def test_no_bos_stands_before_a_chunk_by_default() -> None:
    skill = Skill.precompile(model(), shared_tokenizer(add_bos=True), POLICY, name="policy")
    assert not skill.provenance.prefix_ids
    expected = frozen_reference(ids_of(24), skill.token_ids)
    cache = EditableCache(model(), tokenizer=shared_tokenizer(add_bos=True))
    cache.append(ids_of(24))
    cache.splice(skill)
    check_same(cache, expected)


def test_two_rows() -> None:
    rows = [ids_of(24, seed) for seed in (1, 2)]
    ids = ids_of(17, 3)
    cache = EditableCache.stack([cache_with(row) for row in rows])
    cache.splice(skill_of(ids))
    logits = forward(cache, torch.stack((QUERY, QUERY)))
    for row, prefix in enumerate(rows):
        expected = frozen_reference(prefix, ids)
        oracles.check(logits[row : row + 1], forward(expected, QUERY))
        check_same(cache.unstack()[row], expected)


def _changed(spec: ModelSpec, change: Callable[[CompressedLayerSpec], CompressedLayerSpec]) -> ModelSpec:
    assert spec.compressed is not None
    layers = tuple(change(layer) for layer in spec.compressed.layers)
    return replace(spec, compressed=replace(spec.compressed, layers=layers))


def _half(layer: CompressedLayerSpec) -> CompressedLayerSpec:
    return replace(layer, rotaries=tuple((path, replace(r, layout="half")) for path, r in layer.rotaries))


def _without(name: str) -> Callable[[CompressedLayerSpec], CompressedLayerSpec]:
    return lambda layer: replace(layer, rotaries=tuple(each for each in layer.rotaries if each[0][-1] != name))


def _other_table(layer: CompressedLayerSpec) -> CompressedLayerSpec:
    table = tuple(model().model.rotary_emb.get_buffer("main_inv_freq").tolist())
    return replace(layer, rotaries=tuple((path, replace(r, inv_freq=table)) for path, r in layer.rotaries))


WRONG = {
    "other layout": _half,
    "other frequencies": _other_table,
    **{f"{name} not rotated": _without(name) for name in ("keys", "compressor", "indexer")},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_wrong_spec_shows(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix, ids = ids_of(24, 24), ids_of(29, 129)
    skill, wrong = skill_of(ids), _changed(measured(model()), change)
    cache = cache_with(prefix)
    state, _ = probe._specs[model()]
    monkeypatch.setitem(probe._specs, model(), (state, wrong))
    cache.splice(skill)
    with pytest.raises(AssertionError):
        check_same(cache, frozen_reference(prefix, ids))


def test_one_position_too_far_shows() -> None:
    prefix, ids = ids_of(24, 24), ids_of(29, 129)
    skill = skill_of(ids)
    cache = cache_with(prefix)
    cache.splice(skill._derived(position_ids=skill.position_ids - 1))
    with pytest.raises(AssertionError):
        check_same(cache, frozen_reference(prefix, ids))


# -- refusals


@pytest.mark.parametrize(("start", "missing"), [(13, 11), (16, 8), (18, 6), (23, 1)])
def test_a_splice_elsewhere_names_the_next_slot(start: int, missing: int) -> None:
    prefix, ids = ids_of(start, start), ids_of(20, 4)
    cache, skill = cache_with(prefix), skill_of(ids)
    before = contents(copy.deepcopy(cache))
    with refused(cache, SpanError, ValueError, f"slot that fits is {start + missing}", f"put {missing} tokens"):
        cache.splice(skill)
    assert all(torch.equal(tensor, before[name]) for name, tensor in contents(cache).items())
    cache.append(ids_of(missing, 5))
    cache.splice(skill)
    check_same(cache, frozen_reference(torch.cat((prefix, ids_of(missing, 5))), ids))


def test_what_entries_do_not_allow() -> None:
    skill = skill_of(ids_of(24, 4))
    cache = cache_with(ids_of(24))
    for words, action in (
        ("seam_tokens=0", lambda: cache.splice(skill, seam_tokens=3)),
        ("without gaps", lambda: cache.splice(skill, position=36)),
        ("can't be cut by token", lambda: cache.splice(skill, at=12)),
        ("can't be cut by token", lambda: cache.extract((0, 12))),
        ("by itself", lambda: skill.slice(0, 12)),
    ):
        with pytest.raises((SpanError, UnsupportedModelError), match=words):
            action()
    check_full(cache, ids_of(24))
    bare = skill._derived(compressed=None)
    with pytest.raises(CompatibilityError, match="does not hold their entries"):
        cache.splice(bare)


def test_entries_that_do_not_stand_for_the_tokens_are_refused() -> None:
    cache = cache_with(ids_of(24))
    cache.layers[1].entry_count["indexer"] += 1
    with pytest.raises(LedgerError, match="expected as many as stand for 24 tokens"):
        cache.splice(skill_of(ids_of(24, 4)))


def test_padding_is_refused() -> None:
    caches = [cache_with(ids_of(count)) for count in (20, 23)]
    with pytest.raises(SpanError, match="same number of tokens"):
        EditableCache.stack(caches)
    valid = torch.tensor([[False, True, True], [True, True, True]])
    with pytest.raises(UnsupportedModelError, match="one length for all rows, got padding"):
        checks.check_padding(EditableCache(model()), valid, "append")
    padded = torch.cat((torch.tensor([7, 7]), IDS[:9]))
    mask = torch.tensor([[0, 0] + [1] * 9])
    answers = []
    for first in (7, 8):  # why: the stock model folds padding into its entries
        padded[0] = first
        with torch.no_grad():
            cache = DynamicCache(config=model().config)
            answers.append(model()(input_ids=padded[None], attention_mask=mask, cache=cache).logits[:, -1])
    assert oracles.relative_error(*answers) > 1e-3


def test_nothing_goes_back_into_a_spliced_chunk() -> None:
    cache = cache_with(ids_of(24))
    cache.splice(skill_of(ids_of(24, 4)))
    with pytest.raises(LedgerError, match="Append at least one token"):
        cache.next_token_logits()
    cache.append(QUERY[:1])
    expected = frozen_reference(ids_of(24), ids_of(24, 4))
    oracles.check(cache.next_token_logits(), forward(expected, QUERY[:1])[:, -1])


# -- edits compute again from the nearest kept contents

IDS = ids_of(40, 11)
MORE = ids_of(3, 12)

EDITS: dict[str, tuple[Callable[[EditableCache], Any], Tensor, int]] = {
    "insert": (lambda c: c.insert(MORE, 26), torch.cat((IDS[:26], MORE, IDS[26:])), 23),
    "remove": (lambda c: c.remove((22, 27)), torch.cat((IDS[:22], IDS[27:])), 15),
    "reposition": (
        lambda c: c.reposition((21, 25), to=30),
        torch.cat((IDS[:21], IDS[25:34], IDS[21:25], IDS[34:])),
        20,
    ),
    "recompute": (lambda c: c.recompute((25, 40)), IDS, 20),
    "sync": (lambda c: c.sync(torch.cat((IDS[:33], MORE))), torch.cat((IDS[:33], MORE)), 16),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_equals_full(edit: str) -> None:
    action, left, again = EDITS[edit]
    cache = cache_with(IDS[:20], IDS[20:])
    outcome = action(cache)
    assert outcome.tokens_computed == again, "from the border at slot 20 on"
    check_full(cache, left)
    oracles.check(forward(cache, QUERY), stock(left, QUERY)[1])
    with pytest.raises(AssertionError):  # control: the last token missing
        check_same(cache, stock(left[:-1], QUERY)[0])


def test_an_edit_before_a_spliced_chunk_computes_the_chunk_again() -> None:
    cache = cache_with(IDS[:24])
    cache.splice(skill_of(ids_of(24, 4)))
    cache.append(QUERY)
    cache.remove((5, 7))
    check_full(cache, torch.cat((IDS[:5], IDS[7:24], ids_of(24, 4), QUERY)))


def test_an_edit_behind_a_spliced_chunk_keeps_it() -> None:
    cache = cache_with(IDS[:24])
    cache.splice(skill_of(ids_of(24, 4)))
    forward(cache, QUERY)
    cache.remove((50, 52))
    expected = frozen_reference(IDS[:24], ids_of(24, 4))
    forward(expected, torch.cat((QUERY[:2], QUERY[4:])))
    check_same(cache, expected)


def test_an_edit_in_a_spliced_chunk_starts_at_the_chunk() -> None:
    cache = EditableCache(model())
    forward(cache, IDS[:24])
    cache.splice(skill_of(ids_of(24, 4)))
    assert cache.remove((30, 32)).tokens_computed == 22
    check_full(cache, torch.cat((IDS[:24], ids_of(24, 4)[:6], ids_of(24, 4)[8:])))


def test_crop_fork_rollback() -> None:
    cache = cache_with(IDS[:20], IDS[20:31])
    cache.checkpoint("here")
    twin = cache.fork()
    cache.append(IDS[31:])
    cache.crop(-14)
    check_full(cache, IDS[:26])
    cache.rollback("here")
    check_full(cache, IDS[:31])
    twin.append(QUERY)
    check_full(twin, torch.cat((IDS[:31], QUERY)))
    deep = copy.deepcopy(cache)
    cache.reset()
    check_full(deep, IDS[:31])
    cache.append(IDS)
    check_full(cache, IDS)


def test_what_was_kept_is_a_copy() -> None:
    """Even of a layer that would write in place, which those of today do not."""
    cache = cache_with(IDS[:20])
    cache.checkpoint("here")
    twin = cache.fork()
    for layer in cache.layers:
        layer.keys.zero_()
    cache.rollback("here")
    check_full(cache, IDS[:20])
    check_full(twin, IDS[:20])


def test_rows_are_picked_from_what_was_kept() -> None:
    rows = [ids_of(30, seed) for seed in (1, 2, 3)]
    cache = EditableCache.stack([cache_with(row[:20], row[20:]) for row in rows])
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.crop(-4)
    logits = forward(cache, torch.stack((QUERY, QUERY)))
    for row, wanted in enumerate((rows[2], rows[0])):
        oracles.check(logits[row : row + 1], stock(wanted[:26], QUERY)[1])


def test_a_failing_forward_changes_nothing() -> None:
    cache = cache_with(IDS[:20])
    before = contents(copy.deepcopy(cache))
    with failing_at(model().model.layers[3]), pytest.raises(RuntimeError, match="on purpose"):
        forward(cache, QUERY)
    assert all(torch.equal(tensor, before[name]) for name, tensor in contents(cache).items())
    check_full(cache, IDS[:20])


def test_generate_behind_a_chunk() -> None:
    prefix, ids = ids_of(24, 24), ids_of(29, 129)
    cache = cache_with(prefix)
    cache.splice(skill_of(ids))
    inputs = cache.inputs(QUERY)
    out = generate(cache, inputs["input_ids"], model=model(), max_new_tokens=9)
    expected = frozen_reference(prefix, ids)
    logits = forward(expected, QUERY)[:, -1]
    for token, found in zip(out.sequences[0, -9:], out.logits, strict=True):
        oracles.check(found, logits)
        assert int(token) == int(logits.argmax())
        logits = forward(expected, token[None])[:, -1]


# -- folders


def test_a_chunk_as_a_folder(tmp_path: Path) -> None:
    skill = skill_of(ids_of(29, 4))
    skill.save_pretrained(tmp_path / "chunk")
    loaded = Skill.from_pretrained(tmp_path / "chunk")
    assert loaded.equal_cells(skill)
    assert loaded.nbytes == skill.nbytes > 0
    cache = cache_with(IDS[:24])
    cache.splice(loaded)
    check_same(cache, frozen_reference(IDS[:24], ids_of(29, 4)))
    assert skill.compressed is not None
    other = {**skill.compressed.layers[2], ("buffer_kv", "compressor"): torch.zeros(1, 5, 32)}
    damaged = skill._derived(compressed=Compressed({**skill.compressed.layers, 2: other}))
    assert not damaged.equal_cells(skill)


def test_a_cache_as_a_folder(tmp_path: Path) -> None:
    cache = cache_with(IDS[:20], IDS[20:29])
    cache.save_pretrained(tmp_path / "cache")
    loaded = EditableCache.from_pretrained(tmp_path / "cache", model=model())
    check_full(loaded, IDS[:29])
    loaded.remove((25, 27))
    assert loaded.history[-1].tokens_computed == 7, "the last border went along"
    check_full(loaded, torch.cat((IDS[:25], IDS[27:29])))


def test_a_folder_with_the_contents_of_other_tokens_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_with(IDS[:20])
    monkeypatch.setattr(cache, "states", cache_with(IDS[:19]).states)
    cache.save_pretrained(tmp_path / "cache")
    with pytest.raises(ArtifactError, match="the state after 20 tokens"):
        EditableCache.from_pretrained(tmp_path / "cache", model=model())
