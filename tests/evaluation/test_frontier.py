"""The frontier's rows are those that were asked for, also when a run goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cache_support import shared_model, shared_tokenizer

from editable_cache.errors import ResultsError, TaskError
from editable_cache.evaluation.results import Run
from editable_cache.evaluation.studies.frontier import run_frontier
from editable_cache.evaluation.tasks import Item, build


@pytest.fixture
def items() -> list[Item]:
    found = build("gated", per_domain=1, neutral=0)[:2]
    return [replace(item, answers={item.old: " refund", item.new: " escalate"}) for item in found]


def measured(run: Run, items: list[Item], **options: Any) -> None:
    run_frontier(shared_model("llama"), shared_tokenizer(), items, run, any_model=True, **options)


def run_at(path: Path | None) -> Run:
    return Run(path, study="frontier", model="tiny", settings={})


def test_kept_items_must_have_the_arms_that_are_asked_for(items: list[Item], tmp_path: Path) -> None:
    path = tmp_path / "edits.json"
    measured(run_at(path), items[:1], arms=["stale", "full"])
    with pytest.raises(ResultsError, match="with the arms stale, full, expected full; write to another file"):
        measured(run_at(path), items, arms=["full"])
    again = run_at(path)
    measured(again, items, arms=["full", "stale"])
    assert [row["arm"] for row in again.results().rows if row["arm"] != "gate"] == ["stale", "full", "full", "stale"]


@pytest.mark.parametrize("arms", [[], ["stale", "full", "stale"]])
def test_no_arm_and_an_arm_twice_are_refused(items: list[Item], arms: list[str]) -> None:
    with pytest.raises(TaskError, match="expected at least one, and each once"):
        measured(run_at(None), items, arms=arms)


def test_an_item_twice_is_refused(items: list[Item]) -> None:
    with pytest.raises(TaskError, match="keys differ"):
        measured(run_at(None), [items[0], items[1], items[0]], arms=["stale"])
