"""Rows in groups, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from editable_cache.evaluation.results import Row
from editable_cache.evaluation.statistics import Interval, bootstrap

Group = tuple[Any, ...]


def grouped(
    rows: Sequence[Row], by: Sequence[str], measures: Sequence[str], *, cluster: str = "domain"
) -> dict[Group, dict[str, Interval]]:
    """Mean and interval of each measure for each combination of ``by``, drawn by clusters.

    Rows that lack a measure, or have None, are left out of it; a measure that none has is left out.
    """
    groups: dict[Group, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in by), []).append(row)
    found: dict[Group, dict[str, Interval]] = {}
    for group, members in groups.items():
        found[group] = {}
        for measure in measures:
            held = [row for row in members if row.get(measure) is not None]
            if held:
                found[group][measure] = bootstrap([row[measure] for row in held], [row[cluster] for row in held])
    return found


def paired(
    rows: Sequence[Row], arm: str, first: Any, second: Any, measure: str, *, cluster: str = "domain"
) -> Interval | None:
    """Mean of ``measure`` under ``first`` less that under ``second``, item by item; None where no item has both.

    Args:
        arm: the entry of a row that tells the two apart.
        rows: at most one of each item under each of the two.
    """
    values: dict[Any, dict[str, float]] = {first: {}, second: {}}
    clusters: dict[str, Any] = {}
    for row in rows:
        if row.get(arm) in values and row.get(measure) is not None:
            values[row[arm]][row["key"]] = float(row[measure])
            clusters[row["key"]] = row[cluster]
    keys = [key for key in values[first] if key in values[second]]
    if not keys:
        return None
    return bootstrap([values[first][key] - values[second][key] for key in keys], [clusters[key] for key in keys])


def table(groups: dict[Group, dict[str, Interval]]) -> list[str]:
    """A line of text for each group."""
    lines = []
    for group, measures in groups.items():
        n = max((found.n for found in measures.values()), default=0)
        figures = "  ".join(f"{name} {found}" for name, found in measures.items())
        lines.append(f"  {' '.join(str(name) for name in group):32} n {n:4}  {figures}")
    return lines
