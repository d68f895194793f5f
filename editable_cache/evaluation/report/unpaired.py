"""Measures over items of different kinds, where nothing can be paired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from editable_cache.evaluation.report.claim import Measure, Measured
from editable_cache.evaluation.report.measures import chosen, cluster_of, is_number
from editable_cache.evaluation.results import Results, Row
from editable_cache.evaluation.statistics import RESAMPLES, Interval

Facts = Mapping[str, Any]


def lost_share(value: str, part: Facts, whole: Facts, **facts: Any) -> Measure:
    """Mean of an entry over ``part`` divided by its mean over ``whole``, both over the same drawn clusters."""

    def measure(results: Results) -> Measured | None:
        found = _ratios(results, value, part, whole, facts, seed=0)
        return None if found is None else Measured(_interval(*found))

    return measure


def more_lost(value: str, part: Facts, whole: Facts, first: Facts, second: Facts) -> Measure:
    """``lost_share`` of the items ``first`` minus that of the items ``second``, drawn independently."""

    def measure(results: Results) -> Measured | None:
        sides = [_ratios(results, value, part, whole, facts, seed) for seed, facts in enumerate((first, second))]
        if sides[0] is None or sides[1] is None:
            return None
        (a, a_draws, a_n, a_clusters), (b, b_draws, b_n, b_clusters) = sides[0], sides[1]
        note = f"{a:.2f} against {b:.2f}"
        return Measured(_interval(a - b, a_draws - b_draws, a_n + b_n, a_clusters + b_clusters), note=note)

    return measure


Ratio = tuple[float, NDArray[np.float64], int, int]
"""The ratio, its resamples, items, clusters."""


def _ratios(results: Results, value: str, part: Facts, whole: Facts, facts: Facts, seed: int) -> Ratio | None:
    sides = [chosen(results, {**facts, **wanted, value: is_number}) for wanted in (part, whole)]
    names = list(dict.fromkeys(cluster_of(row) for row in sides[0]))
    if not names or not sides[1]:
        return None
    sums = [_sums(rows, value, names) for rows in sides]
    drawn = np.random.default_rng(seed).integers(len(names), size=(RESAMPLES, len(names)))
    (upper, upper_n), (lower, lower_n) = sums

    def ratio(some: NDArray[np.int64]) -> NDArray[np.float64]:
        top = upper[some].sum(-1) / upper_n[some].sum(-1).clip(1)
        bottom = lower[some].sum(-1) / lower_n[some].sum(-1).clip(1)
        return np.asarray(top / np.where(bottom == 0, np.nan, bottom))

    draws = ratio(drawn)
    point = float(ratio(np.arange(len(names))[None])[0])
    if not np.isfinite(point) or not np.isfinite(draws).all():
        return None
    return point, draws, len(sides[0]), len(names)


def _sums(rows: Sequence[Row], value: str, names: Sequence[str]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    places = {name: place for place, name in enumerate(names)}
    sums, counts = np.zeros(len(names)), np.zeros(len(names))
    for row in rows:
        place = places.get(cluster_of(row))
        if place is not None:
            sums[place] += float(row[value])
            counts[place] += 1
    return sums, counts


def _interval(point: float, draws: NDArray[np.float64], n: int, clusters: int) -> Interval:
    low, high = np.quantile(draws, [0.025, 0.975])
    return Interval(point, float(low), float(high), n, clusters)
