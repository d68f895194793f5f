"""Field reports, class 6: recurrent and hybrid state."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from cache_support import assert_same_output, generate, refused
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from editable_cache import EditableCache, LedgerError, Skill, SpanError, UnsupportedModelError
from editable_cache.adapters import host
from editable_cache.testing import oracles, zoo

HYBRIDS = ["falcon_h1", "qwen3_next", "lfm2"]
FAMILIES = pytest.mark.parametrize("family", HYBRIDS)


@functools.cache
def model_of(family: str) -> PreTrainedModel:
    return zoo.build(family)


@functools.cache
def ids_of(family: str, count: int = 40, seed: int = 1) -> Tensor:
    return zoo.ids_for(model_of(family), count, seed)


def stock(family: str, ids: Tensor) -> tuple[Any, Tensor]:
    """A plain prefill: the cache, with every token kept, and the logits after the last token ``[1, vocab]``."""
    cache = host.full_cache(model_of(family).config)
    return cache, host.run(model_of(family), ids[None], cache)[:, -1]


def check_same(cache: EditableCache, expected: Any) -> None:
    """Keys, values and states of every layer are those of a stock cache."""
    for mine, theirs in zip(cache.layers, expected.layers, strict=True):
        for read in (host.token_tensors, host.state_tensors):
            found, wanted = read(mine), read(theirs)
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                oracles.check(found[name], tensor, what=name)


@FAMILIES
@pytest.mark.parametrize("count", [1, 2, 11])
def test_b34_several_tokens_on_a_filled_cache(family: str, count: int) -> None:
    """huggingface/transformers#46032, #46084, #46741: only the first of several new tokens reached the state."""
    ids = ids_of(family)[: 12 + count]
    cache = EditableCache(model_of(family))
    host.run(model_of(family), ids[None, :12], cache)
    logits = host.run(model_of(family), ids[None, 12:], cache)[:, -1]
    expected, wanted = stock(family, ids)
    oracles.check(logits, wanted)
    check_same(cache, expected)
    with pytest.raises(AssertionError):  # control: another last token shows
        check_same(cache, stock(family, torch.cat((ids[:-1], ids[:1])))[0])


@FAMILIES
def test_b35_a_prompt_that_shares_the_beginning(family: str) -> None:
    """ml-explore/mlx-lm#980, sgl-project/sglang#39830: KV of one pass beside the state of another."""
    ids = ids_of(family)
    cache = EditableCache(model_of(family))
    cache.append(ids[:9])
    other = torch.cat((ids[:7], ids[20:25]))
    outcome = cache.sync(other)
    assert outcome.tokens_computed == len(other), "from the nearest kept state on: the start"
    expected, wanted = stock(family, other)
    check_same(cache, expected)
    oracles.check(cache.next_token_logits(), wanted)
    with pytest.raises(AssertionError):
        check_same(cache, stock(family, ids[:12])[0])


@FAMILIES
def test_b35_an_edit_starts_from_the_nearest_kept_state(family: str) -> None:
    """vllm-project/vllm#47861: an edit computes everything behind the last kept state."""
    ids = ids_of(family)
    cache = EditableCache(model_of(family))
    for start in (0, 10, 20):
        cache.append(ids[start : start + 10])
    for edit, rest, first in (
        (lambda: cache.remove((22, 24)), torch.cat((ids[:22], ids[24:30])), 20),
        (lambda: cache.insert(ids[30:33], 12), torch.cat((ids[:12], ids[30:33], ids[12:22], ids[24:30])), 10),
        (lambda: cache.reposition((0, 2), to=3), None, 0),
    ):
        outcome = edit()
        assert any(f"slot {first} on" in note for note in outcome.notes), outcome.notes
        held = cache.token_ids[0]
        assert rest is None or torch.equal(held, rest)
        assert outcome.tokens_computed >= len(held) - first
        assert not cache.ledger.stale
        expected, wanted = stock(family, held)
        check_same(cache, expected)
        oracles.check(cache.next_token_logits(), wanted)


@FAMILIES
def test_b35_what_a_state_cannot_do_is_refused(family: str) -> None:
    """ml-explore/mlx-lm#980: it can't be concatenated, shifted or cut."""
    model, ids = model_of(family), ids_of(family)
    chunk = Skill.precompile(model, None, ids[10:30], name="chunk")
    cache = EditableCache(model)
    cache.append(ids[:10])
    cache.splice(chunk)
    for call, kind, builtin, word in (
        (lambda: cache.splice(chunk, at=3, name="b"), UnsupportedModelError, NotImplementedError, "insert"),
        (lambda: cache.extract((2, 5)), UnsupportedModelError, NotImplementedError, "recurrent state"),
        (lambda: cache.recompute((2, 5)), UnsupportedModelError, NotImplementedError, "slice(start, None)"),
        (lambda: cache.splice(chunk, name="b", seam_tokens=30), SpanError, ValueError, "head_tokens"),
        (lambda: Skill.precompile(model, None, ids[:5], name="x"), SpanError, ValueError, "Append"),
        (lambda: chunk.slice(0, 4), SpanError, ValueError, "as a whole"),
    ):
        with refused(cache, kind, builtin, word):
            call()
    plain = Skill.precompile(model_of("llama"), None, ids[10:30] % 100 + 5, name="x")
    with pytest.raises(Exception, match="another model"):
        cache.splice(plain)


@FAMILIES
def test_b35_keys_and_state_of_different_counts_are_noticed(family: str) -> None:
    """vllm-project/vllm#47861: a layer cropped by hand leaves the state behind."""
    cache = EditableCache(model_of(family))
    cache.append(ids_of(family)[:12])
    for holder in cache.editable_layers:
        holder.truncate(9)
    with pytest.raises(LedgerError, match="recurrent state of 12"):
        cache.append(ids_of(family)[:3])


@FAMILIES
def test_b37_rows_are_picked_from_every_tensor(family: str) -> None:
    """huggingface/transformers#46612, #46819: keys and values change rows, the state stays."""
    model, ids = model_of(family), torch.stack([ids_of(family, 12, seed) for seed in (1, 2, 3)])
    cache = EditableCache(model)
    host.run(model, ids, cache)
    cache.batch_select_indices(torch.tensor([2, 0]))
    for row, source in enumerate((2, 0)):
        expected, _ = stock(family, ids[source])
        for mine, theirs in zip(cache.layers, expected.layers, strict=True):
            for name, tensor in (host.token_tensors(theirs) | host.state_tensors(theirs)).items():
                found = (host.token_tensors(mine) | host.state_tensors(mine))[name]
                assert found.shape[0] == 2
                oracles.check(found[row : row + 1], tensor, what=name)
    logits = host.run(model, ids[[2, 0], :1], cache)[:, -1]
    for row, source in enumerate((2, 0)):
        oracles.check(logits[row : row + 1], stock(family, torch.cat((ids[source], ids[source, :1])))[1])


@FAMILIES
def test_b37_beams_from_a_filled_cache(family: str) -> None:
    """huggingface/transformers#46612: beams on a prefilled state model used a stale order."""
    model, ids = model_of(family), ids_of(family)[None, :12]
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 7}
    expected = generate(DynamicCache(config=model.config), ids, model=model, **options)
    cache = EditableCache(model)
    cache.append(ids[0, :11])
    assert_same_output(generate(cache, ids, model=model, **options), expected, 1e-4)


@FAMILIES
def test_b38_a_row_does_not_feel_its_neighbours_length(family: str) -> None:
    """Blaizzy/mlx-vlm#1946: pads must enter neither attention nor state; also with a chunk spliced into both rows."""
    model, ids = model_of(family), ids_of(family)
    chunk = Skill.precompile(model, None, ids[12:30], name="chunk")
    rows = [EditableCache(model), EditableCache(model)]
    rows[0].append(ids[:5])
    rows[1].append(ids[:12])
    batch = EditableCache.stack(rows)
    for one in (*rows, batch):
        one.append(ids[30:33])
        one.splice(chunk)
        one.append(ids[33:36])
    both = batch.next_token_logits()
    for row, alone in enumerate(rows):
        oracles.check(both[row : row + 1], alone.next_token_logits())
    with pytest.raises(AssertionError):
        oracles.check(both[:1], both[1:])


@FAMILIES
def test_going_back_never_changes_a_composed_chunk(family: str) -> None:
    """Computed again, a composed chunk would be another: going back into it is refused, behind it is exact."""
    model, ids = model_of(family), ids_of(family)
    cache = EditableCache(model)
    cache.append(ids[:10])
    cache.splice(Skill.precompile(model, None, ids[10:30], name="chunk", tail_tokens=0))
    with refused(cache, LedgerError, ValueError, "composed"):
        cache.next_token_logits()
    cache.append(ids[30:34])
    before = cache.next_token_logits()
    cache.append(ids[34:38])
    cache.crop(-4)
    oracles.check(cache.next_token_logits(), before)
    assert cache.token_ids.shape[1] == 34
