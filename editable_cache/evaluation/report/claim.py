"""What a claim is, and how its verdict follows from intervals and thresholds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from editable_cache.evaluation.report.evidence import Evidence
from editable_cache.evaluation.results import Results
from editable_cache.evaluation.statistics import Interval, adjusted

Status = Literal["replicated", "mixed", "undecided", "not on these models", "not measured", "not testable here"]
STATUSES: tuple[Status, ...] = get_args(Status)

Outcome = Literal["holds", "fails", "undecided", "absent"]

ALPHA = 0.05
"""A test counts if its p-value, adjusted over all tests of the report, is below this."""

LEAST_CLUSTERS = 5
"""Below so many clusters drawing them again tells too little, and nothing is decided."""

ALL = "all models"


@dataclass(frozen=True)
class Measured:
    """What results say about one condition.

    Attributes:
        interval: mean and bounds.
        p: of a test that belongs to it, or None. With a p, the test decides and not the interval.
        note: more about it.
    """

    interval: Interval
    p: float | None = None
    note: str = ""


Measure = Callable[[Results], "Measured | None"]
MeasureOfAll = Callable[[Sequence[Results]], "Measured | None"]


@dataclass(frozen=True)
class Asked:
    """What a claim asks: the whole interval of a quantity lies between two thresholds.

    Attributes:
        what: the quantity, in words.
        study: the study that measures it.
        measure: the quantity from results; None where they do not have it.
        low, high: thresholds, both included.
        needs: why the results of a model do not count, or None where they do.
    """

    what: str
    study: str
    measure: Callable[..., Measured | None]
    low: float = -math.inf
    high: float = math.inf
    needs: Callable[[Results], str | None] = lambda results: None

    @property
    def threshold(self) -> str:
        """The thresholds in words."""
        if math.isinf(self.low):
            return f"≤ {self.high:g}"
        return f"≥ {self.low:g}" if math.isinf(self.high) else f"{self.low:g} to {self.high:g}"

    def outcome(self, measured: Measured, p: float | None) -> Outcome:
        """Holds or fails only if the interval lies on one side of the thresholds, or the test says so.

        Args:
            p: adjusted p-value of the measured test; None without a test.
        """
        if isinstance(self, Condition) and measured.interval.clusters < LEAST_CLUSTERS:
            return "undecided"
        inside = self.low <= measured.interval.mean <= self.high
        if p is not None and p < ALPHA:
            return "holds" if inside else "fails"
        if measured.interval.high < self.low or measured.interval.low > self.high:
            return "fails"
        if p is not None:
            return "undecided"
        if self.low <= measured.interval.low and measured.interval.high <= self.high:
            return "holds"
        return "undecided"


class Condition(Asked):
    """Asked of each model by itself: ``measure`` takes the results of one model (``Measure``)."""


class AcrossModels(Asked):
    """Asked of all models together: ``measure`` takes a list of results (``MeasureOfAll``)."""


@dataclass(frozen=True)
class Claim:
    """One claim of a study, with what would bear it out here.

    Attributes:
        id: short, unique.
        section: where it stands.
        text: what is claimed, in our words.
        figure: the number that was published.
        conditions: all must hold. Empty if it can't be tested here, and then ``reason`` says why; or if it was not
            built, and then ``unmeasured`` says so.
        command: what measures it.
        remark: what to know when reading the verdict.
    """

    id: str
    section: str
    text: str
    figure: str
    conditions: tuple[Condition | AcrossModels, ...] = ()
    command: str = ""
    reason: str = ""
    unmeasured: str = ""
    remark: str = ""


@dataclass(frozen=True)
class Finding:
    """One condition on one model.

    Attributes:
        model: its name, or ``ALL``.
        condition: what was asked.
        outcome: what came out.
        measured: None where the results do not have it.
        p: adjusted, where there is a test.
        left_out: why the model does not count; empty if it does.
    """

    model: str
    condition: Condition | AcrossModels
    outcome: Outcome = "absent"
    measured: Measured | None = None
    p: float | None = None
    left_out: str = ""


@dataclass(frozen=True)
class Verdict:
    """What came of a claim.

    Attributes:
        claim: the claim.
        status: replicated if every condition holds on every model that counts; not on these models if one fails on
            each; mixed if one fails on some; undecided if none fails, but an interval reaches over a threshold. Not
            testable here if the claim says so or if no model that was asked counts.
        why: what decided, in words.
        findings: everything that was looked at.
        by_model: what came out for each model that counts.
    """

    claim: Claim
    status: Status
    why: str
    findings: tuple[Finding, ...] = ()
    by_model: Mapping[str, Outcome] = field(default_factory=dict)

    @property
    def measured(self) -> list[str]:
        """For each condition what was measured on each model that counts, with its interval."""
        lines = []
        for condition in self.claim.conditions:
            found = [
                f"{each.model} {each.measured.interval}"
                for each in self.findings
                if each.condition is condition and each.measured is not None and not each.left_out
            ]
            if found:
                lines.append(f"{condition.what} ({condition.threshold}): {', '.join(found)}")
        return lines


def judge(claims: Sequence[Claim], evidence: Evidence) -> list[Verdict]:
    """A verdict for each claim. P-values are adjusted (Benjamini & Hochberg) over all tests of these claims."""
    found = [[each for condition in claim.conditions for each in _findings(condition, evidence)] for claim in claims]
    tested = [each for some in found for each in some if each.measured is not None and each.measured.p is not None]
    p_values = iter(adjusted([each.measured.p for each in tested if each.measured and each.measured.p is not None]))
    verdicts = []
    for claim, findings in zip(claims, found, strict=True):
        decided = []
        for each in findings:
            if each.measured is None:
                decided.append(each)
                continue
            p = None if each.measured.p is None else next(p_values)
            outcome = each.outcome if each.left_out else each.condition.outcome(each.measured, p)
            decided.append(replace(each, outcome=outcome, p=p))
        verdicts.append(_verdict(claim, tuple(decided)))
    return verdicts


def _findings(condition: Condition | AcrossModels, evidence: Evidence) -> list[Finding]:
    results = evidence.of(condition.study)
    reasons = {found.model: condition.needs(found) for found in results}
    if isinstance(condition, AcrossModels):
        counted = [found for found in results if reasons[found.model] is None]
        measured = condition.measure(counted) if counted else None
        return [Finding(ALL, condition, measured=measured)] if results else []
    findings = []
    for found in results:
        reason = reasons[found.model]
        if reason is not None:
            findings.append(Finding(found.model, condition, left_out=reason))
        else:
            findings.append(Finding(found.model, condition, measured=condition.measure(found)))
    return findings


def _verdict(claim: Claim, findings: tuple[Finding, ...]) -> Verdict:
    if not claim.conditions:
        status: Status = "not measured" if claim.unmeasured else "not testable here"
        return Verdict(claim, status, claim.unmeasured or claim.reason)
    counted = [each for each in findings if not each.left_out]
    by_model = _by_model(claim, counted)
    left_out = {each.model: f"{each.model} left out: {each.left_out}" for each in findings if each.left_out}
    aside = [reason for model, reason in left_out.items() if model not in by_model]
    if not by_model:
        if aside and all(each.outcome == "absent" for each in counted):
            return Verdict(claim, "not testable here", ". ".join(aside), findings)
        return Verdict(claim, "not measured", ". ".join((f"Not measured: run {claim.command}", *aside)), findings)
    outcomes = set(by_model.values())
    if "fails" in outcomes:
        status = "not on these models" if outcomes == {"fails"} else "mixed"
    else:
        status = "replicated" if outcomes == {"holds"} else "undecided"
    why = [reason for outcome in ("fails", "undecided") for reason in _that(outcome, claim, counted, by_model)]
    return Verdict(claim, status, ". ".join((*(why or ["Every condition holds"]), *aside)), findings, by_model)


def _that(outcome: str, claim: Claim, counted: Sequence[Finding], by_model: Mapping[str, Outcome]) -> list[str]:
    """Which conditions have an outcome, and on which models."""
    reasons = []
    for condition in claim.conditions:
        models = [
            f"{each.model}{', all items alike but too few' if _is_short_of_items(each) else ''}"
            for each in counted
            if each.condition is condition and each.outcome == outcome and each.model in by_model
        ]
        if models:
            reasons.append(f"{outcome.capitalize()}: {condition.what} ({'; '.join(models)})")
    return reasons


def _is_short_of_items(found: Finding) -> bool:
    """Whether every item bears the condition out and only their number does not suffice."""
    if found.outcome != "undecided" or found.measured is None or found.p is not None:
        return False
    interval, condition = found.measured.interval, found.condition
    return (
        interval.mean in (0.0, 1.0)
        and interval.mean in (interval.low, interval.high)
        and (condition.low <= interval.mean <= condition.high)
    )


def _by_model(claim: Claim, counted: Sequence[Finding]) -> dict[str, Outcome]:
    """What came out for each model that has every condition, or on which one fails.

    A claim over all models is not measured until that is.
    """
    wanted = {each.what for each in claim.conditions if isinstance(each, Condition)}
    found: dict[str, Outcome] = {}
    for model in dict.fromkeys(each.model for each in counted):
        outcomes = {each.condition.what: each.outcome for each in counted if each.model == model}
        missing = "absent" in outcomes.values() or (model != ALL and not wanted <= set(outcomes))
        if "fails" in outcomes.values():
            found[model] = "fails"
        elif not missing:
            found[model] = "undecided" if "undecided" in outcomes.values() else "holds"
    has_across = len(wanted) < len(claim.conditions)
    return {} if has_across and ALL not in found else found
