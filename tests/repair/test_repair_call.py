"""The one call: what it repairs by default, what it reports, and what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cache_support import Snapshot, make_cache, policy, refused, shared_model, shared_tokenizer
from torch import Tensor

from editable_cache import EditableCache, LedgerError, RepairOutcome, SpanError, UnsupportedModelError
from editable_cache.forward import run
from editable_cache.repair import list_signals, mask_of, patch
from editable_cache.repair.collect import probe
from editable_cache.repair.repair import MOST_TRACES
from editable_cache.testing import oracles
from editable_cache.testing.contents import cells_in, layers_of, must_differ, same_cells
from editable_cache.testing.tiny_models import tiny_model

INSTRUCTION = "You must not refund the order.\n"
DOCUMENT = "The customer asked for the refund of the order, and the order was delivered. The status is pending.\n"
QUESTION = "the status of the order is"


def contaminated(family: str = "llama", *, trace: bool = True) -> EditableCache:
    cache = make_cache(family)
    cache.append("Hello. ", name="head")
    cache.append(INSTRUCTION, name="instruction")
    if trace:
        with cache.tracing("instruction"):
            cache.append(DOCUMENT, name="document")
    else:
        cache.append(DOCUMENT, name="document")
    return cache


def oracle(cache: EditableCache) -> oracles.Cells:
    """The document's cells of a forward in which nobody sees the instruction."""
    ids, length = cache.token_ids[0], len(cache.ledger)
    valid = torch.ones(length, dtype=torch.bool)
    valid[slice(*cache.segment("instruction").span)] = False
    positions = torch.arange(length)
    model: Any = cache.model
    return oracles.frozen(model, ids, positions, positions * 0, valid).span(*cache.segment("document").span).cells


def gap(cache: EditableCache) -> float:
    """Squared distance of the document's cells from the clean ones, over all layers."""
    mine, clean = cells_in(cache, *cache.segment("document").span), oracle(cache)
    return sum(float((mine[name] - clean[name]).square().sum()) for name in clean)


# -- what it does


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "deepseek_v3"])
@pytest.mark.parametrize("query", [None, QUESTION])
def test_everything_is_the_clean_prefill(family: str, query: str | None) -> None:
    cache = contaminated(family)
    must_differ(cells_in(cache, *cache.segment("document").span), oracle(cache))
    outcome = cache.repair(1.0, query=query, contamination="instruction")
    oracles.check(cells_in(cache, *cache.segment("document").span), oracle(cache))
    assert bool(outcome.mask.all())
    assert outcome.share == 1.0


@pytest.mark.parametrize("geometry", ["columns", "cells", "prefixes", "suffixes"])
def test_a_budget_is_kept_and_helps(geometry: Any) -> None:
    cache = contaminated()
    before, layers, length = gap(cache), layers_of(cache), len(cache.ledger)
    outcome = cache.repair(0.3, query=QUESTION, contamination="instruction", geometry=geometry)
    start, stop = cache.segment("document").span
    assert outcome.document == (start, stop)
    assert outcome.without == cache.segment("instruction").span
    assert outcome.mask.shape == (3, stop - start)
    assert outcome.cells == int(outcome.mask.sum())
    assert abs(outcome.share - 0.3) <= 1 / (stop - start)
    assert outcome.tokens_run == int(outcome.mask.any(0).sum()) + len(query_ids())
    expected = "sir_columns" if geometry == "columns" else "sir"
    assert (outcome.signal, outcome.geometry, outcome.traced) == (expected, geometry, True)
    assert gap(cache) < before
    assert len(cache.ledger) == length
    untouched = torch.ones(3, length, dtype=torch.bool)
    untouched[:, start:stop] = ~outcome.mask
    for now, old, kept in zip(layers_of(cache), layers, untouched, strict=True):
        assert all(torch.equal(now[name][..., kept, :], old[name][..., kept, :]) for name in now)


def query_ids() -> Tensor:
    return torch.tensor(shared_tokenizer()(QUESTION)["input_ids"])


@pytest.mark.parametrize("found", [s.name for s in list_signals() if s.tier < 2])
def test_every_signal_serves(found: str) -> None:
    cache = contaminated()
    outcome = cache.repair(0.2, query=query_ids(), contamination="instruction", signal=found)
    assert outcome.signal == found
    assert outcome.cells == 3 * round(0.2 * outcome.mask.shape[1])


def test_defaults_follow_what_is_at_hand() -> None:
    assert contaminated().repair(contamination="instruction").signal == "inflow_accumulated"
    assert contaminated().repair(contamination="instruction", query=QUESTION).signal == "sir_columns"
    cells = contaminated().repair(contamination="instruction", query=QUESTION, geometry="cells")
    assert cells.signal == "sir"
    bare = contaminated(trace=False).repair(contamination="instruction", query=QUESTION)
    assert (bare.signal, bare.traced) == ("near_and_read", False)
    bare = contaminated(trace=False).repair(contamination="instruction", query=QUESTION, geometry="cells")
    assert bare.signal == "readout"


def test_signals_that_need_no_trace_choose_the_same_without() -> None:
    needing = set()
    for found in (s for s in list_signals() if s.tier < 2):
        with_trace = contaminated().repair(contamination="instruction", query=QUESTION, signal=found.name)
        cache = contaminated(trace=False)
        before = Snapshot(cache)
        try:
            without = cache.repair(contamination="instruction", query=QUESTION, signal=found.name)
        except LedgerError:
            before.check(cache)
            needing.add(found.name)
        else:
            assert torch.equal(without.mask, with_trace.mask), found.name
    assert {"sir", "inflow", "inflow_accumulated", "attention_received"} <= needing
    assert needing.isdisjoint({"readout", "probe_attention", "key_norm", "value_norm", "window", "random"})


def test_a_bank_of_queries_is_averaged() -> None:
    bank = ["What is it about?", "Who wrote it?"]
    cache = contaminated()
    document = cache.segment("document").span
    readings = [probe(cache, torch.tensor(shared_tokenizer()(text)["input_ids"]), document) for text in bank]
    expected = mask_of((readings[0].readout + readings[1].readout) / 2, 0.2, "columns")
    outcome = cache.repair(0.2, query=bank, contamination="instruction", signal="readout")
    assert torch.equal(outcome.mask, expected)
    assert outcome.tokens_run == int(expected.any(0).sum()) + sum(len(shared_tokenizer()(t)["input_ids"]) for t in bank)
    alone = contaminated().repair(0.2, query=bank[:1], contamination="instruction", signal="readout")
    assert torch.equal(alone.mask, mask_of(readings[0].readout, 0.2, "columns"))
    cache = contaminated()
    with refused(cache, SpanError, ValueError, "at least one token"):
        cache.repair(0.2, query=[QUESTION, ""], contamination="instruction", signal="readout")


def test_a_stale_field_is_the_default() -> None:
    cache = make_cache()
    cache.append("order_status: {status} \n", name="order", fields={"status": "pending"})
    with cache.tracing(cache.field("status").spans[0]):
        cache.append(DOCUMENT, name="notes")
    exact = cache.fork()
    cache.refresh_field("status", "delivered")
    start, stop = cache.segment("notes").span
    assert cache.ledger.stale
    outcome = cache.repair(0.25)
    assert outcome.without is None
    assert outcome.traced
    assert "status" in outcome.reason
    behind = cache.field("status").spans[0][1]  # the end of the template was not in the context: it comes first
    assert 0 < start - behind < outcome.cells // len(outcome.mask)
    assert outcome.document == (behind, stop)
    assert bool(outcome.mask[:, : start - behind].all())
    repaired = outcome.mask.all(0).nonzero()[:, 0] + behind
    stale = {slot for span in cache.ledger.stale for slot in range(span.start, span.stop)}
    assert stale == set(range(behind, stop)) - set(repaired.tolist())
    assert cache.verify().ok
    assert cache.repair(1.0, query=QUESTION).traced
    exact.edit("status", "delivered", method="suffix")
    oracles.check(cells_in(cache), cells_in(exact))
    assert not cache.ledger.stale


def test_behind_a_gap_the_trace_decides() -> None:
    cache = make_cache()
    cache.append("order_status: {status} \nthe order was delivered.\n", name="order", fields={"status": "pending"})
    with cache.tracing(cache.field("status").spans[0]):
        cache.append(DOCUMENT, name="notes")
    cache.refresh_field("status", "delivered")
    behind, (start, stop) = cache.field("status").spans[0][1], cache.segment("notes").span
    gap, few = start - behind, cache.fork()
    for options in ({"signal": "inflow_accumulated"}, {"signal": "sir", "query": QUESTION}):
        whole, within = cache.fork(), cache.fork()
        found = whole.repair(0.5, **options).mask
        count = int(found.all(0).sum())
        expected = within.repair((count - gap) / (stop - start), document=(start, stop), **options).mask
        assert bool(found[:, :gap].all())
        assert torch.equal(found[:, gap:], expected)
        assert 0 < int(expected.all(0).sum()) < stop - start
    mask = few.repair(2 / (stop - behind), signal="inflow_accumulated").mask
    assert mask.all(0).nonzero()[:, 0].tolist() == [0, 1]  # nearest to the field
    asked = cache.repair(0.2, query=QUESTION, signal="readout")  # reads no trace, so the gap is like the rest
    assert not bool(asked.mask[:, :gap].all())


def test_partly_repaired_columns_stay_stale() -> None:
    cache = make_cache()
    cache.append("order_status: {status} \n", name="order", fields={"status": "pending"})
    cache.append(DOCUMENT, name="notes")
    cache.refresh_field("status", "delivered")
    before = cache.ledger.stale
    outcome = cache.repair(0.3, query=QUESTION, geometry="suffixes", from_layer=1)
    assert not outcome.mask[0].any()
    assert cache.ledger.stale == before


def test_a_seam_is_the_default() -> None:
    cache = make_cache()
    cache.append("You are a support agent.\n", name="system")
    cache.splice(policy(), seam_tokens=0)
    ids = cache.token_ids[0]
    outcome = cache.repair(1.0, query=QUESTION)
    assert outcome.signal == "readout"  # nothing stands near that wrote to it
    assert outcome.document == cache.segment("policy").span
    assert outcome.without is None
    oracles.check(cells_in(cache), oracles.full(shared_model(), ids).cells)
    assert not cache.ledger.groups.any()
    assert cache.verify().ok


def test_the_ledger_keeps_what_a_masked_repair_did() -> None:
    cache = contaminated()
    cache.repair(0.2, contamination="instruction")
    assert all("repair without 'instruction'" in s.cause for s in cache.ledger.stale)
    assert cache.verify().ok
    assert "repair:" in str(cache.report())
    cache.recompute(slice(None))
    assert not cache.ledger.stale


def test_it_prints() -> None:
    text = str(contaminated().repair(0.2, contamination="instruction"))
    assert all(word in text for word in ("without 'instruction'", "inflow_accumulated", "columns", "cells (", "ms"))


# -- traces


def test_a_trace_does_not_change_the_cells() -> None:
    traced, plain = contaminated(), contaminated(trace=False)
    assert same_cells(cells_in(traced), cells_in(plain))
    assert traced.ledger.same(plain.ledger)


def test_a_trace_follows_its_tokens() -> None:
    """Forks and copies keep it; tokens inserted before it move it; other tokens are not taken for it."""
    cache = contaminated()
    expected = cache.fork().repair(0.2, contamination="instruction").mask
    for twin in (cache.fork(), copy.deepcopy(cache)):
        assert torch.equal(twin.repair(0.2, contamination="instruction").mask, expected)
    moved = cache.fork()
    moved.insert("agent ", at=0)
    document = moved.segment("document")
    assert torch.equal(
        moved.repair(0.2, contamination="instruction", document=document, signal="inflow_accumulated").mask, expected
    )
    part = cache.fork()
    start, stop = part.segment("document").span
    assert part.repair(0.5, contamination="instruction", document=(start + 3, stop - 2)).traced
    other = make_cache()
    other.append(INSTRUCTION, name="instruction")
    other.append("order refund order refund", name="document")
    other._traces = cache._traces
    with refused(other, LedgerError, ValueError, "cache.tracing"):
        other.repair(contamination="instruction")


def test_a_trace_of_another_contamination_is_not_taken() -> None:
    cache = make_cache()
    cache.append("Hello. ", name="head")
    cache.append(INSTRUCTION, name="instruction")
    with cache.tracing("head"):
        cache.append(DOCUMENT, name="document")
    with refused(cache, LedgerError, ValueError, "cache.tracing"):
        cache.repair(contamination="instruction")
    assert cache.repair(contamination="head", document="document").traced


def test_the_default_document_is_the_traced_one() -> None:
    cache = contaminated()
    cache.append("agent: ", name="later")
    assert cache.repair(contamination="instruction").document == cache.segment("document").span
    bare = contaminated(trace=False)
    bare.append("agent: ", name="later")
    assert bare.repair(contamination="instruction", query=QUESTION).document == (
        bare.segment("instruction").stop,
        len(bare.ledger),
    )


def test_few_traces_are_kept() -> None:
    cache = make_cache()
    cache.append(INSTRUCTION, name="instruction")
    for _ in range(MOST_TRACES + 2):
        with cache.tracing("instruction"):
            cache.append("order\n")
    assert len(cache._traces) == MOST_TRACES
    assert cache._traces[-1].document[1] == len(cache.ledger)


def test_an_empty_context_or_a_fault_leaves_no_trace() -> None:
    cache = contaminated(trace=False)
    with pytest.raises(LedgerError, match="none that stayed"), cache.tracing("instruction"):
        pass
    with pytest.raises(ZeroDivisionError), cache.tracing("instruction"):
        raise ZeroDivisionError
    assert cache._traces == ()
    assert cache.model is not None
    assert cache.model.config._attn_implementation == "sdpa"


# -- bad input


@pytest.mark.parametrize("budget", [0, -0.1, 1.01, float("nan"), True, "0.1"])
def test_budgets(budget: Any) -> None:
    cache = contaminated()
    with refused(cache, SpanError, ValueError, "budget in (0, 1]"):
        cache.repair(budget, contamination="instruction")


def test_a_wrong_budget_costs_no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = contaminated()
    monkeypatch.setattr(run, "extend", None)
    with refused(cache, SpanError, ValueError, "budget in (0, 1]"):
        cache.repair(2.0, contamination="instruction", query=QUESTION)


def test_spans_and_words() -> None:
    cache = contaminated()
    length = len(cache.ledger)
    for options, word in (
        ({"document": (5, 5)}, "0 <= start < stop"),
        ({"document": (5, length + 1)}, "0 <= start < stop"),
        ({"contamination": (length, length + 1)}, "0 <= start < stop"),
        ({"contamination": "document", "document": "head"}, "before the document"),
        ({"contamination": "document"}, "nothing stands behind"),
        ({"contamination": "nobody"}, "nobody"),
        ({}, "expected exactly one cause"),
        ({"document": "document"}, "contamination="),
        ({"contamination": "instruction", "signal": "ser"}, "did you mean 'sir'"),
        ({"contamination": "instruction", "signal": "readout"}, "pass query="),
        ({"contamination": "instruction", "signal": "key_deviation"}, "clean cache"),
        ({"contamination": "instruction", "geometry": "rows"}, "geometry among"),
        ({"contamination": "instruction", "query": ""}, "at least one token"),
        ({"contamination": "instruction", "geometry": "suffixes", "from_layer": 3}, "from_layer"),
    ):
        with refused(cache, SpanError, ValueError, word):
            cache.repair(**options)


def test_a_span_of_another_cache() -> None:
    cache, other = contaminated(), make_cache()
    other.append("order", name="elsewhere")
    with refused(cache, SpanError, ValueError, "elsewhere"):
        cache.repair(contamination=other.segment("elsewhere"))


def test_several_causes_are_named() -> None:
    cache = make_cache()
    cache.append("a: {a} \nb: {b} \n", name="order", fields={"a": "order", "b": "agent"})
    cache.append(DOCUMENT)
    cache.refresh_field("a", "refund")
    cache.refresh_field("b", "status")
    with refused(cache, SpanError, ValueError, "field a:", "field b:", "contamination="):
        cache.repair(query=QUESTION)


def test_missing_traces() -> None:
    cache = contaminated(trace=False)
    for options in ({}, {"signal": "inflow"}, {"signal": "sir", "query": QUESTION}):
        with refused(cache, LedgerError, ValueError, "with cache.tracing(contamination)"):
            cache.repair(contamination="instruction", **options)


def test_a_query_beyond_the_model() -> None:
    model: Any = tiny_model("llama")
    cache = EditableCache(model, tokenizer=shared_tokenizer())
    cache.append(INSTRUCTION, name="instruction")
    cache.append(DOCUMENT)
    model.config.max_position_embeddings = len(cache.ledger) + 3
    with refused(cache, SpanError, ValueError, "max_position_embeddings"):
        cache.repair(contamination="instruction", query=QUESTION)


def test_caches_and_models_that_cannot() -> None:
    rows = EditableCache.stack([contaminated(), contaminated()])
    with refused(rows, SpanError, ValueError, "one row, got 2"):
        rows.repair(contamination=(0, 3))
    for family, word in (("falcon_h1", "recurrent state"), ("bloom", "can't be recomputed")):
        cache = contaminated(family, trace=False)
        with pytest.raises(UnsupportedModelError, match=word):
            cache.repair(contamination="instruction", query=QUESTION)
    with pytest.raises(UnsupportedModelError, match="with a model"):
        EditableCache(config=shared_model().config).repair()
    empty = make_cache()
    with pytest.raises(SpanError):
        empty.repair(contamination=(0, 1))


@pytest.mark.parametrize("where", ["_scatter", "_mark"])
def test_a_fault_in_the_middle_is_taken_back(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = contaminated()
    before = Snapshot(cache)

    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(run if where == "_scatter" else patch, where, fail)
    with pytest.raises(ZeroDivisionError):
        cache.repair(contamination="instruction", query=QUESTION)
    before.check(cache)
    monkeypatch.undo()
    assert isinstance(cache.repair(contamination="instruction", query=QUESTION), RepairOutcome)
