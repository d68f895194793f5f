"""Verdicts follow from rows: a claim changes its status when the rows change. All results here are made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest

from editable_cache.errors import ResultsError
from editable_cache.evaluation.report import CLAIMS, Claim, Condition, Evidence, Measured, Verdict, gather, judge
from editable_cache.evaluation.report.across import fewest_tokens
from editable_cache.evaluation.report.claim import STATUSES, AcrossModels
from editable_cache.evaluation.report.depth import written_before_read
from editable_cache.evaluation.report.measures import difference, equivalent, mean, sooner_right
from editable_cache.evaluation.results import FORMAT, Results, Row
from editable_cache.evaluation.statistics import Interval, adjusted, bootstrap

MADE_UP = {"editable_cache": "0", "transformers": "0", "torch": "0", "python": "0", "processor": "none", "threads": 1}
DOMAINS = [f"domain {number}" for number in range(10)]
RIGHT = {"full": 1.0, "hoist": 1.0, "erratum": 1.0, "field+erratum": 1.0, "suffix": 1.0, "stale": 0.0, "in_place": 0.0,
         "cacheblend@15%": 0.1, **{f"selective@{k}": float(k > 4) for k in (1, 2, 4, 8, 16, 32, 64)}}  # fmt: skip
SHARES = {"full": 1.0, "hoist": 0.05, "erratum": 0.12, "field+erratum": 0.126}


def results(rows: list[Row], *, study: str = "frontier", model: str = "made up", **settings: Any) -> Results:
    return Results(study, model, settings, MADE_UP, tuple(rows))


def frontier(right: Mapping[str, float], *, mode: str = "direct", gate: float = 1.0, update: float = 1.0) -> list[Row]:
    """Rows of 40 items, of which the first ``share * 40`` are right."""
    rows: list[Row] = []
    for place, domain in enumerate(DOMAINS):
        for number in range(4):
            done = 4 * place + number
            item = f"gated/{mode}/20/0/{domain}/{number}"
            same = {"task": "gated", "mode": mode, "domain": domain}
            told = {name: done < 40 * share for name, share in (("old", gate), ("new", gate), ("update", update))}
            rows.append({"key": f"gate/{item}", "arm": "gate", **same, **told})
            for arm, share in right.items():
                is_right = done < 40 * share
                facts = {
                    "arm": arm,
                    "set": "direct" if mode == "direct" else "cot",
                    "share": SHARES.get(arm, 0.02),
                    "tokens": 100,
                }
                facts |= {"correct": is_right, "recovery": float(is_right), "p_correct": 0.99 if is_right else 0.01}
                rows.append({"key": f"{facts['set']}/{item}", **facts, **same})
    return rows


def verdict(claim: str, *some: Results) -> Verdict:
    (found,) = judge([each for each in CLAIMS if each.id == claim], Evidence(some))
    return found


def test_every_claim_says_what_it_needs() -> None:
    assert len(CLAIMS) == len({claim.id for claim in CLAIMS}) >= 45
    for claim in CLAIMS:
        assert claim.text.endswith(".")
        assert claim.section
        assert claim.figure
        if claim.conditions:
            assert claim.command.startswith("python -m evidence.")
            assert not claim.reason
        else:
            assert bool(claim.reason) != bool(claim.unmeasured), claim.id


def test_without_results_nothing_is_replicated() -> None:
    for found in judge(CLAIMS, Evidence(())):
        assert found.status == ("not testable here" if found.claim.reason else "not measured")
        assert found.why
        if found.claim.conditions:
            assert found.claim.command in found.why


FLIPS: dict[str, Callable[[dict[str, float]], dict[str, float]]] = {
    "stale-acts-on-the-old-value": lambda right: {**right, "stale": 1.0},
    "in-place-ignored": lambda right: {**right, "in_place": 1.0},
    "erratum": lambda right: {**right, "erratum": 0.0},
    "field-erratum": lambda right: {**right, "field+erratum": 0.0},
    "hoist": lambda right: {**right, "hoist": 0.0},
    "cacheblend-fails": lambda right: {**right, "cacheblend@15%": 1.0},
    "selective-in-the-limit": lambda right: {**right, "selective@64": 0.0, "selective@1": 1.0},
    "suffix-recovers": lambda right: {**right, "suffix": 0.0},
}


@pytest.mark.parametrize("claim", FLIPS)
def test_a_claim_flips_with_its_rows(claim: str) -> None:
    assert verdict(claim, results(frontier(RIGHT))).status == "replicated"
    other = verdict(claim, results(frontier(FLIPS[claim](RIGHT))))
    assert other.status == "not on these models"
    assert other.why.startswith("Fails: ")


def test_an_interval_on_both_sides_decides_nothing() -> None:
    found = verdict("in-place-ignored", results(frontier({**RIGHT, "in_place": 0.25})))
    assert (found.status, found.by_model) == ("undecided", {"made up": "undecided"})


def test_few_domains_decide_nothing() -> None:
    few = [row for row in frontier(RIGHT) if row["domain"] in DOMAINS[:4]]
    assert verdict("in-place-ignored", results(few)).by_model == {"made up": "undecided"}


def test_models_that_differ_are_mixed() -> None:
    one, other = frontier(RIGHT), frontier({**RIGHT, "in_place": 1.0})
    found = verdict("in-place-ignored", results(one, model="one"), results(other, model="other"))
    assert (found.status, found.by_model) == ("mixed", {"one": "holds", "other": "fails"})


def test_a_model_below_the_gate_does_not_count() -> None:
    weak = results(frontier({**RIGHT, "in_place": 1.0}, gate=0.5), model="weak")
    alone = verdict("in-place-ignored", weak)
    assert alone.status == "not testable here"
    assert "weak left out: full prefills with old value decide right 0.50, gate 0.8" in alone.why
    assert verdict("in-place-ignored", weak, results(frontier(RIGHT))).by_model == {"made up": "holds"}


@pytest.mark.parametrize("claim", ["hoist", "field-erratum-matches-hoist"])
def test_a_hoisted_prompt_is_asked_of_models_that_know_its_order(claim: str) -> None:
    """Its field stands behind the rule; a model that never saw that fails at the order, not at the edit."""
    lost = frontier({**RIGHT, "hoist": 0.0})
    assert verdict(claim, results(lost, model="gatekeeper")).status == "not testable here"
    assert verdict(claim, results(lost, model="small-llama-no-updates")).status == "not testable here"
    assert verdict(claim, results(lost, model="gatekeeper-any-order")).status == "not on these models"
    assert verdict(claim, results(lost, model="somebody/else")).status == "not on these models"


def test_chains_of_one_line_can_not_grow() -> None:
    def chains(tokens: int, longer: int) -> Results:
        rows = frontier({"in_place": 1.0, "full": 1.0}, mode="cot")
        return results([{**row, "generated": tokens + longer * (row["arm"] == "in_place")} for row in rows])

    assert verdict("chain-grows-longer", chains(18, 0)).status == "not testable here"
    assert verdict("chain-grows-longer", chains(250, 0)).status == "not on these models"
    assert verdict("chain-grows-longer", chains(250, 600)).status == "replicated"


def test_the_line_beats_the_edit_in_place_where_the_chain_trusts_the_notes() -> None:
    for in_place, erratum, status in (
        (0.3, 1.0, "replicated"),
        (0.3, 0.3, "undecided"),
        (1.0, 1.0, "not testable here"),
    ):
        chain = frontier({"in_place": in_place, "erratum": erratum, "full": 1.0}, mode="cot")
        assert verdict("line-beats-in-place-with-a-chain", results(chain)).status == status


def test_errata_ask_that_updates_are_understood() -> None:
    deaf = results(frontier({**RIGHT, "erratum": 0.0}, update=0.0), model="deaf")
    assert verdict("erratum", deaf).status == "not testable here"
    assert verdict("in-place-ignored", deaf).status == "replicated"
    assert verdict("erratum-is-a-prefill", deaf).status == "replicated"
    odd = results(frontier({**RIGHT, "erratum": 1.0}, update=0.0), model="odd")
    assert verdict("erratum-is-a-prefill", odd).status == "not on these models"


def test_the_chain_of_thought_is_judged_with_its_own_rows() -> None:
    direct, chain = frontier(RIGHT), frontier({"in_place": 1.0, "full": 1.0}, mode="cot")
    assert verdict("chain-reads-the-field", results([*direct, *chain])).status == "replicated"
    assert verdict("chain-reads-the-field", results(direct)).status == "not measured"
    ignored = frontier({"in_place": 0.0, "full": 1.0}, mode="cot")
    assert verdict("chain-reads-the-field", results([*direct, *ignored])).status == "not on these models"


def test_rows_of_two_files_are_joined_and_counted_once() -> None:
    direct, chain = frontier(RIGHT), frontier({"in_place": 1.0, "full": 1.0}, mode="cot")
    late = [{**row, "seconds": 2.0} for row in direct]
    joined = Evidence((results(direct), results([*late, *chain], more=True))).of("frontier")
    assert [len(each.rows) for each in joined] == [len(direct) + len(chain)]
    assert verdict("chain-reads-the-field", results(direct), results(chain, more=True)).status == "replicated"


def test_claims_over_models_compare_them() -> None:
    early = frontier(RIGHT)
    late = frontier({**RIGHT, **{f"selective@{k}": 0.0 for k in (1, 2, 4, 8, 16, 32)}})
    found = verdict("fewest-tokens-by-model", results(early, model="early"), results(late, model="late"))
    assert found.status == "replicated"
    assert found.findings[0].measured is not None
    assert found.findings[0].measured.note == "late against early"
    same = verdict("fewest-tokens-by-model", results(early, model="early"), results(early, model="twin"))
    assert same.status == "not on these models"
    assert verdict("fewest-tokens-by-model", results(early)).status == "not measured"


def test_fewest_tokens() -> None:
    measure = fewest_tokens(0.9, "selective", set="direct")
    found = measure(results(frontier(RIGHT)))
    assert found == Interval(8.0, 8.0, 8.0, 40, 10)
    never = measure(results(frontier({"selective@1": 0.0, "selective@8": 0.5})))
    assert never is not None
    assert never.mean == 16.0


def test_mean_and_difference_are_the_bootstrap_of_the_rows() -> None:
    given = results(frontier({**RIGHT, "in_place": 0.25}))
    found = mean("correct", arm="in_place", set="direct")(given)
    assert found == Measured(bootstrap([i < 10 for i in range(40)], [i // 4 for i in range(40)]))
    apart = difference("correct", {"arm": "full"}, {"arm": "in_place"}, set="direct")(given)
    assert apart is not None
    assert apart.interval.mean == 0.75
    assert mean("correct", arm="unknown")(given) is None


def test_mcnemar_counts_discordant_items() -> None:
    given = results(frontier({**RIGHT, "cacheblend@15%": 0.5}))
    found = sooner_right({"arm": "full"}, {"arm": "cacheblend@15%"}, set="direct")(given)
    assert found is not None
    assert found.note == "20 against 0 discordant items"
    assert found.p == pytest.approx(binomtest(0, 20).pvalue)


def test_equivalence_needs_a_small_difference() -> None:
    given = results(frontier({**RIGHT, "hoist": 0.75}))
    close = equivalent("correct", 0.1, {"arm": "full"}, {"arm": "erratum"}, set="direct")(given)
    apart = equivalent("correct", 0.1, {"arm": "full"}, {"arm": "hoist"}, set="direct")(given)
    assert close is not None
    assert apart is not None
    assert (close.p, apart.p is not None and apart.p > 0.9) == (0.0, True)


def _tested(p: float, value: float) -> Condition:
    return Condition("made up", "frontier", lambda _: Measured(Interval(value, -1.0, 1.0, 9, 9), p), low=0.0)


def test_too_few_items_are_said_to_be_too_few() -> None:
    rows = frontier({"full": 1.0, "suffix": 1.0, "cacheblend@15%": 0.5})
    few = [row for row in rows if str(row["key"]).endswith("/0")]  # ten items, all alike
    for measure, said in ((mean("correct", arm="full"), True), (mean("correct", arm="cacheblend@15%"), False)):
        claim = Claim("made up", "", "", "", (Condition("it", "frontier", measure, low=0.8),), "python -m x")
        found = judge([claim], Evidence((results(few),)))[0]
        assert (found.status in ("undecided", "not on these models"), "too few" in found.why) == (True, said)


def test_p_values_are_adjusted_over_all_claims() -> None:
    p_values = (0.04, 0.04, 0.01, 0.9)
    claims = [Claim(str(n), "", "", "", (_tested(p, 0.5),), "python -m x") for n, p in enumerate(p_values)]
    found = judge(claims, Evidence((results(frontier(RIGHT)),)))
    assert [each.findings[0].p for each in found] == adjusted(p_values)
    assert [each.status for each in found] == ["undecided", "undecided", "replicated", "undecided"]
    alone = judge(claims[:1], Evidence((results(frontier(RIGHT)),)))
    assert alone[0].status == "replicated"
    against = Claim("against", "", "", "", (_tested(0.01, -0.5),), "python -m x")
    assert judge([against], Evidence((results(frontier(RIGHT)),)))[0].status == "not on these models"


def test_a_claim_over_models_waits_for_its_own_measure() -> None:
    asked = (
        Condition("each", "frontier", mean("correct", arm="full"), low=0.8),
        AcrossModels("all", "frontier", lambda some: None),
    )
    claim = Claim("both", "", "", "", asked, "python -m x")
    assert judge([claim], Evidence((results(frontier(RIGHT)),)))[0].status == "not measured"


def _timing(written: int, read: float) -> list[Row]:
    rows: list[Row] = []
    for domain in DOMAINS:
        facts = {"key": f"timing/{domain}", "probe": "timing", "task": "exchanged", "domain": domain}
        rows.append({**facts, "arm": "decision_by_lens_in_all_states", "measure": "depth", "value": read})
        for layer in range(11):
            right = 1.0 if layer >= written else 0.5
            rows.append({**facts, "arm": "clause at .", "measure": "accuracy", "x": layer, "value": right})
    return rows


def test_written_before_read() -> None:
    found = written_before_read("clause")(results(_timing(3, 0.75)))
    assert found is not None
    assert found.interval.mean == pytest.approx(0.45)
    probed = results(_timing(3, 0.75), study="mechanism")
    assert verdict("write-before-read", probed).status == "replicated"
    other = [{**row, "task": "trigger", "key": f"{row['key']}/trigger"} for row in _timing(9, 0.1)]
    both = written_before_read("clause")(results([*_timing(3, 0.75), *other]))
    assert both is not None
    assert both.interval.mean == pytest.approx(0.45), "tokens of another task have the same names"
    assert verdict("write-before-read", results(_timing(9, 0.75), study="mechanism")).status == "not on these models"


def write(folder: Path, name: str, found: Results, **changes: Any) -> Path:
    """A results file as a run writes it."""
    content = {"format": FORMAT, "study": found.study, "model": found.model, "settings": dict(found.settings),
               "environment": dict(found.environment), "rows": list(found.rows), **changes}  # fmt: skip
    path = folder / name
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_folders_and_files_are_gathered_once(tmp_path: Path) -> None:
    first = write(tmp_path, "b.json", results(frontier(RIGHT)))
    write(tmp_path, "a.json", results(_timing(3, 0.75), study="mechanism"))
    (tmp_path / "c.partial.jsonl").write_text("not finished")
    found = gather([tmp_path, first])
    assert (found.studies, found.models) == (["frontier", "mechanism"], ["made up"])


HEAD: dict[str, Any] = {"format": FORMAT, "study": "s", "model": "m", "settings": {}, "environment": {}}
BAD = {
    "damaged": ("{", "expected JSON"),
    "another format": (json.dumps({"format": FORMAT + 1}), f"expected format {FORMAT}, got {FORMAT + 1}"),
    "a list": ("[]", f"expected format {FORMAT}, got list"),
    "no rows": (json.dumps({**HEAD, "rows": []}), "expected at least one row"),
    "no key": (json.dumps({**HEAD, "rows": [{"arm": "x"}]}), "expected a key"),
    "not finite": (
        json.dumps({**HEAD, "rows": [{"key": "k", "value": float("nan")}]}),
        "expected finite numbers, got value = nan",
    ),
    "beyond floats": (json.dumps({**HEAD, "rows": [{"key": "k", "x": 10**400}]}), "expected finite numbers, got x = 1"),
    "no object": (json.dumps({**HEAD, "rows": [[]]}), "row 0: expected an object, got []"),
    "a text for a number": (
        json.dumps({**HEAD, "rows": [{"key": "k", "value": 1.0}, {"key": "k", "value": "much"}]}),
        "row 1: expected 'value' as in other rows, a number, got 'much'",
    ),
    "a number for yes or no": (
        json.dumps({**HEAD, "rows": [{"key": "k", "correct": True}, {"key": "k", "correct": 5}]}),
        "row 1: expected 'correct' as in other rows, yes or no, got 5",
    ),
    "no decision": (
        json.dumps({**HEAD, "study": "frontier", "rows": [{"key": "k", "arm": "stale"}]}),
        "row 0: expected 'correct', got key, arm",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_results_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    text, message = BAD[kind]
    (tmp_path / "bad.json").write_text(text, encoding="utf-8")
    with pytest.raises(ResultsError, match=r"bad\.json.*") as caught:
        gather([tmp_path])
    assert message in str(caught.value)


def test_nothing_and_twins_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="got none"):
        gather([tmp_path])
    with pytest.raises(ResultsError, match="found nothing there"):
        gather([tmp_path / "absent.json"])
    for name in ("one.json", "two.json"):
        write(tmp_path, name, results(frontier(RIGHT)))
    with pytest.raises(ResultsError, match=r"with the same settings is in .*one\.json already"):
        gather([tmp_path])


def test_number_types_are_models_of_their_own_and_versions_are_not_joined(tmp_path: Path) -> None:
    """Joined, each item would count twice and every interval would be too narrow."""
    rows = frontier({"stale": 0.0})
    for dtype in ("float32", "bfloat16"):
        write(tmp_path, f"{dtype}.json", results(rows, dtype=dtype))
    found = gather([tmp_path])
    assert found.models == ["made up (bfloat16)", "made up (float32)"]
    assert [len(each.rows) for each in found.of("frontier")] == [len(rows), len(rows)]
    write(tmp_path, "older.json", results(rows, dtype="float16"), environment={"editable_cache": "0.0.1"})
    with pytest.raises(ResultsError, match=r"expected one version of editable_cache, got .*0\.0\.1"):
        gather([tmp_path])


def test_what_two_files_say_of_the_same_must_agree(tmp_path: Path) -> None:
    write(tmp_path, "one.json", results(frontier({"stale": 0.0, "full": 1.0})))
    write(tmp_path, "more.json", results(frontier({"suffix": 1.0}), more=1))
    write(tmp_path, "same.json", results(frontier({"full": 1.0}), again=1))
    found = gather([tmp_path]).of("frontier")[0]
    assert len(found.rows) == 40 * 4, "gate, stale, suffix, full, each once"
    write(tmp_path, "other.json", results(frontier({"full": 0.5}), other=1))
    with pytest.raises(ResultsError, match=r"expected the same of what both measured, got other numbers for .*full"):
        gather([tmp_path])


@pytest.mark.parametrize("model", ["here/small-llama", "small-llama/", "small-llama"])
def test_a_folder_before_the_name_makes_no_other_model(model: str) -> None:
    lost = results(frontier({**RIGHT, "hoist": 0.0}), model=model)
    assert (lost.name, verdict("hoist", lost).status) == ("small-llama", "not testable here")


def test_statuses_are_those_that_are_shown() -> None:
    assert {each.status for each in judge(CLAIMS, Evidence((results(frontier(RIGHT)),)))} <= set(STATUSES)
