"""Which trace tells of which tokens: joined, found again, and never taken for another's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_support import make_cache, policy, refused, shared_tokenizer
from torch import Tensor

from editable_cache import EditableCache, LedgerError, SpanError
from editable_cache.errors import EditableCacheError
from editable_cache.repair import Tier0View, list_signals, mask_of, scores
from editable_cache.repair.collect import probe
from editable_cache.repair.reads import reads_trace
from editable_cache.testing.oracles import check
from editable_cache.testing.tiny_models import tiny_model

INSTRUCTION = "You must not refund the order.\n"
DOCUMENT = "The customer asked for the refund of the order, and the order was delivered. The status is pending.\n"
SECOND = "the agent may refund it; the order is the status.\n"
QUESTION = "the status of the order is"


def traced(*documents: str, contamination: str = INSTRUCTION) -> EditableCache:
    cache = make_cache()
    cache.append(contamination, name="instruction")
    for number, document in enumerate(documents):
        with cache.tracing("instruction"):
            cache.append(document, name=f"document {number}")
    return cache


def field_cache(document: str = DOCUMENT, *, whole_segment: bool = False) -> EditableCache:
    cache = make_cache()
    cache.append("order_status: {s} \n", name="order", fields={"s": "pending"})
    with cache.tracing("order" if whole_segment else cache.field("s").spans[0]):
        cache.append(document, name="notes")
    return cache


def num_stale(cache: EditableCache) -> int:
    return len({slot for span in cache.ledger.stale for slot in range(span.start, span.stop)})


def test_traces_of_several_documents_are_joined() -> None:
    cache = traced(DOCUMENT, SECOND)
    per_document = [scores("inflow_accumulated", Tier0View(each.trace)) for each in cache._traces]
    outcome = cache.fork().repair(0.2, contamination="instruction")
    assert torch.equal(outcome.mask, mask_of(torch.cat(per_document, dim=1), 0.2, "columns"))
    assert (outcome.traced, outcome.untraced) == (True, 0)
    window = cache.fork().repair(0.2, contamination="instruction", signal="window")
    assert not torch.equal(outcome.mask, window.mask)


def test_what_no_trace_tells_of_comes_last_and_is_counted() -> None:
    cache = traced(DOCUMENT)
    start, stop = cache.segment("document 0").span
    cache.append(SECOND, name="between")
    with cache.tracing("instruction"):
        cache.append("The status is pending.\n", name="last")
    between = cache.segment("between")
    outcome = cache.repair(0.5, contamination="instruction")
    assert outcome.document == (start, len(cache.ledger))
    assert outcome.untraced == between.stop - between.start
    assert f"{outcome.untraced} tokens not traced" in str(outcome)
    assert not bool(outcome.mask[:, between.start - start : between.stop - start].any())
    assert 0 < int(outcome.mask[:, : stop - start].any(0).sum()) < stop - start


def test_another_contamination_at_the_same_slots_is_another() -> None:
    cache = traced(DOCUMENT)
    cache.crop(-len(cache.ledger))
    cache.append("You may refund the order to the customer.\n", name="other")
    cache.append(DOCUMENT)
    with refused(cache, LedgerError, ValueError, "cache.tracing"):
        cache.repair(0.2, contamination="other")
    cache = traced(DOCUMENT)
    cache.insert("agent order ", at=cache.segment("instruction").start, name="new")
    with refused(cache, LedgerError, ValueError, "cache.tracing"):
        cache.repair(0.2, contamination="new", document="document 0", signal="inflow")
    start = cache.segment("instruction").start
    with refused(cache, LedgerError, ValueError, "cache.tracing"):
        cache.repair(0.2, contamination=(start, start + 1), document="document 0", signal="inflow")


def test_other_tokens_with_the_same_ids_are_not_the_traced_ones() -> None:
    cache = make_cache()
    cache.append(INSTRUCTION, name="instruction")
    cache.append("the order was delivered.\n", name="untraced")
    with cache.tracing("instruction"):
        cache.append(DOCUMENT, name="document")
    with refused(cache, LedgerError, ValueError, "cache.tracing"):
        cache.repair(0.3, contamination="instruction", document="untraced")
    assert cache.repair(0.3, contamination="instruction", document="document").traced


def test_what_the_end_of_the_cache_has_left_is_still_traced() -> None:
    whole, cut = field_cache(), field_cache()
    for cache in (whole, cut):
        cache.refresh_field("s", "delivered")
    cut.crop(-3)
    outcome = cut.repair(0.3)
    assert (outcome.signal, outcome.traced) == ("inflow_accumulated", True)
    assert outcome.untraced == whole.repair(0.3).untraced


@pytest.mark.parametrize("change", ["remove", "reposition"])
def test_changes_inside_the_context(change: str) -> None:
    cache = make_cache()
    cache.append("Hello. ", name="head")
    cache.append(INSTRUCTION, name="instruction")
    with pytest.raises(LedgerError, match=f"got {change}"), cache.tracing("instruction"):  # noqa: PT012
        cache.append([60, 61, 62], name="a")
        cache.append([70, 71, 72], name="b")
        if change == "remove":
            cache.remove("a")
        else:
            cache.reposition("instruction", to=0)
    assert not cache._traces


def test_the_segment_of_a_field_serves_for_the_field() -> None:
    cache = field_cache(whole_segment=True)
    cache.refresh_field("s", "delivered")
    assert cache.repair(0.3).traced


def test_without_a_known_writer_no_trace_is_taken() -> None:
    cache = make_cache()
    cache.append("You are a support agent.\n", name="head")
    cache.append(INSTRUCTION, name="instruction")
    with cache.tracing("instruction"):
        cache.append(DOCUMENT)
    cache.remove("instruction", close_gap=False)
    with refused(cache, LedgerError, ValueError, "cache.tracing"):
        cache.repair(0.3)
    assert not cache.repair(0.3, query=QUESTION).traced


def test_all_changes_of_a_field_are_one_cause() -> None:
    cache = field_cache()
    cache.refresh_field("s", "delivered")
    cache.refresh_field("s", "cancelled")
    outcome = cache.repair(0.3)
    assert "cancelled" in outcome.reason


def test_a_second_repair_goes_on() -> None:
    cache = field_cache()
    cache.refresh_field("s", "delivered")
    first, second = cache.repair(0.3), cache.repair(0.3)
    mended = [set((each.mask.any(0).nonzero()[:, 0] + each.document[0]).tolist()) for each in (first, second)]
    assert min(map(len, mended)) > 5
    assert mended[0].isdisjoint(mended[1])
    everything = cache.repair(1.0)
    assert bool(everything.mask.all())
    assert num_stale(cache) == 0
    assert cache.verify().ok


def test_a_chunk_with_nothing_before_it_is_no_cause() -> None:
    cache = make_cache()
    cache.splice(policy(), seam_tokens=0)
    cache.append("order_status: {s} \n", name="order", fields={"s": "pending"})
    cache.append(DOCUMENT)
    cache.refresh_field("s", "delivered")
    assert "field s" in cache.repair(0.3, query=QUESTION).reason


def test_few_tokens() -> None:
    cache = make_cache()
    cache.append(INSTRUCTION, name="instruction")
    cache.append([60], name="gap")
    with cache.tracing("instruction"):
        cache.append([70], name="document")
    assert cache.repair(0.5, contamination="instruction", query=QUESTION).mask.any(0).tolist() == [True, False]
    bare = make_cache()
    bare.append(INSTRUCTION, name="instruction")
    bare.append([60, 70])
    for name in ("sir_columns", "column_ranks", "sir_layerwise", "sir_entering"):
        with refused(bare, LedgerError, ValueError, "cache.tracing"):
            bare.repair(0.5, contamination="instruction", query=QUESTION, signal=name)


def test_which_signals_read_a_trace() -> None:
    without = {signal.name for signal in list_signals() if signal.tier < 2 and not reads_trace(signal)}
    assert without == {
        *("boundary", "deep_layers", "delimiter", "even_columns", "inverse_key_norm", "key_norm", "random", "recency"),
        *("seam_distance", "shallow_layers", "value_norm", "window", "near_and_read", "probe_attention", "readout"),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    expected = traced(DOCUMENT).repair(0.2, contamination="instruction").mask
    cache = make_cache()
    cache.append(INSTRUCTION, name="instruction")
    torch.set_default_dtype(dtype)
    try:
        with cache.tracing("instruction"):
            cache.append(DOCUMENT)
        assert torch.equal(cache.repair(0.2, contamination="instruction").mask, expected)
        for signal in ("window", "random", "even_columns"):
            cache.repair(0.2, contamination="instruction", signal=signal)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_token_without_an_embedding() -> None:
    model: Any = tiny_model("llama")
    model.get_input_embeddings().weight.data[70] = 0
    cache = EditableCache(model, tokenizer=shared_tokenizer())
    cache.append(INSTRUCTION, name="instruction")
    with cache.tracing("instruction"):
        cache.append([60, 70, 80])
    assert cache.repair(0.4, contamination="instruction").traced


def test_a_query_stands_behind_the_unfed_token() -> None:
    cache = traced(DOCUMENT)
    model: Any = cache.model
    model.generate(**cache.inputs("What is it? "), past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert cache.unfed is not None
    query, span = torch.tensor(shared_tokenizer()(QUESTION)["input_ids"]), cache.segment("document 0").span
    asked = probe(cache, query, span)
    assert cache.unfed is not None
    unfed: Tensor = cache.unfed[0]
    plain = EditableCache(model, tokenizer=shared_tokenizer())
    plain.append(torch.cat([cache.token_ids[0], unfed]))
    check(asked.readout, probe(plain, query, span).readout)


@pytest.mark.parametrize("query", [5, True, torch.tensor(5), [], "", (), iter("ab"), [""], [1j], {"a": 1}])
def test_no_query(query: Any) -> None:
    cache = traced(DOCUMENT)
    with refused(cache, EditableCacheError, ValueError, ""):
        cache.repair(0.2, contamination="instruction", query=query)


@pytest.mark.parametrize("where", [slice(0.5, 3), slice("a", 3)])
def test_slices_of_no_whole_numbers(where: slice) -> None:
    cache = traced(DOCUMENT)
    with refused(cache, SpanError, ValueError, "whole numbers"):
        cache.repair(0.2, contamination=where)
    with refused(cache, SpanError, ValueError, "name of a signal"):
        cache.repair(0.2, contamination="instruction", signal=5)  # type: ignore[arg-type]
