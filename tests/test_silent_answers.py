"""Ways to get a wrong answer in silence that other tests do not try."""

from __future__ import annotations

import copy
import threading
import warnings
from typing import Any

import pytest
import torch
from cache_support import generate, go_on, make_cache, make_context, policy, shared_model, shared_tokenizer, some_ids
from torch import Tensor
from transformers import DynamicCache

from editable_cache import CompatibilityError, ContextWarning, EditableCache
from editable_cache.testing import oracles
from editable_cache.testing.tiny_models import tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::editable_cache.ContextWarning"),
    pytest.mark.filterwarnings("ignore::editable_cache.TokenBoundaryWarning"),
]


def text(cache: EditableCache) -> str:
    return str(cache.tokenizer.decode(cache.token_ids[0]))


def held(cache: EditableCache) -> tuple[list[Tensor], list[Tensor]]:
    views = [layer.view() for layer in cache.editable_layers]
    return [view["keys"].clone() for view in views], [view["values"].clone() for view in views]


def assert_cells(cache: EditableCache, oracle: oracles.OracleResult) -> None:
    keys, values = held(cache)
    oracles.check(keys, oracle.keys, what="keys")
    oracles.check(values, oracle.values, what="values")


# -- bugs: these fail on 1991e4a


def test_removing_the_answer_also_removes_its_last_token() -> None:
    cache = make_cache()
    cache.append("You are a support agent.\n", name="system")
    go_on(cache, "the order")
    cache.remove("generated")
    cache.append(" was delivered")
    assert text(cache) == "You are a support agent.\nthe order was delivered"


def test_removing_everything_after_generate_leaves_nothing() -> None:
    cache = make_cache()
    go_on(cache, "the order")
    cache.remove(slice(None))
    cache.append("a fresh start")
    assert text(cache) == "a fresh start"


def test_reorder_cache_takes_the_unfed_tokens_along() -> None:
    cache = make_cache()
    cache.append(["hello you", "the order"])
    go_on(cache, "x")
    assert cache.unfed is not None
    before = cache.unfed.clone()
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(cache.unfed, before[[1, 0]])


@pytest.mark.parametrize("how", ["remove", "reposition"])
def test_hoist_does_not_bring_back_text_that_was_cut(how: str) -> None:
    cache = make_cache()
    cache.append("start of it. \n", name="head")
    cache.append("secret words here. status: {s} \n", name="order", fields={"s": "pending"})
    cache.append("tail\n")
    start = cache.segment("order").start
    if how == "remove":
        cache.remove((start, start + 6))
    else:
        cache.reposition((start, start + 3), to=start + 3)
    assert not cache.segment("order").template


def test_extract_is_not_signed_by_weights_that_did_not_compute_it() -> None:
    model: Any = tiny_model("llama")
    cache = EditableCache(model, tokenizer=shared_tokenizer())
    cache.append("You are a support agent.\n", name="system")
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    other = EditableCache(model, tokenizer=shared_tokenizer())
    other.append("hello.\n")
    with pytest.raises(CompatibilityError):
        other.splice(cache.extract("system"))


def test_keys_assigned_by_hand_in_16_bits_move_from_where_they_stand() -> None:
    cache = make_context(dtype=torch.bfloat16)
    twin = cache.fork()
    for layer in cache.editable_layers:
        assert layer.keys is not None
        layer.keys = layer.keys.clone()
    cache.remove((2, 5))
    twin.remove((2, 5))
    for mine, theirs in zip(held(cache)[0], held(twin)[0], strict=True):
        assert oracles.relative_error(mine, theirs) < 5e-2


def test_stack_keeps_an_open_gap() -> None:
    caches = [make_context() for _ in range(2)]
    for cache in caches:
        cache.remove("question", close_gap=False)
    stacked = EditableCache.stack(caches)
    stacked.append("x")
    caches[0].append("x")
    assert torch.equal(stacked.positions[:1], caches[0].positions)


def test_a_gap_in_place_of_everything_stays_open() -> None:
    cache = make_cache()
    cache.append(some_ids(7)[0])
    cache.remove(slice(None), close_gap=False)
    cache.append(some_ids(2)[0])
    assert cache.positions[0].tolist() == [7, 8]


def test_verify_accepts_a_chunk_that_was_computed_behind_a_gap() -> None:
    cache = make_cache()
    cache.append("intro \n")
    cache.splice(policy(), position=50)
    cache.recompute(slice(None))
    cache.append("status text\n", name="order")
    chunk = cache.extract("order")
    assert "gaps" in chunk.provenance.note  # so that its cells, which nobody can compute alone, count as stale
    cache.splice(chunk, name="again")
    assert cache.verify().ok


@pytest.mark.parametrize("method", ["suffix", "full", "hoist"])
def test_a_stronger_method_with_the_same_value_repairs_the_notes(method: Any) -> None:
    cache = make_context()
    cache.edit("status", "delivered", method="in_place")
    cache.edit("status", "delivered", method=method)
    assert not cache.ledger.stale


def test_generate_without_cache_does_not_feed_the_prompt_twice() -> None:
    cache = make_cache()
    cache.append("the customer asked\n")
    ids = cache.inputs("for the")["input_ids"]
    expected = generate(DynamicCache(), ids).sequences
    try:
        got = generate(cache, ids, use_cache=False).sequences
    except ValueError:
        return  # refused: fine
    assert torch.equal(got, expected)


def test_second_bos_in_the_middle_is_warned_about() -> None:
    cache = EditableCache(shared_model(), tokenizer=shared_tokenizer(add_bos=True))
    cache.append("You are a support agent.\n")
    with pytest.warns(ContextWarning):
        cache.insert("hello \n", 0)


def test_a_named_segment_does_not_swallow_the_next_prompt() -> None:
    cache = make_cache()
    cache.append("Documents: one two.\n", name="prefilled-docs")
    before = len(cache.segment("prefilled-docs"))
    go_on(cache, "the customer asked\n")
    assert len(cache.segment("prefilled-docs")) == before


def test_next_token_logits_of_a_fork_copies_nothing() -> None:
    cache = make_context()
    fork = cache.fork()
    fork.next_token_logits()
    assert fork.editable_layers[0]._store is cache.editable_layers[0]._store


# -- these pass


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 3}],
    ids=str,
)
def test_generate_after_an_edit_is_stock(options: dict[str, Any]) -> None:
    cache = make_context()
    cache.edit("status", "delivered", method="full")
    ids = cache.inputs("the customer asked for the refund. the customer")["input_ids"]
    expected = generate(DynamicCache(), ids, max_new_tokens=9, **options).sequences
    assert torch.equal(generate(cache, ids, max_new_tokens=9, **options).sequences, expected)
    rows = cache.unstack()
    assert all(row.verify().ok for row in rows)
    rows[0].edit("status", "pending", method="suffix")
    assert rows[0].verify().ok
    assert rows[0].field("status").value == "pending"


def test_stacked_rows_with_different_edits_generate_as_alone() -> None:
    caches = [make_context() for _ in range(3)]
    caches[0].edit("status", "delivered", method="in_place")
    caches[1].edit("status", "x y z w")
    caches[2].remove("system")
    stacked = EditableCache.stack(caches)
    together = go_on(stacked, "the order ")
    for row, (alone, back) in enumerate(zip(caches, stacked.unstack(), strict=True)):
        answer = go_on(alone, "the order ")
        assert torch.equal(together[row, -answer.shape[1] :], answer[0])
        assert torch.equal(back.token_ids, alone.token_ids)
        assert torch.equal(back.positions, alone.positions)
        assert back.unfed is not None
        assert alone.unfed is not None
        assert torch.equal(back.unfed, alone.unfed)


def test_checkpoints_across_batch_sizes() -> None:
    cache = make_context()
    cache.checkpoint("one")
    generate(cache, cache.inputs("hi")["input_ids"], num_beams=3)
    cache.checkpoint("three")
    for _ in range(2):
        cache.rollback("one")
        assert cache.ledger.batch == 1
        cache.edit("status", "pending in a long way")
        assert cache.verify().ok
        cache.rollback("three")
        assert cache.ledger.batch == 3
        cache.append("more")
        assert cache.verify().ok


def test_three_occurrences_with_new_lengths() -> None:
    cache = make_cache()
    cache.append("intro text\n")
    cache.append("a {f} b {f} c {f} d\n", fields={"f": "pending"})
    cache.append("tail text here\n")
    for value in ("x", "delivered order one two", "pending", "refund"):
        cache.refresh_field("f", value)
        assert text(cache) == f"intro text\na {value} b {value} c {value} d\ntail text here\n"
        mask = torch.zeros(len(cache.ledger), dtype=torch.bool)
        for start, stop in cache.field("f").spans:
            mask[start:stop] = True
        assert_cells(cache, oracles.cells(shared_model(), cache.token_ids, cache.positions, *held(cache), mask))
    cache.edit("f", "zz", method="full")
    assert_cells(cache, oracles.full(shared_model(), cache.token_ids))


def test_adjacent_fields_at_the_very_start_behind_bos() -> None:
    tokenizer = shared_tokenizer(add_bos=True)
    cache = EditableCache(shared_model(), tokenizer=tokenizer)
    cache.append("{a} {b} and\n", fields={"a": "pending", "b": "delivered"})
    cache.refresh_field("a", "b and\n x")  # holds the template's own next literal
    cache.refresh_field("b", "q")
    cache.edit("a", "order", method="full")
    assert cache.token_ids[0].tolist() == tokenizer("order q and\n")["input_ids"]
    assert_cells(cache, oracles.full(shared_model(), cache.token_ids))


def test_only_the_last_layer_of_scattered_tokens() -> None:
    cache = make_context()
    cache.refresh_field("status", "x y z")
    mask = torch.zeros((len(cache.layers), len(cache.ledger)), dtype=torch.bool)
    mask[-1, 20:40:3] = True
    oracle = oracles.cells(shared_model(), cache.token_ids, cache.positions, *held(cache), mask)
    cache.recompute(mask)
    assert_cells(cache, oracle)
    assert cache.verify().ok


def test_gaps_then_an_edit_of_another_length() -> None:
    cache = make_cache()
    cache.append("intro \n")
    cache.splice(policy(), position=50)
    cache.append("status: {s} now\n", fields={"s": "pending"})
    cache.append("tail text\n", name="tail")
    cache.reposition("tail", position=400)
    cache.edit("s", "delivered order x", method="in_place")
    assert cache.verify().ok
    cache.edit("s", "x", method="full")
    assert_cells(cache, oracles.full(shared_model(), cache.token_ids, cache.positions))


def test_two_caches_of_one_model_in_two_threads() -> None:
    base = make_context()
    expected = [go_on(base.fork(), text) for text in ("x", "the order")]
    found: dict[int, list[bool]] = {0: [], 1: []}

    def work(cache: EditableCache, index: int, content: str) -> None:
        for _ in range(3):
            fork = cache.fork()
            fork.edit("channel", "qq", method="in_place")
            fork.edit("channel", "web", method="in_place")
            found[index].append(torch.equal(go_on(cache.fork(), content), expected[index]))

    threads = [
        threading.Thread(target=work, args=(base.fork(), 0, "x")),
        threading.Thread(target=work, args=(make_context(), 1, "the order")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: [True] * 3, 1: [True] * 3}


def test_16_bit_copies_move_alike(tmp_path: Any) -> None:
    cache = make_context(dtype=torch.bfloat16)
    cache.remove((2, 5))
    cache.save_pretrained(tmp_path)
    assert cache.model is not None
    loaded = EditableCache.from_pretrained(tmp_path, model=cache.model, tokenizer=cache.tokenizer)
    copies = [loaded, copy.deepcopy(cache), EditableCache.stack([cache, cache.fork()]).unstack()[1]]
    for one in (cache, *copies):
        one.remove((1, 2))
        one.reposition((3, 9), to=12)
    for one in copies:
        assert all(torch.equal(a, b) for a, b in zip(held(one)[0], held(cache)[0], strict=True))


def test_long_unicode_names_saved_midway(tmp_path: Any) -> None:
    cache = make_cache()
    cache.append("intro\n", name="имя 🐍" * 50)
    cache.append("ü: {größe} ok\n", name="s", fields={"größe": "🐍 ñandú"})
    go_on(cache, "hi")
    cache.edit("größe", "日本")
    go_on(cache, "again ")
    cache.save_pretrained(tmp_path)
    loaded = EditableCache.from_pretrained(tmp_path, model=shared_model(), tokenizer=shared_tokenizer())
    assert cache.ledger.same(loaded.ledger)
    for one in (cache, loaded):
        one.edit("größe", "é é é")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one.consolidate()
    assert loaded.verify().ok
    assert torch.equal(go_on(cache, "q"), go_on(loaded, "q"))
