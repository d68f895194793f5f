"""From rows to a value with an interval: what the conditions of claims are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from editable_cache.evaluation.gate import LEAST
from editable_cache.evaluation.report.claim import Measure, Measured
from editable_cache.evaluation.results import Results, Row
from editable_cache.evaluation.statistics import Interval, bootstrap, mcnemar, tost

CLUSTERS = ("domain", "cluster", "document", "source")
"""Entries that name the group of a row, the first that it has."""


COUNTED = {
    *("correct", "agrees", "full_correct", "top", "same", "old", "new", "update"),
    *("follows", "flips", "decodable", "less_likely", "exact", "full_exact"),
    *("recomputed_correct", "composed_correct", "efficacy", "said"),
    *("eligible", "restored", "contamination", "collateral"),
}
"""Entries, and measures of probes, that are yes or no."""


def cluster_of(row: Row) -> str:
    """The group that is drawn again as a whole; a row that names none is its own."""
    return next((str(row[name]) for name in CLUSTERS if name in row), str(row.get("key")))


def is_number(value: Any) -> bool:
    """Whether it can be averaged; yes and no can."""
    return isinstance(value, (int, float))


def value_of(row: Row, name: str) -> float | None:
    """An entry as a number; of a list of numbers their mean; None otherwise."""
    value = row.get(name)
    if isinstance(value, list) and value and all(map(is_number, value)):
        return float(sum(value) / len(value))
    return float(value) if is_number(value) else None  # type: ignore[arg-type]


def chosen(results: Results, facts: dict[str, Any]) -> list[Row]:
    """Rows that have all these entries; a tuple means any of several, a function says whether an entry will do.

    The function under ``"*"`` takes the whole row.
    """
    entries = {name: wanted for name, wanted in facts.items() if name != "*"}
    rows = [row for row in results.rows if all(_fits(row.get(name), wanted) for name, wanted in entries.items())]
    return [row for row in rows if "*" not in facts or facts["*"](row)]


def _fits(value: Any, wanted: Any) -> bool:
    if callable(wanted):
        return bool(wanted(value))
    return value in wanted if isinstance(wanted, tuple) else bool(value == wanted)


def interval(rows: Sequence[Row], value: str) -> Interval | None:
    """Mean of an entry over rows that have it, drawn by clusters; None if none has."""
    held = [(number, row) for row in rows if (number := value_of(row, value)) is not None]
    if not held:
        return None
    found, clusters = [number for number, _ in held], [cluster_of(row) for _, row in held]
    return bootstrap(found, clusters, counted=value in COUNTED or held[0][1].get("measure") in COUNTED)


def mean(value: str, **facts: Any) -> Measure:
    """The mean of an entry over the rows with these facts."""

    def measure(results: Results) -> Measured | None:
        found = interval(chosen(results, facts), value)
        return None if found is None else Measured(found)

    return measure


def item_of(row: Row) -> str:
    """The item that a row belongs to. Rows of probes have the probe's name in front of it."""
    key = str(row.get("key"))
    return key.partition("/")[2] if "probe" in row else key


def pairs(results: Results, value: str, first: dict[str, Any], second: dict[str, Any]) -> list[tuple[Row, Row]]:
    """Rows of the same item under two sets of facts that both have the value. An item has one row of each."""
    others = {item_of(row): row for row in chosen(results, second) if is_number(row.get(value))}
    mine = [row for row in chosen(results, first) if is_number(row.get(value))]
    return [(row, others[item_of(row)]) for row in mine if item_of(row) in others]


def apart(both: Sequence[tuple[Row, Row]], value: str) -> Interval:
    """Mean of first minus second over pairs, drawn by clusters.

    Where all differ by the same, nothing is drawn: of a yes or no the bound is that of Clopper and Pearson.
    """
    found, clusters = [float(a[value]) - float(b[value]) for a, b in both], [cluster_of(a) for a, _ in both]
    if len(set(found)) > 1:
        return bootstrap(found, clusters)
    slack = 0.0
    if value in COUNTED or both[0][0].get("measure") in COUNTED:
        slack = 1 - 0.025 ** (1 / len(found))
    low, high = max(found[0] - slack, -1.0 if slack else found[0]), min(found[0] + slack, 1.0 if slack else found[0])
    return Interval(found[0], low, high, len(found), len(set(clusters)))


def difference(value: str, first: dict[str, Any], second: dict[str, Any], **common: Any) -> Measure:
    """Mean of first minus second over the items that have both."""

    def measure(results: Results) -> Measured | None:
        both = pairs(results, value, {**common, **first}, {**common, **second})
        if not both:
            return None
        return Measured(apart(both, value))

    return measure


def sooner_right(first: dict[str, Any], second: dict[str, Any], value: str = "correct", **common: Any) -> Measure:
    """As ``difference`` of a yes-or-no entry, decided by McNemar's exact test."""

    def measure(results: Results) -> Measured | None:
        both = pairs(results, value, {**common, **first}, {**common, **second})
        if not both:
            return None
        a, b = ([bool(row[value]) for row in rows] for rows in zip(*both, strict=True))
        test = mcnemar(a, b)
        only = [sum(x and not y for x, y in zip(p, q, strict=True)) for p, q in ((a, b), (b, a))]
        return Measured(apart(both, value), test.p, f"{only[0]} against {only[1]} discordant items")

    return measure


def equivalent(value: str, margin: float, first: dict[str, Any], second: dict[str, Any], **common: Any) -> Measure:
    """As ``difference``, decided by two one-sided tests within ``margin`` either way."""

    def measure(results: Results) -> Measured | None:
        both = pairs(results, value, {**common, **first}, {**common, **second})
        if len(both) < 2:
            return None
        test = tost([float(a[value]) - float(b[value]) for a, b in both], margin)
        return Measured(apart(both, value), test.p, f"TOST, margin {margin:g}")

    return measure


def passes_gate(**facts: Any) -> Callable[[Results], str | None]:
    """For ``Condition.needs``: full prefills must decide right on these items (the study's inclusion gate)."""

    def needs(results: Results) -> str | None:
        return _below(results, facts, ("old", "new"))

    return needs


def understands_updates(**facts: Any) -> Callable[[Results], str | None]:
    """As ``passes_gate``, and a later line must override the field in a plain prefill."""

    def needs(results: Results) -> str | None:
        return _below(results, facts, ("old", "new", "update"))

    return needs


def _below(results: Results, facts: dict[str, Any], names: tuple[str, ...]) -> str | None:
    rows = chosen(results, {**facts, "arm": "gate"})
    words = {"old": "old value", "new": "new value", "update": "old value and an update"}
    for name in names:
        share = [bool(row[name]) for row in rows if name in row]
        if share and sum(share) / len(share) < LEAST:
            return f"full prefills with {words[name]} decide right {sum(share) / len(share):.2f}, gate {LEAST:g}"
    return None


def same_as_plain_update(facts: dict[str, Any]) -> Measure:
    """Share of items on which an arm decides as the gate's plain prefill with an update did."""

    def measure(results: Results) -> Measured | None:
        gate = chosen(results, {"arm": "gate", "update": is_number})
        plain = {str(row["key"]).removeprefix("gate/"): row for row in gate}
        rows = []
        for row in chosen(results, {"correct": is_number, **facts}):
            told = plain.get(str(row["key"]).removeprefix(f"{row.get('set', '')}/"))
            if told is not None:
                rows.append({**row, "same": bool(row["correct"]) == bool(told["update"])})
        found = interval(rows, "same")
        return None if found is None else Measured(found)

    return measure


def within(value: str, margin: float, **facts: Any) -> Measure:
    """Mean of an entry that is a difference already, decided as in ``equivalent``."""

    def measure(results: Results) -> Measured | None:
        rows = chosen(results, {**facts, value: is_number})
        found = interval(rows, value)
        if found is None or found.n < 2:
            return None
        return Measured(found, tost([float(row[value]) for row in rows], margin).p, f"TOST, margin {margin:g}")

    return measure


def decides_in_full(
    entry: str = "full_correct", *, least: float = LEAST, **facts: Any
) -> Callable[[Results], str | None]:
    """As ``passes_gate``, by the full prefills beside which edits and compositions were measured."""

    def needs(results: Results) -> str | None:
        share = [bool(row[entry]) for row in chosen(results, facts) if entry in row]
        if share and sum(share) / len(share) < least:
            return f"full prefills decide right {sum(share) / len(share):.2f}, gate {least:g}"
        return None

    return needs


def passes_inclusion(*tasks: str) -> Callable[[Results], str | None]:
    """As ``passes_gate``, by the full prefills that decide which items a probe takes in; one of the tasks is enough."""

    def needs(results: Results) -> str | None:
        reasons = []
        for task in tasks:
            rows = chosen(results, {"probe": "inclusion", "task": task, "states": is_number, "right": is_number})
            asked = sum(row["states"] for row in rows)
            share = sum(row["right"] for row in rows) / asked if asked else 0.0
            if share >= LEAST:
                return None
            if asked:
                reasons.append(f"full prefills of {task} items decide right {share:.2f}, gate {LEAST:g}")
        return reasons[0] if reasons else None

    return needs
