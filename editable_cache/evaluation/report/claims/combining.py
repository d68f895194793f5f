"""Claims on editing what was composed, and on long trajectories: section 6 of the study, appendix G."""

from __future__ import annotations

from typing import Any

from editable_cache.evaluation.report.claim import Claim, Condition
from editable_cache.evaluation.report.measures import decides_in_full, difference, mean, within
from editable_cache.evaluation.report.trends import trend_of

DIAGONAL, HORIZON = "python -m evidence.diagonal MODEL", "python -m evidence.horizon MODEL"

ARMS = ("stale", "in_place", "selective@32", "suffix", "erratum", "field+erratum")

MARGIN = 0.1
"""Of recovery, within which the composed and the recomputed cache count as the same."""

_DECIDES = decides_in_full("recomputed_correct", arm="full")
_READS_UPDATES = decides_in_full("recomputed_correct", arm="erratum")
APPENDED: dict[str, Any] = {"arm": "append_only"}
REFRESHED: dict[str, Any] = {"arm": "field+erratum"}


def _inside(
    what: str, measure: Any, low: float = float("-inf"), high: float = float("inf"), needs: Any = _DECIDES
) -> Condition:
    return Condition(what, "diagonal", measure, low, high, needs)


def _turns(what: str, measure: Any, low: float = float("-inf"), high: float = float("inf")) -> Condition:
    return Condition(what, "horizon", measure, low, high)


COMBINING = (
    Claim(
        "diagonal",
        "6, figure 7a",
        "Editing a field inside a spliced skill recovers what the same edit recovers in a full prefill, for every arm.",
        "points on the diagonal (Gemma-2-9B, Llama-3.1-8B)",
        tuple(
            _inside(f"recovery, composed - recomputed, {arm}", within("difference", MARGIN, arm=arm), -MARGIN, MARGIN)
            for arm in ARMS
        ),
        DIAGONAL,
    ),
    Claim(
        "in-place-inside-a-transplant",
        "6",
        "Inside a transplant the edit in place is as weak as ever.",
        "about 0.05",
        (_inside("in place, recovery", mean("composed_recovery", arm="in_place"), high=0.2),),
        DIAGONAL,
    ),
    Claim(
        "selective-inside-a-transplant",
        "6",
        "Inside a transplant 32 chosen tokens recover most.",
        "0.80",
        (_inside("selective@32, recovery", mean("composed_recovery", arm="selective@32"), low=0.6),),
        DIAGONAL,
    ),
    Claim(
        "erratum-strongest-inside",
        "6",
        "Inside a transplant the appended line recovers more than any of these edits.",
        "strongest",
        (
            _inside(
                "recovery, erratum - selective@32",
                difference("composed_recovery", {"arm": "erratum"}, {"arm": "selective@32"}),
                low=0.0,
                needs=lambda results: _DECIDES(results) or _READS_UPDATES(results),
            ),
        ),
        DIAGONAL,
        remark="Only of models that read the line in a plain prefill, which is the recomputed cache of this arm.",
    ),
    Claim(
        "no-drift-of-logits",
        "6, appendix G, figure 23b",
        "Over 28 turns in which the field changes, and a line says so each time, the logits of one evolving cache stay "
        "those of a full prefill.",
        "cosine 0.987 to 0.999, flat (0.992 to 0.996 on Llama)",
        (
            _turns("cosine", mean("cosine", **APPENDED), low=0.98),
            _turns("cosine, last third - first", trend_of("cosine", "change", **APPENDED), low=-0.01),
            _turns("largest difference of logits", mean("error", **APPENDED), high=0.01),
            _turns("the same with another value in the beginning", mean("control", **APPENDED), low=0.1),
        ),
        HORIZON,
        remark="Nothing but the lines is added, so this is a prefill in parts, and exact: in float32 nothing is left "
        "that could compound.",
    ),
    Claim(
        "no-drift-of-decisions",
        "appendix G, figure 23a",
        "Nor does the agreement of decisions decline with the turns.",
        "slope within 0.01 a turn; agreement 0.79 to 0.99",
        (
            _turns("agreement, slope a turn", trend_of("agrees", "slope", **APPENDED), -0.01, 0.01),
            _turns("agreement", mean("agrees", **APPENDED), low=0.79),
        ),
        HORIZON,
    ),
    Claim(
        "refreshed-in-place-drifts-not",
        "ours, on appendix G",
        "Nor does a cache drift whose field is refreshed in place each turn as well, under notes that stay.",
        "not measured there",
        (
            _turns("refreshed, cosine, last third - first", trend_of("cosine", "change", **REFRESHED), low=-0.01),
            _turns("refreshed, agreement, slope a turn", trend_of("agrees", "slope", **REFRESHED), -0.01, 0.01),
        ),
        HORIZON,
    ),
    Claim(
        "refreshed-in-place-agrees",
        "ours, on appendix G",
        "Such a cache decides as a prefill of the text as it then stands.",
        "not measured there",
        (
            _turns("refreshed, cosine", mean("cosine", **REFRESHED), low=0.98),
            _turns("refreshed, agreement", mean("agrees", **REFRESHED), low=0.79),
        ),
        HORIZON,
        remark="The prefill says a new value first and then corrects it back and forth; the cache has notes of the old "
        "one there.",
    ),
)
