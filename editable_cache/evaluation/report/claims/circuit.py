"""Claims on components: appendix D of the study, table 5, figure 15."""

from __future__ import annotations

from typing import Any

from editable_cache.evaluation.report.claim import Claim, Condition
from editable_cache.evaluation.report.claims.mechanism import COMMAND, STUDY
from editable_cache.evaluation.report.depth import best_over
from editable_cache.evaluation.report.measures import chosen, difference, mean, passes_inclusion
from editable_cache.evaluation.results import Results


def _asks(what: str, measure: Any, low: float = float("-inf"), high: float = float("inf")) -> Condition:
    return Condition(what, STUDY, measure, low, high, passes_inclusion("trigger", "exchanged"))


MANY_HEADS = 100
"""Of a model, from which on twelve are a choice."""


def _has_many_heads(results: Results) -> str | None:
    counts = {len(row["effects"]) for row in chosen(results, {"probe": "heads", "measure": "effects"})}
    if counts and max(counts) < MANY_HEADS:
        return f"{max(counts)} attention heads in all"
    return passes_inclusion("trigger", "exchanged")(results)


def _of_many(what: str, measure: Any, low: float = float("-inf"), high: float = float("inf")) -> Condition:
    return Condition(what, STUDY, measure, low, high, _has_many_heads)


HEADS: dict[str, Any] = {"probe": "heads", "measure": "recovery", "pair": "rule", "x": 12}
SCRUB: dict[str, Any] = {"probe": "scrubbing"}

CIRCUIT = (
    Claim(
        "read-heads",
        "appendix D (1), table 5",
        "Twelve attention heads at the last token read most of the decision; as many random ones read none.",
        "0.78, 0.77, 0.72, 0.82 (random 0.00)",
        (
            _of_many("best 12 of other domains", mean("value", arm="top_of_other_domains", **HEADS), low=0.6),
            _of_many("random 12", mean("value", arm="random", **HEADS), high=0.2),
        ),
        COMMAND,
        remark="Twelve of the 1,024 heads of an 8B model.",
    ),
    Claim(
        "write-heads-distributed",
        "appendix D (1), table 5",
        "Patching the best heads at one aggregator recovers little: the write is spread over many tokens.",
        "0.28, 0.08, 0.24, 0.11",
        (
            _of_many(
                "best 12 heads at the token of largest effect",
                mean("value", probe="writing", arm="write_top", measure="recovery", x=12),
                high=0.4,
            ),
            _of_many(
                "the best 12 - 12 random ones",
                difference(
                    "value", {"arm": "write_top"}, {"arm": "write_random"}, probe="writing", measure="recovery", x=12
                ),
                low=0.0,
            ),
        ),
        COMMAND,
    ),
    Claim(
        "conclusion-direction",
        "appendix D (2), figure 15b",
        "One direction at an aggregator, a difference of means over other domains, carries the decision far better "
        "than a random one.",
        "0.22, 0.10, 0.07 (random 0.01, 0.00, 0.00); near 0 on Qwen3-8B",
        (
            _asks(
                "direction - random, at the best layer",
                best_over("x", "direction", "random", probe="direction", measure="recovery"),
                low=0.02,
            ),
        ),
        COMMAND,
    ),
    Claim(
        "direction-is-redundant",
        "appendix D (2)",
        "The direction carries a part of what the whole stream of that token carries.",
        "39 % of the single-site patch",
        (
            _asks(
                "whole stream - direction, at the best layer",
                best_over("x", "whole", "direction", probe="direction", measure="recovery"),
                low=0.0,
            ),
        ),
        COMMAND,
    ),
    Claim(
        "sparse-features",
        "appendix D (3), figure 15e",
        "A sparse autoencoder has features that tell the conclusion at AUC 1.0 and cause nothing alone.",
        "AUC 1.00; clamped alone 0, ten 0.50",
        reason="A dictionary of 16,000 features for an 8B model's stream is not trained on 2 cores.",
    ),
    Claim(
        "scrubbing-faithful",
        "appendix D (4), table 5",
        "Notes of another input with the same conclusion leave the decision as it is.",
        "drift 0.02 to 0.04; cosine 0.999 to 1.000",
        (
            _asks("drift", mean("value", arm="same_conclusion", measure="drift", **SCRUB), high=0.15),
            _asks("cosine", mean("value", arm="same_conclusion", measure="cosine", **SCRUB), low=0.98),
        ),
        COMMAND,
    ),
    Claim(
        "scrubbing-necessary",
        "appendix D (4), table 5",
        "Only the note of the opposite conclusion moves the decision more than all the rest does.",
        "note 0.68 to 0.82, rest 0.18 to 0.32",
        (
            _asks("note", mean("value", arm="opposite_note", measure="recovery", **SCRUB), low=0.5),
            _asks("rest", mean("value", arm="opposite_rest", measure="recovery", **SCRUB), high=0.5),
            _asks(
                "note - rest",
                difference("value", {"arm": "opposite_note"}, {"arm": "opposite_rest"}, measure="recovery", **SCRUB),
                low=0.0,
            ),
        ),
        COMMAND,
        remark="The note is the eight positions of largest effect on that very item.",
    ),
    Claim(
        "attention-writes",
        "appendix D (5), table 5",
        "Attention is the main writer of the note, or as much as the MLPs.",
        "0.60 to 0.62, 0.44 to 0.56, 0.82 to 0.92, 0.42 to 0.66",
        (
            _asks(
                "attention's share below the cell of largest effect",
                mean("value", probe="writing", arm="attention_below_top_cell", measure="share"),
                low=0.42,
            ),
        ),
        COMMAND,
    ),
)
