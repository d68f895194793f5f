"""Claims of others that contradict or bound the study's."""

from __future__ import annotations

from typing import Any

from editable_cache.evaluation.report.claim import Claim, Condition
from editable_cache.evaluation.report.claims.editing import COMMAND
from editable_cache.evaluation.report.measures import difference, passes_gate
from editable_cache.evaluation.report.unpaired import lost_share, more_lost

NEAR: dict[str, Any] = {"set": "near"}
FAR: dict[str, Any] = {"set": "far"}

_NEAR_GATE = passes_gate(task="gated", mode="direct", key=lambda key: "gated-far/" not in str(key))
_FAR_GATE = passes_gate(task="gated", mode="direct", key=lambda key: "gated-far/" in str(key))


def _window(rival: str, facts: dict[str, Any]) -> Any:
    return difference("recovery", {"arm": "window@64"}, {"arm": f"{rival}@64"}, **facts)


def _asks(
    what: str, measure: Any, low: float = float("-inf"), high: float = float("inf"), needs: Any = _NEAR_GATE
) -> Condition:
    return Condition(what, "frontier", measure, low, high, needs)


_BLIND, _NO_PASSAGE = {"arm": "seam@0"}, {"arm": "none"}
_MULTI, _SINGLE = {"hops": "multi"}, {"hops": "single"}

RIVALS = (
    Claim(
        "window-beats-scattered",
        "rival, arXiv 2609.17983",
        "The tokens right behind the edit, in one window, beat as many tokens chosen here and there, even by their "
        "causal effect.",
        "beats scattered selectors",
        (_asks("recovery, window - selective, 64 tokens", _window("selective", NEAR), low=0.0),),
        COMMAND,
        remark="The binding rule is among the first of the policy. Both are really computed again. 64 is the most that "
        "was measured; a window of 32 may end before the rule.",
    ),
    Claim(
        "window-beats-repair",
        "ours, on arXiv 2609.17983",
        "It beats what the library's repair chooses with the question.",
        "not measured there",
        (_asks("recovery, window - repair, 64 tokens", _window("repair", NEAR), low=0.0),),
        COMMAND,
    ),
    Claim(
        "window-loses-far-downstream",
        "rival, arXiv 2609.17983",
        "Where what decides stands far behind the edit, the window loses its lead.",
        "unless the answer is far downstream",
        (_asks("recovery, window - selective, 64 tokens, far", _window("selective", FAR), high=0.0, needs=_FAR_GATE),),
        COMMAND,
        remark="The binding rule stands behind all neutral ones.",
    ),
    Claim(
        "blind-reuse-halves-multi-hop",
        "rival, on retrieval",
        "Passages compiled one by one and put side by side halve what is answered of questions that need two of them, "
        "while questions that need one hold.",
        "about half lost with two hops, nothing with one",
        (
            Condition(
                "two hops, share of the passages' worth that is lost",
                "multihop",
                lost_share("drop", _BLIND, _NO_PASSAGE, **_MULTI),
                low=0.33,
            ),
            Condition("one hop, the same", "multihop", lost_share("drop", _BLIND, _NO_PASSAGE, **_SINGLE), high=0.2),
            Condition(
                "lost, two hops - one hop", "multihop", more_lost("drop", _BLIND, _NO_PASSAGE, _MULTI, _SINGLE), low=0.0
            ),
        ),
        "python -m evidence.multihop MODEL",
        remark="The worth of the passages is what they add to the log-probability of the right answer in a full "
        "prefill, a measure that small models do not put to the floor. No seam token.",
    ),
)
