"""CELLS: chosen cells are computed from what precedes them now, all others keep their bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from editable_cache import EditableCache, Skill
from editable_cache.forward import run
from editable_cache.testing import oracles
from editable_cache.testing.contents import (
    family_cases,
    halves,
    must_differ,
    random_ids,
    same_bits,
    shared_model,
    states_in,
    states_of,
)
from editable_cache.testing.tiny_models import TINY_FAMILIES, tiny_tokenizer

CASES = pytest.mark.parametrize(("family", "attention"), family_cases(TINY_FAMILIES))


def spliced(model: PreTrainedModel) -> EditableCache:
    """Live, spliced, live, and a splice in the middle of it: 38 slots, some cells stale, some isolated."""
    cache = EditableCache(model)
    cache.append(random_ids(9, 1))
    cache.splice(Skill.precompile(model, None, random_ids(12, 2), name="a"), seam_tokens=0)
    cache.append(random_ids(10, 3))
    cache.splice(Skill.precompile(model, None, random_ids(7, 4), name="b"), at=14, seam_tokens=1)
    return cache


def refreshed(model: PreTrainedModel) -> EditableCache:
    """A field with a new value of another token count, its notes stale."""
    cache = EditableCache(model, tokenizer=tiny_tokenizer())
    cache.append("You are a support agent.\n")
    cache.append("order_status: {status} .\n", fields={"status": "pending"})
    cache.append("The agent may refund it.\n")
    cache.refresh_field("status", "delivered to 9")
    return cache


MAKERS = pytest.mark.parametrize("make", [spliced, refreshed])
Make = Callable[[PreTrainedModel], EditableCache]


def oracle(model: PreTrainedModel, cache: EditableCache, before: list[Tensor], mask: Tensor) -> oracles.OracleResult:
    return oracles.cells(model, cache.token_ids[0], cache.positions[0], *halves(before), mask)


def check_outside(cache: EditableCache, before: list[Tensor], mask: Tensor) -> None:
    for tensors in halves(states_of(cache)), halves(before):
        assert len(tensors) == 2
    for half in (0, 1):
        now, then = halves(states_of(cache))[half], halves(before)[half]
        for layer, (a, e) in enumerate(zip(now, then, strict=True)):
            outside = ~(mask if mask.dim() == 1 else mask[layer])
            assert torch.equal(a[..., outside, :], e[..., outside, :])


@CASES
@MAKERS
@pytest.mark.parametrize("by_layer", [False, True], ids=["tokens", "layers"])
def test_random_mask(family: str, attention: str, make: Make, by_layer: bool) -> None:
    model = shared_model(family, attention)
    cache = make(model)
    length, layers = len(cache.ledger), len(cache.layers)
    before, ids, positions = states_of(cache), cache.token_ids, cache.positions
    shape = (layers, length) if by_layer else (length,)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(length)) < 0.3
    expected = oracle(model, cache, before, mask)
    cache.recompute(mask)
    oracles.check(states_of(cache), states_in(expected))
    check_outside(cache, before, mask)
    must_differ(states_of(cache), before)
    assert torch.equal(cache.token_ids, ids)
    assert torch.equal(cache.positions, positions)
    wrong = mask.roll(1, 0)  # another layer, or another token
    must_differ(states_of(cache), states_in(oracle(model, cache, before, wrong)))
    after = states_of(cache)
    nothing = torch.zeros(length, dtype=torch.bool)
    oracles.check(cache.next_token_logits(), oracle(model, cache, after, nothing).logits[:, -1])
    assert same_bits(states_of(cache), after)


@CASES
@MAKERS
def test_nothing_and_everything(family: str, attention: str, make: Make) -> None:
    model = shared_model(family, attention)
    cache = make(model)
    before, ledger = states_of(cache), cache.ledger
    length, layers = len(ledger), len(cache.layers)
    for shape in ((length,), (layers, length)):
        outcome = cache.recompute(torch.zeros(shape, dtype=torch.bool))
        assert outcome.tokens_computed == 0
        assert same_bits(states_of(cache), before)
        assert cache.ledger.same(ledger)
    full = oracles.full(model, ledger.ids[0], ledger.positions[0])
    must_differ(before, states_in(full))
    fork = cache.fork()
    for shape, one in (((length,), cache), ((layers, length), fork)):
        one.recompute(torch.ones(shape, dtype=torch.bool))
        oracles.check(states_of(one), states_in(full))
        assert not one.ledger.stale
        assert not one.ledger.groups.any()
        assert one.verify().live_error <= 1e-4


@CASES
def test_refresh_is_the_fields_own_cells(family: str, attention: str) -> None:
    model = shared_model(family, attention)
    cache = EditableCache(model, tokenizer=tiny_tokenizer())
    cache.append("You are a support agent.\n")
    cache.append("order_status: {status} .\n", fields={"status": "1 2"})
    cache.append("The agent may refund it.\n")
    before = states_of(cache)
    start, stop = cache.field("status").spans[0]
    cache.refresh_field("status", "3 4")
    assert cache.field("status").spans == ((start, stop),)
    mask = torch.zeros(len(cache.ledger), dtype=torch.bool)
    mask[start:stop] = True
    oracles.check(states_of(cache), states_in(oracle(model, cache, before, mask)))
    check_outside(cache, before, mask)
    old_ids = oracles.cells(
        model,
        torch.tensor(
            tiny_tokenizer()("You are a support agent.\norder_status: 1 2 .\nThe agent may refund it.\n")["input_ids"]
        ),
        cache.positions[0],
        *halves(before),
        mask,
    )
    must_differ(states_of(cache), states_in(old_ids))


@CASES
@pytest.mark.parametrize("at", [0, 4, 17])
def test_insert_is_the_new_tokens_cells(family: str, attention: str, at: int) -> None:
    model = shared_model(family, attention)
    cache, old, new = EditableCache(model), random_ids(20, 1), random_ids(10, 2)
    cache.append(old)
    cache.insert(new, at)
    ids = torch.cat((old[:at], new, old[at:]))
    assert cache.token_ids[0].tolist() == ids.tolist()
    assert cache.positions[0].tolist() == list(range(30))
    head, tail = oracles.full(model, ids[: at + 10]), oracles.iso(model, old, torch.arange(20) + 10)
    oracles.check(states_of(cache, 0, at + 10), states_in(head))
    oracles.check(states_of(cache, at + 10), states_in(tail, at))
    must_differ(states_of(cache), states_in(oracles.full(model, ids)))


@CASES
@pytest.mark.parametrize("size", [1, 5])
def test_pieces_of_a_mask_are_the_whole(
    family: str, attention: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared_model(family, attention)
    whole, piecewise = spliced(model), spliced(model)
    mask = torch.rand(len(whole.layers), len(whole.ledger), generator=torch.Generator().manual_seed(1)) < 0.3
    whole.recompute(mask)
    monkeypatch.setattr(run, "SCATTER_TOKENS", size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "PROGRESS_FROM", 1000)
        piecewise.recompute(mask)
    oracles.check(states_of(piecewise), states_of(whole))
