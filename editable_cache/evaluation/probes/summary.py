"""Rows of all items, arm by arm, with intervals over domains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from editable_cache.evaluation.results import Row
from editable_cache.evaluation.statistics import Interval, bootstrap

UNSUMMED = ("cell",)
"""Measures that only pictures show."""

YES_OR_NO = ("follows", "flips", "decodable")
"""Measures whose values are answers: if all are the same, that is no certainty."""


@dataclass(frozen=True)
class Line:
    """One measure of one arm.

    Attributes:
        probe, task, pair, measure, arm: as in the rows.
        x: the count or layer, or None.
        interval: mean over items, bounds from drawing domains again.
    """

    probe: str
    task: str
    pair: str
    measure: str
    arm: str
    x: float | None
    interval: Interval

    def facts(self) -> dict[str, object]:
        """As JSON."""
        found = self.interval
        numbers = {name: round(value, 5) for name, value in
                   (("mean", found.mean), ("low", found.low), ("high", found.high))}  # fmt: skip
        names = {"probe": self.probe, "task": self.task, "pair": self.pair, "measure": self.measure, "arm": self.arm}
        return {**names, "x": self.x, **numbers, "n": found.n, "clusters": found.clusters}


def lines(rows: Sequence[Row], *, unsummed: Sequence[str] = UNSUMMED) -> list[Line]:
    """Every measure of every arm, in the order in which they were first measured."""
    groups: dict[tuple[str, str, str, str, str, float | None], list[Row]] = {}
    for row in rows:
        if "value" in row and row["measure"] not in unsummed:
            key = (row["probe"], row["task"], row["pair"], row["measure"], row["arm"], row.get("x"))
            groups.setdefault(key, []).append(row)
    return [
        Line(
            *key, bootstrap([row["value"] for row in found], [row["domain"] for row in found], counted=_counted(key[3]))
        )
        for key, found in groups.items()
    ]


def _counted(measure: str) -> bool:
    return measure in YES_OR_NO


@dataclass(frozen=True)
class Series:
    """All lines of one arm that differ in ``x``."""

    probe: str
    task: str
    pair: str
    measure: str
    arm: str
    points: tuple[Line, ...]


def series(found: Sequence[Line]) -> list[Series]:
    """Lines put together by arm, ``x`` ascending."""
    groups: dict[tuple[str, str, str, str, str], list[Line]] = {}
    for line in found:
        groups.setdefault((line.probe, line.task, line.pair, line.measure, line.arm), []).append(line)
    return [
        Series(*key, tuple(sorted(points, key=lambda line: -1 if line.x is None else line.x)))
        for key, points in groups.items()
    ]
