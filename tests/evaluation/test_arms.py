"""The arms on a random model: what must be exact is, what must not be is not, and what they say they computed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from cache_support import shared_model, shared_tokenizer

from editable_cache.errors import TaskError
from editable_cache.evaluation.arms import ERRATA, FRONTIER, Case, arm
from editable_cache.evaluation.asking import Asking
from editable_cache.evaluation.effects import patched_gaps, single_effects
from editable_cache.evaluation.metrics import cosine, divergence, p_correct, recovery
from editable_cache.evaluation.results import Run
from editable_cache.evaluation.studies.frontier import possible, run_frontier
from editable_cache.evaluation.tasks import Item, Section

ITEM = Item(
    key="one",
    task="gated",
    domain="shop",
    mode="direct",
    sections=(
        Section("session", "You are an agent.\nstatus: {status}\n"),
        Section("policy", "If status is pending, refund. If status is shipped, refuse.\nBe kind. Be brief.\n"),
    ),
    field="status",
    old="pending",
    new="shipped",
    question="What is the next call?",
    prefix=" call:",
    answers={"pending": " refund", "shipped": " escalate"},
    reasoning={"pending": "", "shipped": ""},
)


@cache
def case() -> Case:
    return Case.of(Asking(shared_model("llama"), shared_tokenizer(), ITEM))


def gap(name: str) -> float:
    found = case().asking.decide(arm(name)(case()).cache).gap
    assert found is not None
    return found


def ends() -> tuple[float, float]:
    found = case().ends()
    assert found.stale.gap is not None
    assert found.exact.gap is not None
    return found.stale.gap, found.exact.gap


def test_the_ends_are_apart() -> None:
    stale, exact = ends()
    assert abs(exact - stale) > 1e-2


@pytest.mark.parametrize("name", ["suffix", "full", "selective@999", "window@999", "random@999"])
def test_what_computes_everything_behind_the_field_is_exact(name: str) -> None:
    stale, exact = ends()
    assert (gap(name) - stale) / (exact - stale) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("name", ["in_place", "selective@2", "window@2", "cacheblend@15%", "erratum", "hoist"])
def test_what_leaves_notes_stale_or_says_it_elsewhere_is_not(name: str) -> None:
    _, exact = ends()
    assert gap(name) != pytest.approx(exact, abs=1e-4)


def test_nothing_done_is_stale_and_the_last_token_is_computed() -> None:
    stale, _ = ends()
    assert gap("stale") == stale
    fork = case().asked.fork()
    last = len(fork.ledger) - 1
    for layer in fork.editable_layers:
        layer.overwrite(torch.tensor([last]), {name: cells[..., -1:, :] * 7 for name, cells in layer.view().items()})
    assert case().asking.decide(fork).gap == pytest.approx(stale, abs=1e-5)


def test_an_appended_line_equals_a_prefill_of_the_text_with_it() -> None:
    """Nothing earlier was changed, so an erratum alone is exact for its own text; not so with the field refreshed."""
    asking = case().asking
    told = asking.held(ITEM.old)
    told.append(ERRATA["erratum"].format(name=ITEM.field, value=ITEM.new))
    plain = asking.decide(asking.ask(told)).gap
    assert plain is not None
    assert gap("erratum") == pytest.approx(plain, abs=1e-4)
    assert gap("field+erratum") != pytest.approx(plain, abs=1e-4)
    assert gap("erratum:bare") != pytest.approx(plain, abs=1e-4)


def test_doubled_braces_of_a_wording_are_single_in_the_cache() -> None:
    found = arm("erratum")(replace(case(), erratum="{{{name}}} is {value}.\n"))
    assert "{status} is shipped." in case().asking.tokenizer.decode(found.cache.token_ids[0])


def test_the_hoisted_prompt_equals_its_own_prefill() -> None:
    found = arm("hoist")(case())
    text = case().asking.tokenizer.decode(found.cache.token_ids[0])
    assert text.count("status: shipped\n") == 1
    assert text.index("status: shipped") > text.index("Be brief.")
    plain = type(found.cache)(case().asking.model)
    plain.append(found.cache.token_ids[0])
    assert torch.allclose(case().asking.read(plain), case().asking.read(found.cache), atol=1e-4)


def test_arms_say_what_they_computed() -> None:
    refreshed = case().refreshed()
    total, behind = len(case().exact.ledger), case().behind(refreshed)
    field = refreshed.ledger.field("status").spans[0]
    value = field[1] - field[0]
    expected = {
        "stale": 1,
        "in_place": value + 1,
        "window@3": value + 3 + 1,
        "suffix": 2 * value + (behind.stop - behind.start) + 1,  # the library computes the value twice
        "full": total,
    }
    assert {name: arm(name)(case()).tokens for name in expected} == expected
    asked = len(case().asking.question_ids)
    assert arm("erratum")(case()).tokens < arm("field+erratum")(case()).tokens
    assert arm("erratum")(case()).tokens > asked


def test_no_arm_changes_what_it_began_with() -> None:
    before = [{name: t.clone() for name, t in layer.view().items()} for layer in case().asked.editable_layers]
    for name in (*FRONTIER, "repair@4"):
        arm(name)(case())
    for layer, held in zip(case().asked.editable_layers, before, strict=True):
        assert all(torch.equal(held[name], t) for name, t in layer.view().items())


def test_patched_rows_equal_caches_that_are_patched_one_by_one() -> None:
    refreshed = case().refreshed()
    behind = case().behind(refreshed)
    effects = single_effects(case().asking, refreshed, case().exact, behind)
    slot = int(effects.abs().argmax()) + behind.start
    fork = refreshed.fork()
    for mine, theirs in zip(fork.editable_layers, case().exact.editable_layers, strict=True):
        mine.overwrite(torch.tensor([slot]), {name: t[..., slot : slot + 1, :] for name, t in theirs.view().items()})
    alone, base = case().asking.decide(fork).gap, case().asking.decide(refreshed).gap
    assert alone is not None
    assert base is not None
    assert float(effects.abs().max()) > 1e-3
    assert alone - base == pytest.approx(float(effects[slot - behind.start]), abs=1e-4)
    everything = torch.ones((1, len(refreshed.ledger)), dtype=torch.bool)
    assert float(patched_gaps(case().asking, refreshed, case().exact, everything)) == pytest.approx(ends()[1], abs=1e-4)
    nothing = torch.zeros((1, len(refreshed.ledger)), dtype=torch.bool)
    assert float(patched_gaps(case().asking, refreshed, case().exact, nothing)) == pytest.approx(base, abs=1e-4)


@pytest.mark.parametrize(
    "name", ["", "magic", "selective", "selective@", "selective@0", "erratum:rude", "window@x", "stale@3"]
)
def test_an_unknown_arm_is_named(name: str) -> None:
    with pytest.raises(TaskError, match="expected"):
        arm(name)


def test_answers_that_begin_alike_and_ranking_behind_a_chain_are_refused() -> None:
    alike: Any = replace(ITEM, answers={"pending": " refund now", "shipped": " refund later"})
    with pytest.raises(TaskError, match="different tokens"):
        Asking(shared_model("llama"), shared_tokenizer(), alike)
    chained = Case.of(Asking(shared_model("llama"), shared_tokenizer(), replace(ITEM, mode="cot")))
    with pytest.raises(TaskError, match="direct mode"):
        arm("selective@2")(chained)


def test_an_answer_without_a_token_is_refused() -> None:
    for said in ("", "   "):
        with pytest.raises(TaskError, match="at least one token that are not blank"):
            Asking(shared_model("llama"), shared_tokenizer(), replace(ITEM, answers={**ITEM.answers, "shipped": said}))


def test_a_line_that_only_names_the_field_in_braces_is_not_hoisted() -> None:
    told = replace(ITEM, sections=(Section("note", "Say {{status}}.\n"), *ITEM.sections))
    found = arm("hoist")(Case.of(Asking(shared_model("llama"), shared_tokenizer(), told)))
    text = found.cache.tokenizer.decode(found.cache.token_ids[0])
    assert text.index("{status}") < text.index("Be brief.") < text.index("status: shipped")


@pytest.mark.parametrize(
    "name",
    [
        "cacheblend@0%",
        "cacheblend@101%",
        "cacheblend@07%",
        "selective@08",
        "selective@\u0663",
        "window@0",
        "erratum:",
        "stale@",
    ],
)
def test_odd_counts_are_refused(name: str) -> None:
    with pytest.raises(TaskError, match="expected"):
        arm(name)


def test_measures() -> None:
    assert recovery(1.0, 0.0, 4.0) == 0.25
    assert recovery(1.0, 0.0, 0.5) is None
    assert p_correct(0.0) == 0.5
    assert p_correct(3.0) == pytest.approx(0.95257, abs=1e-5)
    logits = torch.tensor([0.0, 1.0, 2.0])
    assert cosine(logits, 3 * logits) == pytest.approx(1.0)
    assert divergence(logits, logits + 5) == pytest.approx(0.0, abs=1e-12)
    assert divergence(logits, -logits) > 0.5


def test_a_recurrent_state_leaves_out_the_arms_that_choose_tokens() -> None:
    hybrid = shared_model("falcon_h1")
    arms = ("stale", "in_place", "selective@1", "window@2", "cacheblend@15%", "suffix", "erratum", "full")
    assert possible(arms, [ITEM], shared_model("llama")) == [*arms]
    left = possible(arms, [ITEM], hybrid)
    assert left == ["stale", "suffix", "erratum", "full"]
    run = Run(None, study="frontier", model="hybrid", settings={})
    with pytest.raises(TaskError, match="in_place, selective@1, window@2, cacheblend@15%: expected a model"):
        run_frontier(hybrid, shared_tokenizer(), [ITEM], run, arms=arms, any_model=True)
    assert not run.results().rows
    run_frontier(hybrid, shared_tokenizer(), [ITEM], run, arms=left, any_model=True)
    gaps = {row["arm"]: row["gap"] for row in run.results().rows if row["arm"] in left}
    assert gaps["suffix"] == pytest.approx(gaps["full"], abs=1e-3)
    assert gaps["stale"] != pytest.approx(gaps["full"], abs=1e-3)
