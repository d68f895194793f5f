"""The studies of weight edits: which requests are asked again, and how answers are counted."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # as a module has it

from evidence import commands, rome_facts, weights

from editable_cache.errors import ResultsError
from editable_cache.evaluation.tasks import Item, build

ITEMS = build("gated", per_domain=2, neutral=1)


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.key)
def test_unchanged_requests_differ_in_the_reference_number_only(item: Item) -> None:
    found = weights.unchanged(item, 8)
    texts = [each.context(each.old) + each.question for each in found]
    assert len({*texts, item.context(item.old) + item.question}) == 9
    for each in found:
        other = each.key.rsplit("/", 1)[1]
        reference = _reference(item, each)
        assert reference not in each.template() + "".join(each.answers.values())
        assert each.template().count(other) == item.template().count(reference) > 1
        assert each.template().replace(other, reference) == item.template()
        assert (each.field, each.old, each.new, each.question) == (item.field, item.old, item.new, item.question)


def _reference(item: Item, other: Item) -> str:
    words = set(item.template().replace('"', " ").split())
    kept = set(other.template().replace('"', " ").split())
    (reference,) = {word.strip(".,?!)") for word in words - kept}
    return reference


def live(old: str, before: str, after: str) -> Any:
    return SimpleNamespace(asking=SimpleNamespace(item=SimpleNamespace(old=old)), before=before, after=after)


def test_shares_count_what_changed() -> None:
    around = [live("a", "a", "b"), live("a", "a", "a"), live("a", "b", "b")]  # the last was wrong before
    battery = [live("x", "y", "y"), live("x", "x", "y"), live("x", "y", "x"), live("x", "x", "x")]
    found = weights.others(around, battery, lambda each: each.after)
    assert found == {"contamination": 0.5, "unchanged": 2, "collateral": 0.5, "battery": 4}
    assert weights.others(around[2:], battery, lambda each: each.after)["contamination"] is None


def test_the_layer_comes_from_the_validation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(commands, "RESULTS", tmp_path)
    with pytest.raises(ResultsError, match="rome_facts smollm2"):
        weights.traced_layer()
    run = commands.run_of("rome_facts", "smollm2", rome_facts.settings_of(rome_facts.Sizes()), quick=False)
    run.add("covariance", [{"kind": "covariance", "layer": 7}])
    assert weights.traced_layer() == 7
