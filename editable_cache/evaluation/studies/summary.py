"""Rows of a frontier, arm by arm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from editable_cache.evaluation.results import Row
from editable_cache.evaluation.statistics import bootstrap

MEASURES = ("correct", "agrees", "recovery", "p_correct", "cosine", "kl", "generated", "seconds")


def by_arm(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each arm the mean and interval of every measure, drawn by domains, and the mean share of tokens computed.

    Each measure is ``[mean, low, high]``, or None where no row has it. Rows of the gate are left out.
    """
    arms = list(dict.fromkeys(row["arm"] for row in rows if row["arm"] != "gate"))
    return [_arm(name, [row for row in rows if row["arm"] == name]) for name in arms]


def _arm(name: str, rows: list[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {"arm": name, "n": len(rows), "share": sum(row["share"] for row in rows) / len(rows)}
    for measure in MEASURES:
        held = [row for row in rows if row.get(measure) is not None]
        if not held:
            found[measure] = None
            continue
        interval = bootstrap([row[measure] for row in held], [row["domain"] for row in held])
        found[measure] = [round(value, 5) for value in (interval.mean, interval.low, interval.high)]
    return found
