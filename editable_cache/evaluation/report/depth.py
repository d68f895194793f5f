"""Measures along layers: where a note is written, where it is read, and which layer does most."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from editable_cache.evaluation.report.claim import Measure, Measured
from editable_cache.evaluation.report.measures import apart, chosen, cluster_of, interval, is_number, pairs
from editable_cache.evaluation.results import Results
from editable_cache.evaluation.statistics import RESAMPLES, Interval, bootstrap

DECODABLE = 0.9
"""Accuracy on held-out domains from which on a layer holds the conclusion."""


def at_depth(share: float, **facts: Any) -> Measure:
    """Mean of ``value`` at the layer that lies at this share of the depth."""

    def measure(results: Results) -> Measured | None:
        rows = chosen(results, {**facts, "x": is_number})
        layers = [int(row["x"]) for row in rows]
        if not layers:
            return None
        layer = math.ceil(share * (max(layers) + 1))
        found = interval([row for row in rows if row.get("x") == layer], "value")
        return None if found is None else Measured(found, note=f"layer {layer} of {max(layers) + 1}")

    return measure


def best_over(entry: str, first: str, second: str, **facts: Any) -> Measure:
    """Mean of ``value`` of arm ``first`` minus that of ``second`` where the mean of ``first`` is largest."""

    def measure(results: Results) -> Measured | None:
        rows = chosen(results, {**facts, "arm": first, entry: is_number, "value": is_number})
        places = sorted({row[entry] for row in rows})
        means = {place: np.mean([row["value"] for row in rows if row.get(entry) == place]) for place in places}
        if not means:
            return None
        best = max(means, key=lambda place: float(means[place]))
        both = pairs(results, "value", {**facts, "arm": first, entry: best}, {**facts, "arm": second, entry: best})
        if not both:
            return None
        note = f"{entry} = {best:g}: {means[best]:.3f} against {np.mean([b['value'] for _, b in both]):.3f}"
        return Measured(apart(both, "value"), note=note)

    return measure


def best_accuracy(label: str) -> Measure:
    """Accuracy of the linear probe for a label at the token and layer where it is best, in held-out domains."""

    def measure(results: Results) -> Measured | None:
        found = _accuracies(results, label)
        if found is None:
            return None
        *_, tables = found
        means = {arm: table.mean(0) for arm, table in tables.items()}
        arm = max(means, key=lambda name: float(means[name].max()))
        layer = int(means[arm].argmax())
        values = tables[arm][:, layer]
        return Measured(bootstrap(values.tolist()), note=f"{arm}, layer {layer} of {tables[arm].shape[1] - 1}")

    return measure


def written_before_read(label: str) -> Measure:
    """Depth at which the last token turns to its answer, minus that from which on a probe tells the conclusion at some
    token; drawn by domains. A conclusion that no layer tells counts as written at the end.
    """

    def measure(results: Results) -> Measured | None:
        found = _accuracies(results, label)
        lens = chosen(
            results,
            {"probe": "timing", "arm": "decision_by_lens_in_all_states", "measure": "depth", "value": is_number},
        )
        if found is None or not lens:
            return None
        task, domains, tables = found
        lens = [row for row in lens if row.get("task") == task]
        read = np.asarray([np.mean([r["value"] for r in lens if cluster_of(r) == d] or [np.nan]) for d in domains])
        every = np.arange(len(domains))
        drawn = np.random.default_rng(0).integers(len(domains), size=(RESAMPLES, len(domains)))
        point = float(np.nanmean(read)) - _written(tables, every)
        draws = [float(np.nanmean(read[some])) - _written(tables, some) for some in drawn[:2000]]
        low, high = np.quantile(draws, [0.025, 0.975])
        note = f"written {_written(tables, every):.2f}, read {np.nanmean(read):.2f}"
        return Measured(Interval(point, float(low), float(high), len(lens), len(domains)), note=note)

    return measure


def _written(tables: dict[str, NDArray[np.float64]], some: NDArray[np.int64]) -> float:
    depths = [1.0]
    for table in tables.values():
        layers = np.flatnonzero(table[some].mean(0) >= DECODABLE)
        if layers.size:
            depths.append(float(layers[0]) / (table.shape[1] - 1))
    return min(depths)


def _accuracies(results: Results, label: str) -> tuple[str, list[str], dict[str, NDArray[np.float64]]] | None:
    """Task, domains, and for each probed token accuracies ``[domains, layers + 1]``; tokens that all domains have.

    Of the task that comes first: tokens of two tasks have the same names, and are not the same.
    """
    wanted = {"arm": lambda name: str(name).startswith(f"{label} at "), "value": is_number, "x": is_number}
    rows = chosen(results, {"probe": "timing", "measure": "accuracy", **wanted})
    task = str(rows[0].get("task")) if rows else ""
    rows = [row for row in rows if str(row.get("task")) == task]
    domains = list(dict.fromkeys(cluster_of(row) for row in rows))
    tables = {}
    for arm in dict.fromkeys(str(row["arm"]) for row in rows):
        by_place = {(cluster_of(row), int(row["x"])): float(row["value"]) for row in rows if row["arm"] == arm}
        layers = sorted({layer for _, layer in by_place})
        if len(by_place) == len(domains) * len(layers):
            tables[arm] = np.asarray([[by_place[domain, layer] for layer in layers] for domain in domains])
    return (task, domains, tables) if tables else None
