"""Claims on where the conclusion is written and read: section 3 of the study, tables 3 and 4, appendix C."""

from __future__ import annotations

from typing import Any

from editable_cache.evaluation.report.claim import Claim, Condition
from editable_cache.evaluation.report.depth import at_depth, best_accuracy, written_before_read
from editable_cache.evaluation.report.measures import difference, mean, passes_inclusion

STUDY = "mechanism"
COMMAND = "python -m evidence.mechanism MODEL"

NOTHING, ALL_OF_IT = 0.15, 0.9
"""Recoveries that count as none and as all. The study takes 0.137 for none and 0.995 for all (table 3)."""


_GATED, _TRIGGER = passes_inclusion("gated"), passes_inclusion("trigger", "exchanged")


def _asks(
    what: str, measure: Any, low: float = float("-inf"), high: float = float("inf"), needs: Any = _GATED
) -> Condition:
    return Condition(what, STUDY, measure, low, high, needs)


def _recovery(probe: str, arm: str, **facts: Any) -> Any:
    return mean("value", probe=probe, arm=arm, measure="recovery", **facts)


def _locality(task: str) -> tuple[Condition, ...]:
    field, behind = (_recovery("locality", arm, task=task) for arm in ("field_only", "downstream_only"))
    needs = passes_inclusion(task)
    return (
        _asks(f"{task}, field only", field, -NOTHING, NOTHING, needs),
        _asks(f"{task}, downstream only", behind, ALL_OF_IT, needs=needs),
    )


MECHANISM = (
    Claim(
        "locality",
        "3 (1), figure 3a",
        "The field's own keys and values recover nothing of the decision, what stands behind it recovers all.",
        "field only -0.028 (Llama-3.1-8B), 0.005, 0.137; downstream 1.0",
        _locality("gated"),
        COMMAND,
    ),
    Claim(
        "field-below-one-percent",
        "abstract, 3 (1)",
        "The field's own keys and values drive under 1 % of the decision.",
        "under 1 % (though -0.028 to 0.137 in its tables)",
        (_asks("gated, field only", _recovery("locality", "field_only", task="gated"), -0.01, 0.01),),
        COMMAND,
        remark="Asks for the number as it stands; the claim above asks for the tables' own range.",
    ),
    Claim(
        "prefix-untouched",
        "1, 4",
        "What stands before the field does not depend on its value.",
        "deviation exactly 0.0",
        (_asks("deviation before the field", mean("value", probe="locality", arm="prefix"), 0.0, 0.0),),
        COMMAND,
        remark="True by construction of a causal model, and so a check of ours.",
    ),
    Claim(
        "suffix-concentration",
        "3 (2), figure 3b",
        "Recovery accrues over many tokens behind the field: one is not enough, 64 are.",
        "slow, saturates with many tokens",
        (
            _asks("the first 8 behind the field", _recovery("suffix", "from_field", task="gated", x=8), high=0.5),
            _asks("the best one", _recovery("suffix", "by_effect", task="gated", x=1), high=0.5),
            _asks("the best 64", _recovery("suffix", "by_effect", task="gated", x=64), low=ALL_OF_IT),
        ),
        COMMAND,
    ),
    Claim(
        "middle-and-late-layers",
        "3 (2), figure 3b",
        "The notes stand in middle and late layers.",
        "mid and late",
        (
            _asks(
                "layers from one third on",
                at_depth(1 / 3, probe="suffix", arm="layers_from", task="gated"),
                low=ALL_OF_IT,
            ),
        ),
        COMMAND,
    ),
    Claim(
        "linearly-decodable",
        "3 (3), appendix C",
        "The conclusion can be read by a linear probe from tokens behind the field, before any answer.",
        "decodable",
        (
            _asks(
                "accuracy at the best token and layer, held-out domains", best_accuracy("clause"), 0.8, needs=_TRIGGER
            ),
        ),
        COMMAND,
        remark="Whether the clause that names the value first holds. Here the probe is judged on domains that it was "
        "not fitted on; token and layer are the best of all.",
    ),
    Claim(
        "linearly-decodable-across-meanings",
        "3 (3), appendix C",
        "So can the kind of the call, granting or refusing, whichever clause asks for it.",
        "decodable (its labels are safe and unsafe)",
        (_asks("accuracy for the kind of call, held-out domains", best_accuracy("call"), 0.8, needs=_TRIGGER),),
        COMMAND,
        remark="Of models whose calls have a kind; the calls of other domains are other words.",
    ),
    Claim(
        "knockout",
        "3 (4)",
        "Making the tokens of high effect stale again flips the decision back, more so the more they are.",
        "flips back, grows with their number",
        (
            _asks(
                "best 32 made stale, flips", mean("value", probe="knockout", arm="top", measure="flips", x=32), low=0.5
            ),
            _asks(
                "recovery of the old answer, 32 - 1 tokens",
                difference("value", {"x": 32}, {"x": 1}, probe="knockout", arm="top", measure="recovery"),
                low=0.0,
            ),
            _asks(
                "the best 8 - 8 random ones",
                difference("value", {"arm": "top"}, {"arm": "random"}, probe="knockout", measure="recovery", x=8),
                low=0.0,
            ),
        ),
        COMMAND,
    ),
    Claim(
        "dissociation",
        "3 (i), table 4",
        "With the field the same and the rule's trigger word turned, the notes carry the turned conclusion and the "
        "word's own cells none of it.",
        "notes 0.998 to 1.009, trigger -0.007 to 0.007",
        (
            _asks("trigger only", _recovery("dissociation", "trigger_only"), -NOTHING, NOTHING, _TRIGGER),
            _asks("notes", _recovery("dissociation", "notes"), ALL_OF_IT, needs=_TRIGGER),
        ),
        COMMAND,
    ),
    Claim(
        "write-before-read",
        "3 (ii), table 3",
        "The conclusion is decodable behind the rule many layers before the last token turns to its answer.",
        "depth 0.31 to 0.39 against 0.73 to 0.77 (0.19 to 0.26 against 0.47 to 0.48)",
        (_asks("depth of the read - depth of the write", written_before_read("clause"), 0.05, needs=_TRIGGER),),
        COMMAND,
        remark="Read: the depth from which on the logit lens gives the right sign for all four prompts of an item. A "
        "lens that always leans to one answer is right for half of them at once, so that the mean over prompts, 0.46 "
        "of the depth on the gatekeeper, is earlier than the write: by that measure the claim would fail there.",
    ),
    Claim(
        "specificity",
        "3 (iii), table 4",
        "The eight positions of largest effect recover most of the decision, eight random ones little.",
        "0.74 to 0.79 against 0.035 at most; 0.95 against 0.5 on Gemma-2 and Mistral",
        (
            _asks("best 8", _recovery("specificity", "top", task="gated", x=8), low=0.6),
            _asks("random 8", _recovery("specificity", "random", task="gated", x=8), high=0.55),
            _asks(
                "best 8 - random 8",
                difference(
                    "value",
                    {"arm": "top"},
                    {"arm": "random"},
                    probe="specificity",
                    measure="recovery",
                    task="gated",
                    x=8,
                ),
                low=0.3,
            ),
        ),
        COMMAND,
        remark="As in the study the positions are ranked on the very item that they are judged on.",
    ),
    Claim(
        "specificity-held-out",
        "ours, on 3 (iii)",
        "The same, with positions chosen by their role on items of other domains.",
        "not measured there",
        (
            _asks(
                "best 8 of other domains - random 8",
                difference(
                    "value",
                    {"arm": "top_of_other_domains"},
                    {"arm": "random"},
                    probe="specificity",
                    measure="recovery",
                    task="gated",
                    x=8,
                ),
                low=0.3,
            ),
        ),
        COMMAND,
    ),
    Claim(
        "injection",
        "3 (iv), appendix C",
        "Notes of the opposite conclusion, written behind a field that says otherwise, decide.",
        "recovery 0.99, 0.98, 1.02; follows 1.0",
        (
            _asks("all notes", _recovery("injection", "all_notes", task="gated"), low=ALL_OF_IT),
            _asks(
                "follows",
                mean("value", probe="injection", arm="all_notes", measure="follows", task="gated"),
                low=ALL_OF_IT,
            ),
        ),
        COMMAND,
    ),
    Claim(
        "few-notes-suffice",
        "3 (iv), appendix C",
        "Eight false notes flip the decision in most items.",
        "most",
        (_asks("follows 8", mean("value", probe="injection", arm="top_8", measure="follows", task="gated"), low=0.5),),
        COMMAND,
    ),
    Claim(
        "off-template-two-hops",
        "3, appendix C",
        "The field's own cells recover nothing either where the rule takes two steps.",
        "-0.012 to 0.006; downstream 1.00",
        _locality("two_hop"),
        COMMAND,
    ),
    Claim(
        "off-template-free-form",
        "3, appendix C",
        "The field's own cells recover nothing either where field and rule are said in conversational sentences.",
        "-0.012 to 0.054; downstream 1.00",
        _locality("free_form"),
        COMMAND,
    ),
    Claim(
        "lookup-is-partly-a-copy",
        "3, appendix C",
        "Where the answer is the field's value itself, its own cells carry a part.",
        "0.25 to 0.63",
        (
            _asks(
                "lookup, field only",
                _recovery("locality", "field_only", task="lookup"),
                0.15,
                0.85,
                passes_inclusion("lookup"),
            ),
        ),
        COMMAND,
    ),
)
