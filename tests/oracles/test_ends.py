"""What the state machine found, as small cases of their own."""

from __future__ import annotations

import pytest
import torch

from editable_cache import EditableCache, SpanError
from editable_cache.testing.contents import random_ids, same_bits, shared_model, states_of
from editable_cache.testing.tiny_models import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def with_two_occurrences() -> EditableCache:
    cache = EditableCache(shared_model("llama"), tokenizer=TOKENIZER)
    cache.append("status: {status} , {status} .\n", fields={"status": "delivered to 9"})
    return cache


def test_removing_the_end_may_not_cut_a_field() -> None:
    cache = with_two_occurrences()
    before, ledger = states_of(cache), cache.ledger
    start, stop = cache.field("status").spans[1]
    with pytest.raises(SpanError, match="would cut it"):
        cache.remove((start + 1, len(ledger)))
    assert same_bits(states_of(cache), before)
    assert cache.ledger.same(ledger)
    assert stop < len(ledger)


def test_a_field_outlives_its_last_occurrence() -> None:
    cache = with_two_occurrences()
    first, second = cache.field("status").spans
    cache.remove((second[0], len(cache.ledger)))
    assert cache.field("status").spans == (first,)


def test_occurrences_are_listed_in_the_order_of_slots() -> None:
    cache = with_two_occurrences()
    cache.reposition(cache.field("status").spans[1], to=0)
    spans = cache.field("status").spans
    assert spans == tuple(sorted(spans))
    assert {TOKENIZER.decode(cache.token_ids[0, slice(*span)]).strip() for span in spans} == {"delivered to 9"}


def test_another_token_count_keeps_the_gap_before_the_field() -> None:
    cache = EditableCache(shared_model("llama"), tokenizer=TOKENIZER)
    cache.append("status: {status} .\n", fields={"status": "pending"})
    start, _ = cache.field("status").spans[0]
    cache.reposition((start, len(cache.ledger)), position=100)
    cache.refresh_field("status", "1 2 3")
    assert cache.positions[0, start:].tolist() == list(range(100, 100 + len(cache.ledger) - start))


def test_no_removal_leads_below_position_zero() -> None:
    cache = EditableCache(shared_model("llama"))
    cache.append(random_ids(12))
    cache.reposition((9, 12), position=0)
    before, positions = states_of(cache), cache.positions
    with pytest.raises(SpanError, match="positions >= 0"):
        cache.remove((5, 9))
    assert same_bits(states_of(cache), before)
    assert torch.equal(cache.positions, positions)
    cache.remove((5, 9), close_gap=False)
    assert cache.positions[0, 5:].tolist() == [0, 1, 2]
