"""Claims on composing: section 5 of the study, E2 of section 7, appendices F and G."""

from __future__ import annotations

from typing import Any

from editable_cache.evaluation.gate import LEAST
from editable_cache.evaluation.report.claim import Claim, Condition, Measured
from editable_cache.evaluation.report.measures import (
    decides_in_full,
    difference,
    equivalent,
    mean,
    sooner_right,
)
from editable_cache.evaluation.report.unpaired import lost_share
from editable_cache.evaluation.results import Results

STUDY = "composing"
COMMAND = "python -m evidence.composing MODEL"

USUAL: dict[str, Any] = {"rotated": True, "seam": 1}
CONTENT: dict[str, Any] = {"test": "content", **USUAL}
FIRST: dict[str, Any] = {"point": ("system", "ahead")}
"""A rule that is read before its field, as in the study."""
AHEAD: dict[str, Any] = {"test": "content", "content": "rule", "point": "ahead", "mode": "direct"}
SPLIT: dict[str, Any] = {
    "test": "split",
    "border": ("together", "split"),
    "point": "end",
    "mode": "direct",
    **USUAL,
}

WINDOWS = {"gemma3_270m": 512, "small-gemma3": 32}
"""Tokens that a sliding layer sees, by how a model's name begins."""

AGREES = 0.9
"""Agreement of decisions with a full prefill that counts as preserved; the study's agent has 0.81 to 1.00."""


def _asks(
    what: str, measure: Any, low: float = float("-inf"), high: float = float("inf"), gate: dict[str, Any] | None = None
) -> Condition:
    if gate is None:
        return Condition(what, STUDY, measure, low, high)
    return Condition(what, STUDY, measure, low, high, decides_in_full(**gate))


def _agrees(what: str, facts: dict[str, Any]) -> Condition:
    return _asks(f"{what}, agrees", mean("agrees", **facts), AGREES, gate=facts)


def _behind(content: str) -> dict[str, Any]:
    """Rows of a content that stands behind what it is combined with."""
    return {"content": content, "mode": "direct", "task": "gated", "point": ("middle", "end", "tool"), **CONTENT}


def _window(results: Results) -> int | None:
    return next((window for name, window in WINDOWS.items() if results.name.startswith(name)), None)


def _beyond_the_window(content: str) -> Condition:
    """Of prompts that are longer than a model's window."""

    def long(results: Results) -> dict[str, Any]:
        facts = {"content": content, "mode": "direct", "task": "gated", **FIRST, **CONTENT}
        window = _window(results) or 0
        return {**facts, "tokens": lambda count: (count or 0) > window}

    def slides(results: Results) -> str | None:
        return decides_in_full(**long(results))(results) if _window(results) else "no sliding windows"

    def agrees(results: Results) -> Measured | None:
        return mean("agrees", **long(results))(results)

    return Condition(f"{content}, agreement beyond the window", STUDY, agrees, low=AGREES, needs=slides)


COMPOSING = (
    Claim(
        "transplant-fidelity",
        "5, figure 6b",
        "A skill compiled alone, turned to its place and spliced gives the logits of a full prefill.",
        "cosine 0.90 to 0.999 (12 models)",
        (_asks("cosine", mean("cosine", mode="direct", **FIRST, **CONTENT), low=0.9),),
        COMMAND,
        remark="With one seam token, in front of what it is combined with. A cosine of logits mostly measures their "
        "common mean, and is hardly lower where decisions are lost: these count.",
    ),
    Claim(
        "decisions-preserved",
        "5, appendix A",
        "Models that can take the decision take the same one behind a spliced rule, whose field comes after it.",
        "24 of 24; cosine 0.98 to 0.999",
        (_agrees("rule, then field", {"content": "rule", "mode": "direct", "task": "gated", **FIRST, **CONTENT}),),
        COMMAND,
        remark="Of models whose training had rules in front of their fields too.",
    ),
    Claim(
        "decisions-preserved-with-a-chain",
        "5",
        "With a chain of thought too.",
        "16 of 16",
        (_agrees("rule, then field, chain", {"content": "rule", "mode": "cot", **FIRST, **CONTENT}),),
        COMMAND,
    ),
    *(
        Claim(
            f"{second}-behind-its-{first}",
            "ours, on 3",
            f"A {second} spliced behind the {first} that it is combined with loses the decision: it was compiled "
            f"alone, and holds no notes of that {first}.",
            "not measured there",
            (_asks(f"{first}, then {second}, agrees", mean("agrees", **rows), high=LEAST, gate=rows),),
            COMMAND,
            remark="Only computing it anew mends that: a seam helps by as much of the skill as it covers.",
        )
        for first, second, rows in (("field", "rule", _behind("rule")), ("rule", "field", _behind("fact")))
    ),
    Claim(
        "content-types",
        "5, appendix F, figure 19",
        "Facts and tool specifications are as portable as rules.",
        "at or near 1.0",
        (
            _agrees("fact, then rule", {"content": "fact", "mode": "direct", "task": "gated", **FIRST, **CONTENT}),
            _agrees("tools", {"content": "tools", "mode": "direct", "task": "gated", **CONTENT}),
        ),
        COMMAND,
        remark="The fact is the field; as with rules it stands before what it is combined with.",
    ),
    Claim(
        "insertion-points",
        "5, appendix F, figure 19",
        "It does not matter where a list of tools stands: among the other sections, at the end, or as a tool's result.",
        "at or near 1.0",
        tuple(
            _agrees(
                f"tools, {what}", {"content": "tools", "mode": "direct", "task": "gated", "point": points, **CONTENT}
            )
            for what, points in (("middle", "middle"), ("end or tool result", ("end", "tool")))
        ),
        COMMAND,
        remark="Tools are combined with nothing before them. For rules and fields it matters: see there.",
    ),
    Claim(
        "facts-looked-up",
        "5, appendix F, figure 19",
        "A fact that is asked for by itself, as passages of a retrieval are, is read from a spliced chunk as from a "
        "prefill.",
        "at or near 1.0",
        (_agrees("looked up", {"content": "fact", "task": "lookup", "mode": "direct", **CONTENT}),),
        COMMAND,
        remark="Among the other sections, at the end and as a tool's result together.",
    ),
    Claim(
        "several-skills",
        "5",
        "Two and four skills side by side preserve decisions as one does.",
        "N = 1 to 4",
        tuple(
            _agrees(f"{count} skills", {"test": "count", "chunks": count, "mode": "direct", **FIRST, **USUAL})
            for count in (2, 4)
        ),
        COMMAND,
        remark="The field comes after them.",
    ),
    Claim(
        "tool-calls",
        "5",
        "Decisions answered by a real function call are preserved.",
        "1.00; 0.97 [0.94, 1.0] on two models (n = 108)",
        (_agrees("function call", {"task": "tool_call", "content": ("rule", "fact"), **FIRST, **CONTENT}),),
        COMMAND,
        remark="A rule in front of its field, and a field in front of its rule; calls as JSON, parsed.",
    ),
    Claim(
        "seam",
        "5, E2, figure 9a",
        "What is off sits at the chunk's start: one token computed there closes most of the gap.",
        "cosine 0.94 to 0.994 (Llama-3.1-8B)",
        (_asks("KL, seam 1 / seam 0", lost_share("kl", {"seam": 1}, {"seam": 0}, rotated=True, **AHEAD), high=0.5),),
        COMMAND,
        remark="Chunks here are compiled behind the tokenizer's BOS token where it has one, which takes most of the "
        "seam away beforehand.",
    ),
    Claim(
        "sliding-windows",
        "5, 8, figure 22c",
        "Sliding-window models are no exception once all keys and values are kept and the mask keeps the window.",
        "agreement 0.93 to 0.94 where it failed before",
        tuple(map(_beyond_the_window, ("rule", "fact"))),
        COMMAND,
        remark="Only prompts longer than the model's window count, and skills in front of what they are combined with. "
        "Documents of 1,024 tokens on Gemma-3-270M: docs/fidelity.md.",
    ),
    Claim(
        "rotation-needed",
        "E2, figure 9b",
        "Without turning the keys the splice collapses.",
        "agreement 0.18 for 0.78",
        (
            _asks(
                "agrees, turned - not turned",
                sooner_right({"rotated": True}, {"rotated": False}, "agrees", seam=1, **AHEAD),
                low=0.05,
                gate={**USUAL, **AHEAD},
            ),
            _asks(
                "cosine, turned - not turned",
                difference("cosine", {"rotated": True}, {"rotated": False}, seam=1, **AHEAD),
                low=0.0,
            ),
        ),
        COMMAND,
        remark="Skills here move by some tens of tokens, within which these models hardly tell places apart; the "
        "study's by thousands. Documents that moved farther: docs/fidelity.md.",
    ),
    Claim(
        "cross-reference-split",
        "7, E4, appendix G",
        "Two lines of which one names the other must not be cut apart: compiled in two blocks, decisions agree less.",
        "0.46 split, 0.76 in one block; 25 against 1 items, p = 8e-7",
        (
            _asks(
                "agrees, together - split",
                sooner_right({"border": "together"}, {"border": "split"}, "agrees", **SPLIT),
                low=0.0,
                gate=SPLIT,
            ),
        ),
        COMMAND,
        remark="At the end of the context, right before what asks. Both ways have two blocks; only the border moves.",
    ),
    Claim(
        "independent-split",
        "7, E4, appendix G",
        "Lines that do not refer to each other may be cut apart: the border costs no agreement.",
        "0.04 (Mistral-7B)",
        (
            _asks(
                "agrees, one block - two, references whole",
                equivalent(
                    "agrees",
                    0.1,
                    {"border": "one"},
                    {"border": "together"},
                    **{name: value for name, value in SPLIT.items() if name != "border"},
                ),
                -0.1,
                0.1,
                gate=SPLIT,
            ),
        ),
        COMMAND,
        remark="The border stands between the session's entries, which decide nothing, and the memory: easier than two "
        "facts that both count.",
    ),
)
