"""Is the decision a function of the conclusion that the notes carry? (Causal scrubbing, the study's figure 15d.)"""

from __future__ import annotations

from torch import Tensor

from editable_cache.evaluation.metrics import cosine
from editable_cache.evaluation.probes.bench import Bench, Probe
from editable_cache.evaluation.probes.prefill import Prefilled
from editable_cache.evaluation.results import Row

NAME = "scrubbing"

NOTES = 8


def measure(bench: Bench) -> list[Row]:
    """Notes resampled from other inputs: of the same conclusion, which should change nothing, and of the opposite one.

    The donor of the same conclusion has the other value in its field, and its rule is turned.
    """
    situation, pair = bench.situation, bench.situation.rule_pair
    base, span = pair.base, abs(pair.ends[1] - pair.ends[0])
    notes = bench.ranked()[:NOTES]
    rest = pair.mask(pair.behind) & ~pair.mask(notes)
    same, patcher = situation.prompt("flipped new"), bench.patcher(pair.base)

    def logits(donor: Prefilled, mask: Tensor) -> Tensor:
        return patcher.logits(donor, mask[None])[0]

    rows = []
    for arm, mask in (("same_conclusion", pair.mask(pair.behind)), ("same_conclusion_rest", rest)):
        found = logits(same, mask)
        drift = abs(float(pair.gap(found)) - pair.ends[0]) / span
        rows.append(bench.row(NAME, arm, drift, measure="drift"))
        rows.append(bench.row(NAME, arm, cosine(found, base.logits.cpu()), measure="cosine"))
    for prefix, donor in (("opposite", pair.other), ("opposite_by_field", situation.prompt("new"))):
        for arm, mask in (("note", pair.mask(notes)), ("rest", rest), ("all", pair.mask(pair.behind))):
            rows.append(bench.row(NAME, f"{prefix}_{arm}", pair.recovery(float(pair.gap(logits(donor, mask))))))
    return rows


PROBE = Probe(NAME, "do notes of the same conclusion change nothing, and the opposite ones all?", ("rule",), measure)
