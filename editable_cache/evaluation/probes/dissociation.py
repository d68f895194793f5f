"""Is what the notes hold the conclusion, or the field's content? (The study's table 4, left.)

The rule's trigger word is turned, or its two values change places, so that the conclusion inverts while the field stays
the same.
"""

from __future__ import annotations

import torch

from editable_cache.evaluation.probes.bench import Bench, Probe
from editable_cache.evaluation.results import Row

NAME = "dissociation"


def measure(bench: Bench) -> list[Row]:
    """Recovery of the turned conclusion from the turned words' own cells, and from the notes behind the first."""
    situation = bench.situation
    rows = []
    for pair in (situation.rule_pair, situation.pair("new", "flipped new")):
        trigger, behind = pair.changed, pair.behind
        arms = {"trigger_only": trigger, "notes": behind, "trigger+notes": torch.cat((trigger, behind))}
        found = bench.recoveries(pair, [pair.mask(slots) for slots in arms.values()])
        rows += [bench.row(NAME, arm, value) for arm, value in zip(arms, found, strict=True)]
    return rows


PROBE = Probe(NAME, "do notes hold the conclusion rather than the field's content?", ("rule",), measure)
