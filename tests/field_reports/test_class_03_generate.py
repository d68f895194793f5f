"""Field reports, class 3: length, mask and positions around `generate`; and the traps of stock transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_support import (
    Snapshot,
    forward,
    generate,
    make_cache,
    make_context,
    policy,
    shared_model,
    some_ids,
)
from transformers import DynamicCache

from editable_cache import EditableCache, LedgerError
from editable_cache.testing import oracles


def filled(count: int = 8) -> EditableCache:
    cache = make_cache()
    cache.append(some_ids(12)[0, :count])
    return cache


@pytest.mark.parametrize("case", ["full_ids", "suffix_full_mask", "suffix_mask"])
def test_b14_forms_that_have_one_answer(case: str) -> None:
    """huggingface/transformers#47597: mask, cache and ids disagree and the code guesses."""
    ids, cache = some_ids(12), filled()
    expected = forward(DynamicCache(), ids)[:, 8:]
    given, mask = {
        "full_ids": (ids, torch.ones(1, 12)),
        "suffix_full_mask": (ids[:, 8:], torch.ones(1, 12)),
        "suffix_mask": (ids[:, 8:], torch.ones(1, 4)),
    }[case]
    logits = forward(cache, given, attention_mask=mask.long())
    oracles.check(logits[:, -4:], expected)
    assert torch.equal(cache.token_ids, ids)


@pytest.mark.parametrize("columns", [1, 5, 7, 10, 13])
def test_b14_a_stale_mask_is_refused(columns: int) -> None:
    """huggingface/transformers#47597: one new id and a mask of another length."""
    cache = filled()
    before = Snapshot(cache)
    if columns in (1,):
        forward(cache, some_ids(12)[:, 8:9], attention_mask=torch.ones(1, columns).long())  # plainly the new token's
        assert cache.token_ids.tolist() == some_ids(12)[:, :9].tolist()
        return
    with pytest.raises(LedgerError, match=f"{columns} columns; expected 9"):
        forward(cache, some_ids(12)[:, 8:9], attention_mask=torch.ones(1, columns).long())
    before.check(cache)


def test_b15_the_same_prompt_again() -> None:
    """huggingface/transformers#36151, #38727; QwenLM/Qwen3#819: the returned cache already holds the answer."""
    ids, cache = some_ids(12), make_cache()
    first = generate(cache, ids, max_new_tokens=8)
    assert cache.get_seq_length() == 19
    second = generate(cache, ids, max_new_tokens=8)
    assert torch.equal(first.sequences, second.sequences)
    oracles.check(torch.cat(second.logits), torch.cat(first.logits))
    assert cache.get_seq_length() == 19
    assert cache.verify().ok


@pytest.mark.parametrize("length", [1, 2, 12])
@pytest.mark.parametrize("left", [0, 1])
def test_b16_a_fully_covered_prompt(length: int, left: int) -> None:
    """vllm-project/vllm#11186, LMCache/LMCache#3322: stock doubles the prompt in silence."""
    ids = some_ids(13)[:, : length + left]
    expected = generate(DynamicCache(), ids)
    cache = make_cache()
    cache.append(ids[0, :length])
    out = generate(cache, ids)
    oracles.check(torch.cat(out.logits), torch.cat(expected.logits))
    assert torch.equal(out.sequences, expected.sequences)
    assert cache.get_seq_length() == length + left + 6 - 1
    assert torch.equal(cache.token_ids, out.sequences[:, :-1])
    # control: what stock transformers answers when its cache covers the prompt
    if length == 12 and not left:
        stock = DynamicCache()
        forward(stock, ids)
        with pytest.raises(AssertionError):
            oracles.check(torch.cat(generate(stock, ids).logits), torch.cat(expected.logits))


def test_b16_everything_came_from_chunks() -> None:
    """vllm-project/vllm#17999: the cache covers the prompt and no token was ever live."""
    cache = make_cache()
    cache.splice(policy(), seam_tokens=0)
    logits = cache.next_token_logits()
    oracles.check(logits, oracles.full(shared_model(), cache.token_ids).logits[:, -1])
    before = Snapshot(cache)
    inputs = cache.inputs()
    out = generate(cache, inputs["input_ids"])
    oracles.check(out.logits[0], logits)
    assert cache.get_seq_length() == len(before.ledger) + 5


@pytest.mark.parametrize("end", ["field", "segment", "erratum", "chunk"])
def test_a_full_hit_keeps_segments_and_fields(end: str) -> None:
    """The token that `generate` has to run again keeps its place: nothing that the user tracks is lost."""
    cache = make_context()
    if end == "field":
        cache.append("to {whom}", fields={"whom": "customer"})
    elif end == "erratum":
        cache.erratum("status", "delivered")
    elif end == "chunk":
        cache.splice(policy(), name="last")
    segments, fields, positions = cache.segments, cache.fields, cache.positions.clone()
    generate(cache, cache.token_ids.clone())
    assert cache.segments[: len(segments)] == segments
    assert cache.fields == fields
    assert torch.equal(cache.positions[:, : positions.shape[1]], positions)
    cache.edit("status", "delivered now")
    assert cache.verify().ok


def test_a_full_hit_behind_a_gap_keeps_the_position() -> None:
    """NVIDIA/kvpress#16 at the boundary of vllm-project/vllm#11186: storage is shorter than the positions."""
    cache = filled(12)
    cache.remove((8, 11), close_gap=False)
    fork = cache.fork()
    fork.recompute((8, 9))
    expected = fork.next_token_logits()
    out = generate(cache, cache.token_ids.clone())
    assert cache.positions[0].tolist() == [*range(8), 11, 12, 13, 14, 15, 16]
    oracles.check(out.logits[0], expected)


def test_b17_every_constructor_reports_what_it_holds(tmp_path: Any) -> None:
    """MemTensor/MemOS#2313, #2314: a layer built without its initialiser reports 0 and drops its contents."""
    model, ids = shared_model(), some_ids(3, seed=6)
    spliced = make_cache()
    spliced.splice(policy())
    base = make_context()
    base.save_pretrained(tmp_path)
    made = {
        "spliced": spliced,
        "loaded": EditableCache.from_pretrained(tmp_path, model=model),
        "fork": base.fork(),
        "unstacked": EditableCache.stack([base, base]).unstack()[1],
        "stacked": EditableCache.stack([base]),
    }
    for name, cache in made.items():
        held = len(cache.ledger)
        assert held > 5, name
        for layer in cache.layers:
            assert layer.get_seq_length() == held == layer.keys.shape[-2], name
            assert layer.get_mask_sizes(3) == (held + 3, 0), name
        reference = made["spliced"] if name == "spliced" else base
        expected = forward(reference.fork(), ids)
        oracles.check(forward(cache, ids), expected)
        assert cache.get_seq_length() == held + 3, name


def test_b19_scattered_positions_are_not_packed_sequences() -> None:
    """huggingface/transformers#39194, #44911: packing inferred from `position_ids`."""
    ids = some_ids(20)[0]
    outcomes = []
    for attention in ("eager", "sdpa"):
        model = shared_model("llama", attn_implementation=attention)
        cache = EditableCache(model)
        cache.append(ids)
        cache.reposition((6, 12), position=50)
        cache.recompute([(2, 3), (9, 10), (17, 18)])
        positions = cache.positions
        assert positions[0, 5:7].tolist() == [5, 50]
        mask = torch.zeros(20, dtype=torch.bool)
        mask[[2, 9, 17]] = True
        keys = [layer.view()["keys"] for layer in cache.editable_layers]
        values = [layer.view()["values"] for layer in cache.editable_layers]
        expected = oracles.cells(model, ids, positions, keys, values, mask)
        oracles.check(keys, expected.keys)
        oracles.check(values, expected.values)
        outcomes.append(keys)
    oracles.check(outcomes[0], outcomes[1])


def test_trap_a_cache_longer_than_the_prompt() -> None:
    """Field reports section 0: stock slices with a negative length and feeds ids[3:] on top."""
    ids = some_ids(15)
    cache = make_cache()
    cache.append(ids[0])
    out = generate(cache, ids[:, :12])
    expected = generate(DynamicCache(), ids[:, :12])
    oracles.check(torch.cat(out.logits), torch.cat(expected.logits))
    assert torch.equal(cache.token_ids, out.sequences[:, :-1])


def test_trap_other_tokens_of_the_same_length() -> None:
    """Field reports section 0: stock never compares ids."""
    cache, other = filled(), some_ids(12).clone()
    other[0, 5] += 1
    before = Snapshot(cache)
    with pytest.raises(LedgerError, match=r"slot 5 of row 0.*cache\.sync"):
        generate(cache, other)
    before.check(cache)
    cache.sync(other[0, :8])
    assert torch.equal(generate(cache, other).sequences, generate(DynamicCache(), other).sequences)


def test_trap_layers_assigned_by_hand() -> None:
    """Field reports section 0: stock reports length 0 and drops them at the next forward."""
    ids, stock, cache = some_ids(12), DynamicCache(), make_cache()
    forward(stock, ids[:, :8])
    for mine, theirs in zip(cache.layers, stock.layers, strict=True):
        mine.keys, mine.values = theirs.keys, theirs.values
    assert cache.get_seq_length() == 8
    kept = [layer.keys.clone() for layer in stock.layers]
    oracles.check(forward(cache, ids[:, 8:]), forward(DynamicCache(), ids)[:, 8:])
    for layer, old in zip(stock.layers, kept, strict=True):
        assert torch.equal(layer.keys, old)  # the caller's tensors are never written
    assert cache.token_ids[0, :8].tolist() == [-1] * 8
    with pytest.raises(LedgerError, match="unknown"):
        cache.verify()


def test_trap_layers_that_disagree() -> None:
    cache = filled()
    cache.layers[1].crop(-2)
    with pytest.raises(LedgerError, match=r"\[6, 8\]"):
        forward(cache, some_ids(2))


def test_trap_positions_with_a_gap() -> None:
    """Field reports section 0: a gap in `position_ids` is not a border between packed sequences."""
    model, ids = shared_model(), some_ids(12)
    positions = torch.tensor([[*range(6), *range(50, 56)]])
    cache = make_cache()
    logits = forward(cache, ids, position_ids=positions, attention_mask=torch.ones_like(ids))
    oracles.check(logits, oracles.full(model, ids, positions).logits)
    assert torch.equal(cache.positions, positions)
    again = forward(cache, ids[:, :2])
    assert cache.positions[0, -2:].tolist() == [56, 57]
    oracles.check(again, oracles.full(model, cache.token_ids, cache.positions).logits[:, -2:])


def test_trap_bool_masks_under_eager() -> None:
    """Field reports, rank 7: eager attention adds whatever mask it is given, so a bool one is silently wrong."""
    model = shared_model("llama", attn_implementation="eager")
    cache = EditableCache(model)
    cache.append(some_ids(12)[0])
    before = Snapshot(cache)
    cache.recompute((3, 9))
    oracles.check([layer.view()["keys"] for layer in cache.editable_layers], [kept["keys"] for kept in before.layers])
