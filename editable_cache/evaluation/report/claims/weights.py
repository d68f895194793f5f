"""Claims on editing weights instead: section 4 of the study, table 1, appendix I."""

from __future__ import annotations

from typing import Any

from editable_cache.evaluation.report.claim import Claim, Condition
from editable_cache.evaluation.report.measures import decides_in_full, mean
from editable_cache.evaluation.report.unpaired import lost_share

COMMAND = "python -m evidence.weights MODEL"

ARMS: dict[str, Any] = {"kind": "arm", "eligible": True}
CACHE, WEIGHTS_TOO = ("in_place", "erratum", "field+erratum"), ("ROME", "LoRA")

NONE_OF_THEM = 0.1
"""Below this nothing else changed: with 50 items that are all unchanged the bound is 0.07."""

_DECIDES = decides_in_full("eligible", least=0.64, kind="arm")


def _asks(
    what: str, measure: Any, low: float = float("-inf"), high: float = float("inf"), needs: Any = _DECIDES
) -> Condition:
    return Condition(what, "weights", measure, low, high, needs)


def _each(arms: tuple[str, ...], value: str, words: str, low: float = float("-inf"), high: float = float("inf")) -> Any:
    return tuple(_asks(f"{arm}, {words}", mean(value, arm=arm, **ARMS), low, high) for arm in arms)


def _times_slower(arm: str) -> Condition:
    measure = lost_share("cpu_seconds", {"arm": arm}, {"arm": "field+erratum"}, **ARMS)
    return _asks(f"processor seconds, {arm} / field+erratum", measure, low=10.0)


WEIGHTS = (
    Claim(
        "all-flip-the-decision",
        "4, table 1",
        "The line together with the field, ROME and LoRA all turn the decision.",
        "all (n = 1)",
        _each(("field+erratum", *WEIGHTS_TOO), "flips", "flips", low=0.8),
        COMMAND,
    ),
    Claim(
        "in-place-does-not-flip",
        "4, table 1",
        "The edit in place does not.",
        "no, without a chain of thought",
        _each(("in_place",), "flips", "flips", high=0.2),
        COMMAND,
    ),
    Claim(
        "weights-contaminate",
        "4, table 1",
        "An edit of the weights turns the decisions of other requests whose field did not change.",
        "1.0 (ROME, LoRA; 8 requests)",
        _each(WEIGHTS_TOO, "contamination", "other requests turned", low=0.5),
        COMMAND,
    ),
    Claim(
        "cache-does-not-contaminate",
        "4, table 1",
        "An edit of one cache turns none of them.",
        "0 (asserted, not measured)",
        _each(CACHE, "contamination", "other requests turned", high=NONE_OF_THEM),
        COMMAND,
        remark="True by construction, measured all the same on the other requests' caches in the same process.",
    ),
    Claim(
        "weights-damage-others",
        "4, table 1",
        "An edit of the weights changes unrelated decisions.",
        "0.5 (ROME, LoRA; 10 decisions)",
        _each(WEIGHTS_TOO, "collateral", "unrelated answers changed", low=0.25),
        COMMAND,
    ),
    Claim(
        "cache-damages-nothing",
        "4, table 1",
        "An edit of one cache changes none of them.",
        "0 (asserted, not measured)",
        _each(CACHE, "collateral", "unrelated answers changed", high=NONE_OF_THEM),
        COMMAND,
    ),
    Claim(
        "weights-are-slower",
        "4, table 1",
        "An edit of the weights takes tens of times as long.",
        "5.6 s and 3.1 s for 0.114 s: 30 to 50 times (8B)",
        (_times_slower("ROME"), _times_slower("LoRA")),
        COMMAND,
        remark="Without the covariance pass of ROME, which is paid once.",
    ),
    Claim(
        "rome-works",
        "4, appendix I",
        "ROME as built here rewrites known facts, also in other wordings, and leaves other subjects alone.",
        "one fact: the Eiffel tower",
        (
            Condition("efficacy", "rome_facts", mean("efficacy", kind="edit", arm="ROME"), low=0.9),
            Condition("other wordings", "rome_facts", mean("paraphrase", kind="edit", arm="ROME"), low=0.5),
            Condition("neighbours keep theirs", "rome_facts", mean("neighbourhood", kind="edit", arm="ROME"), low=0.6),
        ),
        "python -m evidence.rome_facts MODEL",
    ),
    Claim(
        "weights-are-restored",
        "ours",
        "After each edit the weights are bit-identical to what they were.",
        "not stated",
        (_asks("share of edits", mean("restored", kind="arm", arm=WEIGHTS_TOO), low=0.9, needs=lambda results: None),),
        COMMAND,
    ),
)
