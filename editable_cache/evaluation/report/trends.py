"""How a measure goes with the turns of a trajectory."""

from __future__ import annotations

from typing import Any

from editable_cache.evaluation.report.claim import Measure, Measured
from editable_cache.evaluation.report.measures import chosen, is_number
from editable_cache.evaluation.results import Results
from editable_cache.evaluation.studies.horizon import trend


def trend_of(value: str, part: str, **facts: Any) -> Measure:
    """Slope for each turn (``part`` = "slope"), or the last third's mean minus the first's ("change")."""

    def measure(results: Results) -> Measured | None:
        rows = chosen(results, {**facts, value: is_number, "turn": is_number, "domain": lambda name: name is not None})
        if not rows:
            return None
        found = trend(rows, value)
        return Measured(found[part], note=f"first third {found['first'].mean:.3f}, last {found['last'].mean:.3f}")

    return measure
