"""Does the decision follow a false note? (The study's appendix C, writability.)"""

from __future__ import annotations

from editable_cache.evaluation.probes.bench import Bench, Probe, mean
from editable_cache.evaluation.probes.pairs import State
from editable_cache.evaluation.results import Row

NAME = "injection"

NOTES = 8
"""Positions of the smaller injection."""


def measure(bench: Bench) -> list[Row]:
    """Notes of the opposite conclusion written into a consistent cache, whose field is left as it is; both ways."""
    situation, rows = bench.situation, []
    order = bench.ranked()
    ways: tuple[tuple[State, State], ...] = (("old", "new"), ("new", "old"))
    if bench.kind == "rule":
        ways = (("old", "flipped old"), ("flipped old", "old"))
    for base, other in ways:
        pair = situation.pair(base, other)
        drawn = [pair.mask(slots) for slots in bench.drawn(NOTES, NAME)]
        masks = {"all_notes": pair.mask(pair.behind), f"top_{NOTES}": pair.mask(order[:NOTES])}
        found = bench.recoveries(pair, [*masks.values(), *drawn])
        arms = {**dict(zip(masks, found, strict=False)), f"random_{NOTES}": mean(found[len(masks) :])}
        rows += [bench.row(NAME, arm, value) for arm, value in arms.items()]
        first, second = pair.ends
        for arm in masks:
            gap = first + arms[arm] * (second - first)
            rows.append(bench.row(NAME, arm, float(gap > 0), measure="follows"))
    return rows


PROBE = Probe(NAME, "does the decision follow a false note against a live field?", ("field", "rule"), measure)
