"""Does the field's own cell drive the decision, or what stands behind it? (The study's section 3, figure 3a.)"""

from __future__ import annotations

import torch

from editable_cache.evaluation.probes.bench import Bench, Probe
from editable_cache.evaluation.probes.pairs import Pair
from editable_cache.evaluation.results import Row

NAME = "locality"


def measure(bench: Bench) -> list[Row]:
    """Recovery with the field's cells alone, with those behind it alone, and with both; deviation before the field."""
    pair = bench.pair
    field, behind = pair.changed, pair.behind
    arms = {
        "nothing": behind[:0],
        "field_only": field,
        "downstream_only": behind,
        "field+downstream": torch.cat((field, behind)),
    }
    found = bench.recoveries(pair, [pair.mask(slots) for slots in arms.values()])
    rows = [bench.row(NAME, arm, value) for arm, value in zip(arms, found, strict=True)]
    return [*rows, bench.row(NAME, "prefix", prefix_deviation(pair), measure="deviation")]


def prefix_deviation(pair: Pair) -> float:
    """Largest absolute difference of any cell in front of what differs."""
    start = int(pair.changed[0])
    worst = 0.0
    for mine, theirs in zip(pair.base.cells, pair.other.cells, strict=True):
        for name, cells in mine.items():
            difference = (cells[..., :start, :] - theirs[name][..., :start, :]).abs()
            worst = max(worst, float(difference.max()) if difference.numel() else 0.0)
    return worst


PROBE = Probe(NAME, "do the field's own cells drive the decision, or those behind it?", ("field",), measure)
