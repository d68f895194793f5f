"""The gatekeeper of the benchmarks decides as the committed results say: a real model, real edits, two items."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from editable_cache.evaluation.results import Results, Run, load
from editable_cache.evaluation.statistics import Interval, bootstrap
from editable_cache.evaluation.studies.frontier import run_frontier
from editable_cache.evaluation.tasks import build

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMMITTED = BENCHMARKS / "results" / "evidence" / "frontier-gatekeeper.json"
ARMS = {"near": ("stale", "in_place", "window@32", "suffix"), "wordings": ("erratum:erratum", "erratum:bare", "full")}
"""Arms by the set of the committed results that has them; both have the same items."""

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not COMMITTED.is_file(), reason="the gatekeeper's results are not in this copy"),
]


@pytest.fixture(scope="module")
def measured(smollm2: Any) -> Results:
    """Two items, now. ``smollm2`` skips where the base model can't be had."""
    sys.path.insert(0, str(BENCHMARKS))
    model, tokenizer = importlib.import_module("evidence.models").load("gatekeeper")
    sys.path.remove(str(BENCHMARKS))
    run = Run(None, study="frontier", model="gatekeeper", settings={})
    items = build("gated", per_domain=1, neutral=12)[4:6]
    for label, arms in ARMS.items():
        run_frontier(model, tokenizer, items, run, arms=arms, any_model=True, label=label)
    return run.results()


def of(results: Results, label: str, arm: str, measure: str) -> Interval:
    rows = [row for row in results.where(set=label, arm=arm) if row[measure] is not None]
    return bootstrap([float(row[measure]) for row in rows], [row["domain"] for row in rows])


def test_stale_gives_the_old_answer_and_full_the_new_one(measured: Results) -> None:
    assert of(measured, "near", "stale", "correct").mean == 0.0
    assert of(measured, "near", "in_place", "correct").mean == 0.0
    assert of(measured, "wordings", "full", "correct").mean == 1.0
    assert of(measured, "near", "suffix", "recovery").mean == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(("label", "arm"), [(label, arm) for label, arms in ARMS.items() for arm in arms])
def test_each_item_gives_what_the_results_say(measured: Results, label: str, arm: str) -> None:
    stated = {row["key"]: row for row in load(COMMITTED).where(set=label, arm=arm)}
    for row in measured.where(set=label, arm=arm):
        assert row["correct"] == stated[row["key"]]["correct"]
        assert row["gap"] == pytest.approx(stated[row["key"]]["gap"], abs=0.02)
        assert row["gap"] != pytest.approx(-stated[row["key"]]["gap"], abs=0.02)  # another answer would be seen
