"""Claims on editing: section 4 of the study, figures 2, 3d and 5, appendices B and E."""

from __future__ import annotations

import re
from typing import Any

from editable_cache.evaluation.report.across import fewest_tokens, lead_of, octaves_between, spread_between
from editable_cache.evaluation.report.claim import AcrossModels, Claim, Condition
from editable_cache.evaluation.report.measures import (
    difference,
    equivalent,
    mean,
    passes_gate,
    same_as_plain_update,
    sooner_right,
    understands_updates,
    value_of,
)
from editable_cache.evaluation.results import Results, Row

COMMAND = "python -m evidence.frontier MODEL"

RIGHT, WRONG = 0.8, 0.2
"""As often right as the inclusion gate asks of full prefills, and as often wrong."""

NEAR = {"task": "gated", "key": lambda key: "gated-far/" not in str(key)}
DIRECT: dict[str, Any] = {"set": ("direct", ""), "mode": "direct", **NEAR}
CHAIN: dict[str, Any] = {"set": ("cot", ""), "mode": "cot", **NEAR}


def _is_long(row: Row) -> bool:
    """Whether the whole prompt has 300 tokens or more."""
    tokens, share = value_of(row, "tokens"), value_of(row, "share")
    return tokens is not None and share is not None and tokens >= 300 * share


LONG: dict[str, Any] = {**DIRECT, "*": _is_long}
WORDS: dict[str, Any] = {"set": "wordings", "mode": "direct", **NEAR}

FREE_CHAIN = 60
"""Tokens on average from which on a chain of thought is more than one line."""

ONE_ORDER = re.compile(r"(gatekeeper|small-)(?!.*any-order)")
"""Our own models that were trained on contexts whose field comes before its rule."""

_DIRECT_GATE = passes_gate(mode="direct", **NEAR)
_CHAIN_GATE = passes_gate(mode="cot", **NEAR)
_DIRECT_UPDATES = understands_updates(mode="direct", **NEAR)
_CHAIN_UPDATES = understands_updates(mode="cot", **NEAR)


def _direct(what: str, measure: Any, low: float = float("-inf"), high: float = float("inf")) -> Condition:
    return Condition(what, "frontier", measure, low, high, _DIRECT_GATE)


def _update(what: str, measure: Any, low: float = float("-inf"), high: float = float("inf")) -> Condition:
    return Condition(what, "frontier", measure, low, high, _DIRECT_UPDATES)


def _chain(what: str, measure: Any, low: float = float("-inf"), high: float = float("inf")) -> Condition:
    return Condition(what, "frontier", measure, low, high, _CHAIN_GATE)


def _rereads_not(results: Results) -> str | None:
    found = mean("correct", arm="in_place", **CHAIN)(results)
    if found is not None and found.interval.mean >= RIGHT:
        return f"its chain reads the field again: in place right {found.interval.mean:.2f}"
    return _CHAIN_UPDATES(results)


def _thinks_freely(results: Results) -> str | None:
    """Chains that were trained to one line have no room to grow."""
    found = mean("generated", arm="full", **CHAIN)(results)
    if found is not None and found.interval.mean < FREE_CHAIN:
        return f"trained to chains of one line, {found.interval.mean:.0f} tokens"
    return _CHAIN_GATE(results)


def _knows_hoisted(results: Results) -> str | None:
    """A hoisted prompt has its field behind the rule: what it achieves is what a model can do with that order."""
    below = _DIRECT_GATE(results)
    if below is None and ONE_ORDER.match(results.name):
        return "trained on fields in front of their rules only"
    return below


def _hoisted(what: str, measure: Any, low: float = float("-inf"), high: float = float("inf")) -> Condition:
    return Condition(what, "frontier", measure, low, high, _knows_hoisted)


EDITING = (
    Claim(
        "stale-acts-on-the-old-value",
        "4, table 6",
        "A cache reused as it is decides by the old value.",
        "P(correct) 0.00",
        (_direct("stale, right", mean("correct", arm="stale", **DIRECT), high=WRONG),),
        COMMAND,
    ),
    Claim(
        "in-place-ignored",
        "4, table 6, figure 2c",
        "Answering at once, the model ignores a field whose own keys and values alone were computed again.",
        "P(correct) 0.00 at 0.6 % of the tokens",
        (_direct("in place, right", mean("correct", arm="in_place", **DIRECT), high=WRONG),),
        COMMAND,
    ),
    Claim(
        "chain-reads-the-field",
        "4, figure 2c",
        "With a chain of thought the same edit recovers the decision: the chain reads the field again.",
        "P(correct) 1.00 with a chain, 0.00 without (Qwen3-8B)",
        (
            _chain("chain, in place, right", mean("correct", arm="in_place", **CHAIN), low=RIGHT),
            _direct("at once, in place, right", mean("correct", arm="in_place", **DIRECT), high=WRONG),
        ),
        COMMAND,
        remark="The chains here are one line, in which the gatekeepers were trained to restate the field.",
    ),
    Claim(
        "chain-grows-longer",
        "appendix B",
        "Behind an edit in place the chain is longer: the work moves from the prefill into the chain.",
        "926 tokens for 249 (one instance)",
        (
            Condition(
                "tokens generated, in place - full",
                "frontier",
                difference("generated", {"arm": "in_place"}, {"arm": "full"}, **CHAIN),
                low=1.0,
                needs=_thinks_freely,
            ),
        ),
        COMMAND,
    ),
    Claim(
        "stickiness-by-model",
        "4, figure 5a",
        "Given a chain, how completely the edit in place recovers the decision depends on the model.",
        "differs within Qwen3, not monotonic in size",
        (
            AcrossModels(
                "in place with a chain, right: largest - smallest of the models",
                "frontier",
                spread_between("correct", arm="in_place", **CHAIN),
                low=0.05,
                needs=_CHAIN_UPDATES,
            ),
        ),
        COMMAND,
        remark="Models that read updates; without those in training a chain trusts the notes, and the spread is wider.",
    ),
    Claim(
        "suffix-recovers",
        "4, figure 2b",
        "Everything behind the field computed again is as good as a full prefill.",
        "recovery 1.0",
        (_direct("suffix, recovery", mean("recovery", arm="suffix", **DIRECT), 0.98, 1.02),),
        COMMAND,
        remark="True by construction of the cache, and so a check of ours.",
    ),
    Claim(
        "erratum",
        "4, table 6",
        "One line behind the context that says the new value recovers the decision.",
        "P(correct) 1.00 at 12.0 %",
        (_update("erratum, right", mean("correct", arm="erratum", **DIRECT), low=RIGHT),),
        COMMAND,
        remark="Only of models that read updates in a plain prefill; see the identity of erratum and prefill.",
    ),
    Claim(
        "field-erratum",
        "4, table 6",
        "The line together with the field computed again recovers the decision as well.",
        "P(correct) 1.00 at 12.6 %",
        (_update("field+erratum, right", mean("correct", arm="field+erratum", **DIRECT), low=RIGHT),),
        COMMAND,
    ),
    Claim(
        "edits-are-cheap",
        "4, table 6",
        "These edits compute a small part of the prompt's tokens.",
        "in place 0.6 %, hoisted 5.2 %, line 12.0 %, both 12.6 %",
        tuple(
            Condition(f"{arm}, share of tokens", "frontier", mean("share", arm=arm, **LONG), high=most)
            for arm, most in (("in_place", 0.02), ("hoist", 0.2), ("erratum", 0.25), ("field+erratum", 0.25))
        ),
        COMMAND,
        remark="Of prompts of 300 tokens or more; the share of one line is a matter of the prompt's length.",
    ),
    Claim(
        "erratum-with-a-chain",
        "figure 2c",
        "The line fixes both modes: with a chain of thought it is right too.",
        "P(correct) 1.00",
        (
            Condition(
                "chain, erratum, right",
                "frontier",
                mean("correct", arm="erratum", **CHAIN),
                low=RIGHT,
                needs=_CHAIN_UPDATES,
            ),
        ),
        COMMAND,
    ),
    Claim(
        "line-beats-in-place-with-a-chain",
        "7, E3, figure 10",
        "Where a chain does not read the field again, the line is more often right than the edit in place.",
        "McNemar p = 0.031 on such models",
        (
            Condition(
                "chain, right, erratum - in place",
                "frontier",
                sooner_right({"arm": "erratum"}, {"arm": "in_place"}, **CHAIN),
                low=0.0,
                needs=_rereads_not,
            ),
        ),
        COMMAND,
        remark="The models are chosen by the edit in place itself, as in the study, which favours the line.",
    ),
    Claim(
        "erratum-by-architecture",
        "appendix E, figure 18",
        "With a chain of thought the line works with attention and sliding windows, and less well on a hybrid.",
        "attention and sliding windows recover, hybrid partly, pure state-space model weakly",
        (
            AcrossModels(
                "chain, erratum, right: attention - hybrid",
                "frontier",
                lead_of(
                    "correct",
                    lambda name: "hybrid" not in name and "no-updates" not in name,
                    lambda name: "hybrid" in name,
                    arm="erratum",
                    mode="cot",
                    task="gated",
                ),
                low=0.05,
                needs=_CHAIN_GATE,
            ),
        ),
        COMMAND,
        remark="Small models trained from scratch on this task. A line that is only appended is a plain prefill, so "
        "this compares models and not caches. The hybrid here has short convolutions (LFM2), the study's a state-space "
        "scan; no model with one was trained.",
    ),
    Claim(
        "hoist",
        "4, table 6",
        "A prompt written with the field at its end is right too, and cheaper than the line.",
        "P(correct) 1.00 at 5.2 %",
        (
            _hoisted("hoist, right", mean("correct", arm="hoist", **DIRECT), low=RIGHT),
            _hoisted(
                "share of tokens, hoist - erratum",
                difference("share", {"arm": "hoist"}, {"arm": "erratum"}, **DIRECT),
                high=0.0,
            ),
        ),
        COMMAND,
    ),
    Claim(
        "field-erratum-matches-hoist",
        "4",
        "The line together with the field matches the hoisted prompt without rewriting it.",
        "1.00 and 1.00",
        (
            Condition(
                "right, field+erratum - hoist",
                "frontier",
                equivalent("correct", 0.1, {"arm": "field+erratum"}, {"arm": "hoist"}, **DIRECT),
                -0.1,
                0.1,
                lambda results: _knows_hoisted(results) or _DIRECT_UPDATES(results),
            ),
        ),
        COMMAND,
    ),
    Claim(
        "cacheblend-fails",
        "4, table 6",
        "Computing again the 15 % of tokens whose values deviate most is cheap and wrong.",
        "P(correct) 0.13 at 14.5 %",
        (
            _direct("cacheblend@15%, right", mean("correct", arm="cacheblend@15%", **DIRECT), high=0.5),
            _direct(
                "right, full - cacheblend@15%",
                sooner_right({"arm": "full"}, {"arm": "cacheblend@15%"}, **DIRECT),
                low=0.0,
            ),
        ),
        COMMAND,
    ),
    Claim(
        "selective-in-the-limit",
        "4, figure 2b",
        "The field and the K tokens of largest causal effect recover more of the decision the larger K is.",
        "climbs to 1.0",
        (
            _direct(
                "recovery, selective@64 - selective@1",
                difference("recovery", {"arm": "selective@64"}, {"arm": "selective@1"}, **DIRECT),
                low=0.0,
            ),
            _direct("recovery, selective@64", mean("recovery", arm="selective@64", **DIRECT), low=0.5),
        ),
        COMMAND,
        remark="Here the chosen tokens are really computed again, with stale tokens before them. The claims of "
        "section 3 put exact cells in their places.",
    ),
    Claim(
        "fewest-tokens-by-model",
        "4, figures 5b and 17",
        "The smallest K that is right depends on the model, so K tokens are no default.",
        "about 4 at 8B, more than 64 at 4B",
        (
            AcrossModels(
                "octaves between the largest and the smallest K that is right in 0.9",
                "frontier",
                octaves_between(fewest_tokens(0.9, "selective", **DIRECT)),
                low=1.0,
                needs=_DIRECT_GATE,
            ),
        ),
        COMMAND,
    ),
    Claim(
        "wording-redundant",
        "3, figure 3d",
        "Once the new value is said, how it is said matters little: bare, tagged, or with an explicit override.",
        "P(safe) about 1.0 for each",
        (
            _update("bare, right", mean("correct", arm="erratum:bare", **WORDS), low=RIGHT),
            _update("tagged, right", mean("correct", arm="erratum:tagged", **WORDS), low=RIGHT),
            _update("override, right", mean("correct", arm="erratum:erratum", **WORDS), low=RIGHT),
        ),
        COMMAND,
    ),
    Claim(
        "confrontation-hurts",
        "3, figure 3d",
        "A line that tells the model to disregard its conclusion and evaluate again does worse.",
        "0.81 for 1.0",
        (
            _update(
                "P(correct), override - confrontational",
                difference("p_correct", {"arm": "erratum:erratum"}, {"arm": "erratum:confrontational"}, **WORDS),
                low=0.02,
            ),
        ),
        COMMAND,
    ),
    Claim(
        "erratum-is-a-prefill",
        "ours",
        "A line that is only appended leaves the cache of a plain prefill of the amended text. What it achieves is the "
        "model's ability to read updates, not a property of the cache.",
        "not stated",
        (
            Condition(
                "same answer as a prefill of the amended text",
                "frontier",
                same_as_plain_update({"arm": "erratum", **DIRECT}),
                low=0.9,
            ),
        ),
        COMMAND,
        remark="Models below the inclusion gate count: the identity does not depend on what they can do.",
    ),
)
