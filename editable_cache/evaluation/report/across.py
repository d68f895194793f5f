"""Measures that compare models with each other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from editable_cache.evaluation.report.claim import Measured, MeasureOfAll
from editable_cache.evaluation.report.measures import chosen, cluster_of, interval, is_number
from editable_cache.evaluation.results import Results
from editable_cache.evaluation.statistics import RESAMPLES, Interval


def spread_between(value: str, **facts: Any) -> MeasureOfAll:
    """Largest minus smallest mean of an entry over models.

    The bounds are those of the two models' intervals, least favourable together.
    """

    def measure(results: Sequence[Results]) -> Measured | None:
        found = [(each.model, interval(chosen(each, facts), value)) for each in results]
        return _apart([(model, given) for model, given in found if given is not None])

    return measure


def lead_of(value: str, ahead: Callable[[str], bool], behind: Callable[[str], bool], **facts: Any) -> MeasureOfAll:
    """Mean of an entry over the rows of models whose name ``ahead`` takes, minus that of those that ``behind`` takes.

    Bounds are least favourable together.
    """

    def measure(results: Sequence[Results]) -> Measured | None:
        sides = []
        for takes in (ahead, behind):
            named = [each for each in results if takes(each.model)]
            rows = [
                {**row, "domain": f"{each.model} {cluster_of(row)}"} for each in named for row in chosen(each, facts)
            ]
            sides.append(interval(rows, value))
        first, second = sides
        if first is None or second is None:
            return None
        apart = (first.mean - second.mean, first.low - second.high, first.high - second.low)
        return Measured(Interval(*apart, first.n + second.n, first.clusters + second.clusters))

    return measure


def _apart(found: Sequence[tuple[str, Interval]]) -> Measured | None:
    if len(found) < 2:
        return None
    (low_model, lowest), *_, (high_model, highest) = sorted(found, key=lambda pair: pair[1].mean)
    spread = Interval(
        highest.mean - lowest.mean,
        highest.low - lowest.high,
        highest.high - lowest.low,
        sum(each.n for _, each in found),
        len(found),
    )
    return Measured(spread, note=f"{high_model} against {low_model}")


def fewest_tokens(level: float, kind: str, **facts: Any) -> Callable[[Results], Interval | None]:
    """The smallest K at which arm ``kind@K`` is right in ``level`` of the items, drawn by clusters.

    Where none of the measured K is enough, it counts as twice the largest.
    """

    def measure(results: Results) -> Interval | None:
        wanted = {"arm": lambda name: re.fullmatch(rf"{re.escape(kind)}@\d+", str(name)), "correct": is_number}
        rows = chosen(results, {**facts, **wanted})
        counts = sorted({int(row["arm"].partition("@")[2]) for row in rows})
        if not counts:
            return None
        clusters = list(dict.fromkeys(cluster_of(row) for row in rows))
        right = np.zeros((len(clusters), len(counts)))
        items = np.zeros_like(right)
        for row in rows:
            place = clusters.index(cluster_of(row)), counts.index(int(row["arm"].partition("@")[2]))
            right[place] += bool(row["correct"])
            items[place] += 1
        drawn = np.random.default_rng(0).integers(len(clusters), size=(RESAMPLES, len(clusters)))
        every = np.arange(len(clusters))[None]
        draws, point = (
            _first(counts, right[some].sum(1) / items[some].sum(1).clip(1), level) for some in (drawn, every)
        )
        low, high = np.quantile(draws, [0.025, 0.975], method="nearest")
        return Interval(float(point[0]), float(low), float(high), len(rows) // len(counts), len(clusters))

    return measure


def _first(counts: Sequence[int], shares: NDArray[np.float64], level: float) -> NDArray[np.float64]:
    """For each row of shares ``[rows, counts]`` the first count whose share is enough."""
    enough = shares >= level
    places = np.where(enough.any(1), enough.argmax(1), len(counts))
    return np.asarray([*counts, 2 * counts[-1]], dtype=np.float64)[places]


def octaves_between(measure: Callable[[Results], Interval | None]) -> MeasureOfAll:
    """How many doublings lie between the largest and the smallest of the models' values."""

    def of_all(results: Sequence[Results]) -> Measured | None:
        found = []
        for each in results:
            given = measure(each)
            if given is not None:
                mean, low, high = (math.log2(bound) for bound in (given.mean, given.low, given.high))
                found.append((each.model, Interval(mean, low, high, given.n, given.clusters)))
        return _apart(found)

    return of_all
