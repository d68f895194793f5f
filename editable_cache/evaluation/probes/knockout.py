"""Does the decision fall back when the tokens that matter are made stale again? (The study's section 3, (4).)"""

from __future__ import annotations

from editable_cache.evaluation.probes.bench import COUNTS, Bench, Probe, mean
from editable_cache.evaluation.results import Row

NAME = "knockout"


def measure(bench: Bench) -> list[Row]:
    """The cache of the new value with the top k cells of the old one: how far back, and does the decision flip?"""
    pair, order = bench.situation.pair("new", "old"), bench.ranked()
    first, second = pair.ends
    rows = []
    for count in (count for count in COUNTS if count <= len(order)):
        drawn = [pair.mask(slots) for slots in bench.drawn(count, NAME)]
        top, *random = bench.recoveries(pair, [pair.mask(order[:count]), *drawn])
        for arm, values in (("top", [top]), ("random", random)):
            flips = [float(first + value * (second - first) > 0) for value in values]
            rows.append(bench.row(NAME, arm, mean(values), x=count))
            rows.append(bench.row(NAME, arm, mean(flips), measure="flips", x=count))
    return rows


PROBE = Probe(NAME, "does the decision fall back when its tokens are made stale again?", ("field",), measure)
