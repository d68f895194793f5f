"""Claims on weights, compositions, trajectories and passages flip with their rows. All results here are made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scipy.stats import binomtest

from editable_cache.evaluation.report import CLAIMS, Evidence, Verdict, judge
from editable_cache.evaluation.report.measures import apart, interval, value_of
from editable_cache.evaluation.report.unpaired import lost_share, more_lost
from editable_cache.evaluation.results import Results, Row

DOMAINS = 10
COUNT = 40


def results(rows: list[Row], study: str, model: str = "made up") -> Results:
    return Results(study, model, {}, {}, tuple(rows))


def verdict(claim: str, *some: Results) -> Verdict:
    (found,) = judge([each for each in CLAIMS if each.id == claim], Evidence(some))
    return found


def items() -> list[Row]:
    return [{"key": f"item {n}", "domain": f"domain {n // (COUNT // DOMAINS)}"} for n in range(COUNT)]


def weights(**changes: Any) -> Results:
    """Rows of ``evidence.weights``."""
    flips = {"in_place": False, "erratum": True, "field+erratum": True, "ROME": True, "LoRA": True}
    seconds = {"in_place": 0.07, "erratum": 0.1, "field+erratum": 0.1, "ROME": 5.0, "LoRA": 3.0}
    rows = []
    for item in items():
        for arm in flips:
            heavy = arm in ("ROME", "LoRA")
            row = {"kind": "arm", "arm": arm, "eligible": True, "flips": flips[arm], "cpu_seconds": seconds[arm]}
            row |= {"contamination": float(heavy), "collateral": 0.5 * heavy}
            row |= {"restored": True} if heavy else {}
            rows.append({**item, **row, **changes.get(arm, {}), **changes.get("every", {})})
    return results(rows, "weights")


WEIGHTS: dict[str, dict[str, Any]] = {
    "all-flip-the-decision": {"ROME": {"flips": False}},
    "in-place-does-not-flip": {"in_place": {"flips": True}},
    "weights-contaminate": {"LoRA": {"contamination": 0.0}},
    "cache-does-not-contaminate": {"erratum": {"contamination": 1.0}},
    "weights-damage-others": {"ROME": {"collateral": 0.0}},
    "cache-damages-nothing": {"in_place": {"collateral": 1.0}},
    "weights-are-slower": {"LoRA": {"cpu_seconds": 0.2}},
    "weights-are-restored": {"ROME": {"restored": False}, "LoRA": {"restored": False}},
}


@pytest.mark.parametrize("claim", WEIGHTS)
def test_claims_on_weights_flip(claim: str) -> None:
    assert verdict(claim, weights()).status == "replicated"
    assert verdict(claim, weights(**WEIGHTS[claim])).status == "not on these models"


def test_items_that_the_field_does_not_decide_do_not_count() -> None:
    found = verdict("weights-contaminate", weights(every={"eligible": False}))
    assert found.status == "not testable here"
    assert "full prefills decide right 0.00, gate 0.64" in found.why


def composing(agrees: Callable[[Row], bool], *, full: bool = True) -> Results:
    """Rows of ``evidence.composing``."""
    kinds: list[Row] = [
        {"test": "content", "content": "rule", "point": "ahead", "task": "gated", "seam": 1, "rotated": True},
        {"test": "content", "content": "rule", "point": "ahead", "task": "gated", "seam": 1, "rotated": False},
        {"test": "content", "content": "fact", "point": "ahead", "task": "gated", "seam": 1, "rotated": True},
        *({"test": "content", "content": content, "point": "end", "task": "gated", "seam": 1, "rotated": True}
          for content in ("rule", "fact")),
        *({"test": "split", "border": border, "point": "end", "task": "cross_reference", "seam": 1, "rotated": True}
          for border in ("one", "together", "split")),
    ]  # fmt: skip
    rows = []
    for item in items():
        for kind in kinds:
            right = agrees(kind)
            rows.append({**item, **kind, "mode": "direct", "agrees": right, "correct": right, "full_correct": full,
                         "cosine": 0.99 if right else 0.7, "kl": 0.1, "tokens": 300})  # fmt: skip
    return results(rows, "composing")


def test_claims_on_compositions_flip() -> None:
    study = composing(lambda row: row["rotated"] and row.get("border") != "split")
    for claim in ("decisions-preserved", "rotation-needed", "cross-reference-split", "independent-split"):
        assert verdict(claim, study).status == "replicated", claim
    alike = composing(lambda row: False)
    assert verdict("decisions-preserved", alike).status == "not on these models"
    assert verdict("rotation-needed", composing(lambda row: not row["rotated"])).status == "not on these models"
    assert verdict("cross-reference-split", alike).status == "undecided"
    odd = composing(lambda row: row.get("border") != "together")
    assert verdict("cross-reference-split", odd).status == "not on these models"
    assert verdict("independent-split", odd).status == "not on these models"
    weak = composing(lambda row: True, full=False)
    assert verdict("decisions-preserved", weak).status == "not testable here"


def test_a_rule_behind_its_field_is_another_claim() -> None:
    """The study splices the rule before its field; what stands the other way round must not count for it."""
    order = composing(lambda row: row["point"] == "ahead")
    assert verdict("decisions-preserved", order).status == "replicated"
    assert verdict("rule-behind-its-field", order).status == "replicated"
    assert verdict("field-behind-its-rule", order).status == "replicated"
    turned = composing(lambda row: row["point"] != "ahead")
    assert verdict("decisions-preserved", turned).status == "not on these models"
    assert verdict("rule-behind-its-field", turned).status == "not on these models"
    assert verdict("field-behind-its-rule", turned).status == "not on these models"


def test_short_prompts_say_nothing_on_sliding_windows() -> None:
    short = list(composing(lambda row: True).rows)  # of 300 tokens
    long = [{**row, "tokens": 900} for row in short]
    for model, rows, status in (
        ("gemma3_270m", short, "not measured"),
        ("gemma3_270m", long, "replicated"),
        ("small-gemma3-any-order", short, "replicated"),
        ("llama", long, "not testable here"),
    ):
        assert verdict("sliding-windows", results(rows, "composing", model)).status == status


def turns(arm: str, slope: float) -> Results:
    """Rows of ``evidence.horizon``: of one arm, the cosine falls by ``slope`` a turn, decisions with it."""
    rows = []
    for number, item in enumerate(items()):
        for turn in range(1, 29):
            lost = slope * turn
            same: Row = {"turn": turn, "cosine": 0.999 - lost,
                         "agrees": (number * 7 + turn * 13) % 100 >= 100 * 10 * lost}  # fmt: skip
            rows.append({**item, "arm": arm, **same, "error": 1e-5 + lost, "control": 2.0})
    return results(rows, "horizon")


TRAJECTORIES = {
    "no-drift-of-logits": "append_only",
    "no-drift-of-decisions": "append_only",
    "refreshed-in-place-drifts-not": "field+erratum",
    "refreshed-in-place-agrees": "field+erratum",
}


@pytest.mark.parametrize("claim", TRAJECTORIES)
def test_claims_on_trajectories_flip(claim: str) -> None:
    mine, other = TRAJECTORIES[claim], {"append_only": "field+erratum", "field+erratum": "append_only"}
    assert verdict(claim, turns(mine, 0.0)).status == "replicated"
    assert verdict(claim, turns(mine, 0.003)).status == "not on these models"
    assert verdict(claim, turns(other[mine], 0.0)).status == "not measured"


def heads(count: int, random: float) -> Results:
    """Rows of the probe of heads, on a model that has so many."""
    rows: list[Row] = []
    for item in items():
        facts = {**item, "probe": "heads", "task": "exchanged", "pair": "rule"}
        rows.append({**facts, "arm": "single", "measure": "effects", "effects": [0.0] * count})
        for arm, value in (("top_of_other_domains", 0.8), ("random", random)):
            rows.append({**facts, "arm": arm, "measure": "recovery", "x": 12, "value": value})
        rows.append({**item, "probe": "inclusion", "task": "exchanged", "states": 4, "right": 4})
    return results(rows, "mechanism")


def test_twelve_heads_of_sixteen_are_no_choice() -> None:
    assert verdict("read-heads", heads(270, 0.0)).status == "replicated"
    assert verdict("read-heads", heads(270, 0.7)).status == "not on these models"
    few = verdict("read-heads", heads(16, 0.7))
    assert few.status == "not testable here"
    assert "16 attention heads in all" in few.why


def diagonal(gap: float) -> Results:
    arms = ("stale", "in_place", "selective@32", "suffix", "erratum", "field+erratum", "full")
    rows = [
        {
            **item,
            "arm": arm,
            "recomputed_correct": True,
            "difference": gap + 0.01 * (n % 3 - 1),
            "composed_recovery": 0.5,
        }
        for n, item in enumerate(items())
        for arm in arms
    ]
    return results(rows, "diagonal")


def test_the_diagonal_flips() -> None:
    assert verdict("diagonal", diagonal(0.0)).status == "replicated"
    assert verdict("diagonal", diagonal(0.5)).status == "not on these models"


def passages(multi: float, single: float) -> Results:
    """Rows of ``evidence.multihop``: what blind reuse loses of 2 nats that the passages give."""
    rows = []
    for item in items():
        for hops, lost in (("multi", multi), ("single", single)):
            facts = {"key": f"{hops} {item['key']}", "hops": hops, "cluster": item["key"]}
            rows.append({**facts, "arm": "seam@0", "drop": 2 * lost})
            rows.append({**facts, "arm": "none", "drop": 2.0})
    return results(rows, "multihop")


def test_lost_shares() -> None:
    blind, none = {"arm": "seam@0"}, {"arm": "none"}
    found = lost_share("drop", blind, none, hops="multi")(passages(0.5, 0.0))
    assert found is not None
    assert found.interval.mean == pytest.approx(0.5)
    more = more_lost("drop", blind, none, {"hops": "multi"}, {"hops": "single"})(passages(0.5, 0.1))
    assert more is not None
    assert more.interval.mean == pytest.approx(0.4)
    assert lost_share("drop", blind, {"arm": "absent"})(passages(0.5, 0.1)) is None
    assert verdict("blind-reuse-halves-multi-hop", passages(0.5, 0.1)).status == "replicated"
    assert verdict("blind-reuse-halves-multi-hop", passages(0.1, 0.1)).status == "not on these models"


def test_constant_values_have_the_bounds_of_their_kind() -> None:
    rows = [{**item, "correct": True, "recovery": 1.0, "collateral": [0.0, 0.0], "arm": "a"} for item in items()]
    exact = binomtest(COUNT, COUNT).proportion_ci(0.95)
    counted, plain, listed = (interval(rows, name) for name in ("correct", "recovery", "collateral"))
    assert counted is not None
    assert plain is not None
    assert listed is not None
    assert (counted.low, counted.high) == pytest.approx((exact.low, exact.high))
    assert (plain.low, plain.high) == (1.0, 1.0)
    assert (listed.low, listed.high) == pytest.approx((1 - exact.high, 1 - exact.low))
    same = apart([(row, row) for row in rows], "correct")
    assert (same.mean, same.low, same.high) == pytest.approx((0.0, exact.low - 1, 1 - exact.low))
    assert value_of({"a": [1.0, 0.0]}, "a") == 0.5
    assert value_of({"a": []}, "a") is None
    assert value_of({"a": "1"}, "a") is None
