"""FULL: operations that claim to be exact leave what a plain prefill of the same ids would."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from editable_cache import EditableCache, Plan, Skill
from editable_cache.forward import run
from editable_cache.testing import oracles
from editable_cache.testing.contents import (
    family_cases,
    must_differ,
    random_ids,
    shared_model,
    states_in,
    states_of,
)
from editable_cache.testing.tiny_models import TINY_FAMILIES, tiny_tokenizer

CASES = pytest.mark.parametrize(("family", "attention"), family_cases(TINY_FAMILIES))
TOKENIZER = tiny_tokenizer()
HEAD, LINE, TAIL = "You are a support agent.\n", "order_status: {status} .\n", "The agent may refund it.\n"


def check_full(cache: EditableCache, model: PreTrainedModel) -> float:
    """Cells and next logits of a plain prefill, at consecutive positions; nothing is stale."""
    ids = cache.token_ids[0]
    assert cache.positions[0].tolist() == list(range(len(ids)))
    expected = oracles.full(model, ids)
    error = oracles.check(states_of(cache), states_in(expected))
    oracles.check(cache.next_token_logits(), expected.logits[:, -1])
    other = ids.clone()
    other[1] = (other[1] + 1) % 300
    must_differ(states_of(cache), states_in(oracles.full(model, other)))
    must_differ(states_of(cache), states_in(oracles.full(model, ids, torch.arange(len(ids)) + 1)))
    assert not cache.ledger.stale
    verification = cache.verify()
    assert verification.ok
    assert verification.full_cosine > 0.99999
    return error


def with_field(model: PreTrainedModel, value: str = "pending") -> EditableCache:
    cache = EditableCache(model, tokenizer=TOKENIZER)
    cache.append(HEAD)
    cache.append(LINE, fields={"status": value})
    cache.append(TAIL)
    return cache


def text_with(value: str, *, hoisted: bool = False) -> list[int]:
    line = LINE.format(status=value)
    ids: list[int] = TOKENIZER(HEAD + TAIL + line if hoisted else HEAD + line + TAIL)["input_ids"]
    return ids


@CASES
@pytest.mark.parametrize("sizes", [[30], [1] * 12, [9, 1, 13, 2]], ids=str)
def test_append_in_pieces(family: str, attention: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared_model(family, attention)
    cache = EditableCache(model)
    for index, size in enumerate(sizes):
        cache.append(random_ids(size, index))
    check_full(cache, model)
    monkeypatch.setattr(run, "PREFILL_TOKENS", 7)
    monkeypatch.setattr(run, "PROGRESS_FROM", 1000)
    pieces = EditableCache(model)
    pieces.append(cache.token_ids[0])
    check_full(pieces, model)


@CASES
def test_recompute_everything(family: str, attention: str) -> None:
    model = shared_model(family, attention)
    cache = EditableCache(model)
    cache.append(random_ids(9, 1))
    cache.splice(Skill.precompile(model, None, random_ids(12, 2), name="a"))
    cache.append(random_ids(5, 3))
    cache.insert(random_ids(4, 4), 6)
    cache.reposition("a", to=2)
    cache.remove((20, 23))
    cache.recompute((1, len(cache.ledger) - 1))
    cache.recompute((0, len(cache.ledger)))
    check_full(cache, model)


@CASES
@pytest.mark.parametrize("value", ["1", "delivered to 9 or 10"])
@pytest.mark.parametrize("method", ["suffix", "full", "hoist"])
def test_exact_edits(family: str, attention: str, method: str, value: str) -> None:
    model = shared_model(family, attention)
    cache = with_field(model)
    cache.edit("status", value, method=method)  # type: ignore[arg-type]
    assert cache.token_ids[0].tolist() == text_with(value, hoisted=method == "hoist")
    check_full(cache, model)
    assert [cache.field("status").value, cache.field("status").current] == [value, value]
    span = cache.field("status").spans[0]
    assert TOKENIZER.decode(cache.token_ids[0, slice(*span)]).strip() == value


@CASES
def test_errata_fold_into_the_text(family: str, attention: str) -> None:
    model = shared_model(family, attention)
    cache = with_field(model)
    cache.erratum("status", "delivered")
    cache.append("\nThe customer asked.\n")
    cache.edit("status", "9 10")
    must_differ(states_of(cache), states_in(oracles.full(model, cache.token_ids[0])))
    cache.consolidate()
    ids = TOKENIZER(HEAD + LINE.format(status="9 10") + TAIL)["input_ids"]
    ids += TOKENIZER("\nThe customer asked.\n")["input_ids"]
    assert cache.token_ids[0].tolist() == ids
    assert not cache.field("status").errata
    check_full(cache, model)


@CASES
@pytest.mark.parametrize("method", ["suffix", "full", "hoist"])
def test_exact_edit_takes_errata_away(family: str, attention: str, method: str) -> None:
    model = shared_model(family, attention)
    cache = with_field(model)
    cache.erratum("status", "delivered")
    cache.append("\nThe customer asked.\n")
    cache.edit("status", "9 10", method=method)  # type: ignore[arg-type]
    assert not cache.field("status").errata
    assert "UPDATE" not in TOKENIZER.decode(cache.token_ids[0])
    check_full(cache, model)


@CASES
def test_sync(family: str, attention: str) -> None:
    model = shared_model(family, attention)
    cache, ids = EditableCache(model), random_ids(30, 1)
    cache.append(ids)
    new = torch.cat((ids[:12], random_ids(3, 2), ids[14:], random_ids(4, 3)))
    plan = cache.sync(new, dry_run=True)
    assert isinstance(plan, Plan)
    assert plan.count("keep") == 12
    assert cache.token_ids[0].tolist() == ids.tolist()
    outcome = cache.sync(new)
    assert not isinstance(outcome, Plan)
    assert outcome.tokens_computed == len(new) - 12
    assert cache.token_ids[0].tolist() == new.tolist()
    check_full(cache, model)
    cache.sync(new[:9])
    check_full(cache, model)
    cache.sync(new[:9])
    check_full(cache, model)
    cache.sync(new.flip(0), approximate=True)
    cache.sync(new, approximate=True)
    cache.recompute((0, len(new)))
    check_full(cache, model)


INEXACT: dict[str, Callable[[EditableCache], object]] = {
    "in_place": lambda cache: cache.edit("status", "delivered", method="in_place"),
    "field+erratum": lambda cache: cache.edit("status", "delivered"),
    "splice": lambda cache: cache.splice(Skill.precompile(cache.model, None, random_ids(9, 1), name="x")),
    "remove": lambda cache: cache.remove((6, 9)),
    "reposition": lambda cache: cache.reposition((6, 9), to=10),
}


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("name", INEXACT)
def test_control_inexact_operations_are_seen(family: str, name: str) -> None:
    model = shared_model(family)
    cache = EditableCache(model, tokenizer=TOKENIZER)
    cache.append(HEAD)
    cache.append("order_status: {status} .\n", fields={"status": "pending"}, name="line")
    cache.append(TAIL)
    INEXACT[name](cache)
    must_differ(states_of(cache), states_in(oracles.full(model, cache.token_ids[0])))
    assert cache.verify().ok  # every cell is what the ledger says, though not what a plain prefill has
