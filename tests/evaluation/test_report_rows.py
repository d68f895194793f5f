"""Claims ask for rows that the studies really write: on a tiny random model every condition is measured."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from probe_items import items

from editable_cache.evaluation.arms import FRONTIER
from editable_cache.evaluation.probes.registry import PROBES
from editable_cache.evaluation.probes.study import OTHER_TASKS, run_probes
from editable_cache.evaluation.report import CLAIMS
from editable_cache.evaluation.report.claim import AcrossModels
from editable_cache.evaluation.results import Results, Run
from editable_cache.evaluation.studies import compose, diagonal, horizon
from editable_cache.evaluation.studies.frontier import run_frontier
from editable_cache.evaluation.tasks import Item
from editable_cache.testing.tiny_models import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]

WORDED = [f"erratum:{wording}" for wording in ("bare", "tagged", "erratum", "confrontational")]
WINDOWED = [f"{kind}@64" for kind in ("window", "selective", "repair")]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return tiny_model("llama").eval()


def long(task: str, count: int) -> list[Item]:
    """Items with a policy of some length, so that there are 64 tokens behind the field."""
    filler = "".join(f"R{number}. Be kind and brief in all that you write.\n" for number in range(6))
    found = []
    for item in items(task, count):
        sections = tuple(
            replace(section, text=section.text + filler) if section.name == "policy" else section
            for section in item.sections
        )
        found.append(replace(item, sections=sections))
    return found


def unmeasured(study: str, found: Results, *, but: tuple[str, ...] = ()) -> list[str]:
    """Conditions that the rows do not answer; across models, the same rows stand for two models."""
    missing = []
    for claim in CLAIMS:
        for condition in claim.conditions:
            if condition.study != study or claim.id in but:
                continue
            twins = [found, replace(found, model="small-hybrid")]
            if condition.measure(twins if isinstance(condition, AcrossModels) else found) is None:
                missing.append(f"{claim.id}: {condition.what}")
    return missing


def test_frontier_rows_are_found(model: Any) -> None:
    run, tokenizer = Run(None, study="frontier", model="tiny", settings={}), tiny_tokenizer()
    plan = {"direct": (FRONTIER, "direct"), "wordings": ([*WORDED, "full"], "direct"), "near": (WINDOWED, "direct"),
            "far": (WINDOWED, "direct"), "cot": (["in_place", "erratum", "full"], "cot")}  # fmt: skip
    for label, (arms, mode) in plan.items():
        some = [replace(item, mode=mode, key=f"{item.key}/{mode}") for item in long("gated", 2)]
        run_frontier(model, tokenizer, some, run, arms=arms, any_model=True, label=label)
    found = told_apart(run.results(), "recovery")
    assert unmeasured("frontier", found) == []
    assert "cacheblend-fails: cacheblend@15%, right" in unmeasured("frontier", without(found, "cacheblend@15%"))


def told_apart(found: Results, *entries: str) -> Results:
    """As if the random model's two ends were far enough apart: these entries, where rows have them, are numbers."""
    assert any(entry in row for row in found.rows for entry in entries)
    rows = tuple({**row, **{entry: 0.5 for entry in entries if entry in row}} for row in found.rows)
    return replace(found, rows=rows)


def without(found: Results, arm: str) -> Results:
    return replace(found, rows=tuple(row for row in found.rows if row.get("arm") != arm))


def test_probe_rows_are_found(model: Any) -> None:
    run = Run(None, study="mechanism", model="tiny", settings={})
    given, probes = [*long("gated", 4), *items("trigger", 4)], tuple(PROBES.values())
    run_probes(model, tiny_tokenizer(), given, run, probes=probes, model_name="tiny", any_model=True, progress=False)
    rows = run.results().rows
    side = [{**row, "task": task} for task in OTHER_TASKS for row in rows if row["probe"] == "locality"]
    whole = replace(run.results(), rows=(*rows, *side))
    assert unmeasured("mechanism", whole, but=("linearly-decodable-across-meanings",)) == []
    assert unmeasured("mechanism", without(run.results(), "field_only"))


def test_composing_rows_are_found(model: Any) -> None:
    run, tokenizer = Run(None, study="composing", model="tiny", settings={}), tiny_tokenizer()
    some = items("gated", 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compose.run_contents(model, tokenizer, some[:2], run, sweep=("rule",))
        compose.run_contents(model, tokenizer, items("tool_call", 1), run, contents=("rule",), points=("ahead",))
        compose.run_contents(model, tokenizer, items("lookup", 1), run, contents=("fact",), points=("middle",))
        chained = [replace(some[0], mode="cot", key="cot")]
        compose.run_contents(model, tokenizer, chained, run, contents=("rule",), points=("ahead",))
        compose.run_counts(model, tokenizer, some, run)
        compose.run_split(model, tokenizer, items("cross_reference", 2), run)
    assert unmeasured("composing", run.results(), but=("sliding-windows",)) == []


def test_rows_of_diagonal_and_horizon_are_found(model: Any) -> None:
    inside = Run(None, study="diagonal", model="tiny", settings={})
    turns = Run(None, study="horizon", model="tiny", settings={})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        diagonal.run_diagonal(model, tiny_tokenizer(), long("gated", 3), inside)
        horizon.run_horizon(model, tiny_tokenizer(), items("gated", 1), turns, turns=4)
    assert unmeasured("diagonal", told_apart(inside.results(), "difference", "composed_recovery")) == []
    assert unmeasured("horizon", turns.results()) == []
