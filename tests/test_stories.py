"""Long stories: operations, forks, batches and `generate` in one context, checked after each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_support import (
    Snapshot,
    forward,
    generate,
    go_on,
    make_cache,
    make_context,
    policy,
    shared_model,
    shared_tokenizer,
    some_ids,
)

from editable_cache import EditableCache
from editable_cache.testing import oracles


def verified(cache: EditableCache) -> EditableCache:
    verdict = cache.verify()
    assert verdict.ok, str(verdict)
    return cache


def keys_of(cache: EditableCache) -> list[Any]:
    return [layer.view()["keys"] for layer in cache.editable_layers]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_splice_generate_rollback_edit_generate(family: str) -> None:
    cache = make_context(family)
    cache.checkpoint("before")
    before = Snapshot(cache)
    first = go_on(verified(cache), "asked")
    cache.rollback("before")
    before.check(cache)
    cache.edit("status", "delivered now")
    second = go_on(verified(cache), "asked")
    verified(cache)
    cache.rollback("before")
    before.check(cache)
    assert torch.equal(go_on(cache, "asked"), first)
    assert not torch.equal(first, second)
    verified(cache)


@pytest.mark.parametrize("method", ["erratum", "field+erratum"])
def test_errata_there_and_back_with_answers_between(method: str) -> None:
    cache = make_context()
    for value in ("delivered", "pending", "refund", "delivered", "pending"):
        cache.edit("status", value, method=method)
        assert cache.field("status").current == value
        go_on(verified(cache), "asked")
        names = {segment.name for segment in cache.segments}
        assert all(erratum.segment in names for erratum in cache.field("status").errata)
    cache.edit("channel", "phone")
    go_on(cache, "ok")
    cache.consolidate()
    text = shared_tokenizer().decode(cache.token_ids[0])
    assert "UPDATE" not in text
    assert "order_status: pending" in text
    assert "channel: phone" in text
    assert not cache.field("status").errata
    verified(cache)


def test_a_b_a_leaves_no_line_where_nothing_came_between() -> None:
    cache = make_context()
    before = Snapshot(cache)
    cache.erratum("status", "delivered")
    cache.erratum("status", "refund")
    assert sum(segment.origin == "erratum" for segment in cache.segments) == 1
    cache.erratum("status", "pending")
    before.check(cache)


def test_interleaved_forks_equal_separate_runs() -> None:
    def play(cache: EditableCache, turn: int, kind: int) -> None:
        if kind == 0:
            go_on(cache, "asked")
        elif kind == 1:
            cache.edit("status", ["delivered", "pending it is"][turn % 2])
        else:
            cache.splice(policy(), name=f"rule {turn}", at=len(cache.ledger) - 2)
            cache.remove(f"rule {turn}")

    base = make_context()
    forks = [base.fork() for _ in range(3)]
    for turn in range(3):
        for kind, cache in enumerate(forks):
            play(cache, turn, (kind + turn) % 3)
    for kind, cache in enumerate(forks):
        alone = make_context()
        for turn in range(3):
            play(alone, turn, (kind + turn) % 3)
        assert alone.ledger.same(cache.ledger)
        oracles.check(keys_of(cache), keys_of(alone))
        verified(cache)


def test_an_open_gap_then_generate_then_closing_it() -> None:
    cache = make_context()
    last = int(cache.positions.max())
    cache.remove("policy", close_gap=False)
    go_on(verified(cache), "asked")
    assert int(cache.positions.max()) > last
    gap = cache.positions[0].diff().max()
    assert gap == len(policy()) + 1
    start = cache.segment("order").start
    cache.reposition((start, len(cache.ledger)), position=start)
    assert cache.positions[0].tolist() == list(range(len(cache.ledger)))
    go_on(verified(cache), "ok")
    cache.edit("status", "delivered now", method="full")
    oracles.check(keys_of(cache), oracles.full(shared_model(), cache.token_ids).keys)


def test_sync_after_generate_reuses_what_is_the_same() -> None:
    cache = make_context()
    go_on(cache, "asked")
    ids = cache.token_ids[0]
    moved = torch.cat((ids[:5], ids[30:45], ids[5:25]))
    plan = cache.sync(moved, dry_run=True, approximate=True)
    assert plan.count("move") > 10
    cache.sync(moved, approximate=True)
    assert torch.equal(cache.token_ids[0], moved)
    go_on(verified(cache), "ok")
    cache.sync(moved[:20])
    verified(cache)
    cache.recompute((0, 20))
    oracles.check(keys_of(cache), oracles.full(shared_model(), moved[:20]).keys)


def test_chunks_behind_a_bos_in_a_context_that_has_one() -> None:
    from editable_cache import Skill

    tokenizer, model = shared_tokenizer(add_bos=True), shared_model()
    skill = Skill.precompile(model, tokenizer, "If the order is pending.\n", name="rule")
    cache = EditableCache(model, tokenizer=tokenizer)
    cache.append("order_status: {s} \n", fields={"s": "pending"}, name="order")
    order = len(cache.ledger)
    for at in (None, order, order + 4):
        cache.splice(skill, at=at, seam_tokens=0, name=f"rule at {at}") if at != order + 4 else cache.insert(" the", at)
        verified(cache)
    cache.refresh_field("s", "delivered now")
    go_on(verified(cache), "ok")
    cache.reposition("order", to=0)
    verified(cache)
    chunk = cache.extract("rule at None", name="cut")
    other = EditableCache(model, tokenizer=tokenizer)
    other.append("You are")
    other.splice(chunk)
    verified(other)


def test_recompute_makes_later_cells_stale_only_if_something_changed() -> None:
    cache = make_cache()
    cache.append(some_ids(10)[0])
    cache.recompute((3, 5))
    assert not cache.ledger.stale  # they were exact
    cache.splice(policy(), seam_tokens=0)
    cache.append(some_ids(4, seed=3)[0], name="reader")
    cache.recompute("policy")
    reader = cache.segment("reader")
    assert [(s.start, s.stop) for s in cache.ledger.stale] == [reader.span]
    verified(cache)
    cache.recompute("reader")
    assert not cache.ledger.stale
    oracles.check(keys_of(cache), oracles.full(shared_model(), cache.token_ids).keys)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_some_layers_of_a_spliced_chunk_then_a_move(layer: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        cache = make_context("llama", dtype=dtype)
        start, stop = cache.segment("policy").span
        mask = torch.zeros(3, len(cache.ledger), dtype=torch.bool)
        mask[layer, start + 2 : stop - 2] = True
        cache.reposition("policy", position=40)
        cache.reposition("policy", position=start)
        cache.recompute(mask)
        verified(cache)
        kept = [keys[..., start:stop, :].clone() for keys in keys_of(cache)]
        cache.reposition("policy", position=300)
        cache.reposition("policy", position=start)
        for now, old in zip(keys_of(cache), kept, strict=True):
            bar = 1e-5 if dtype == torch.float32 else 2e-2
            assert oracles.relative_error(now[..., start:stop, :], old) < bar


def test_beams_then_one_row_goes_on() -> None:
    cache = make_context()
    ids = cache.inputs("asked")["input_ids"]
    generate(cache, ids, num_beams=3)
    row = cache.unstack()[0]
    assert row.ledger.batch == 1
    assert [field.name for field in row.fields] == ["status", "channel"]
    row.edit("status", "delivered now")
    go_on(verified(row), "ok")
    cache.batch_select_indices(torch.tensor([2]))
    cache.edit("status", "refund")
    verified(cache)
    forward(cache, some_ids(2))
    verified(cache)


@pytest.mark.parametrize("seam", [0, 1])
def test_a_spliced_chunk_is_cut_out_and_spliced_again(seam: int) -> None:
    """Cut out whole it is what it was; with a recomputed seam it is a mixture that no oracle knows, and says so."""
    cache = make_cache()
    cache.append(some_ids(6)[0])
    cache.splice(policy(), seam_tokens=seam, name="first")
    cut = cache.extract("first", name="cut")
    other = make_cache()
    other.append(some_ids(3, seed=2)[0])
    other.splice(cut, seam_tokens=0)
    verified(other)
    if seam:
        assert "isolated" in cut.provenance.note
        assert other.ledger.causes(*other.segment("cut").span)
    else:
        assert cut.provenance.prefix_ids == policy().provenance.prefix_ids
        assert not other.ledger.stale
