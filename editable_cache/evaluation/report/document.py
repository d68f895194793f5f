"""A report as blocks: verdicts first, then each study."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from editable_cache.evaluation.gate import LEAST
from editable_cache.evaluation.report.blocks import Block, Heading, Paragraph, Table
from editable_cache.evaluation.report.claim import ALPHA, LEAST_CLUSTERS, STATUSES, Finding, Verdict
from editable_cache.evaluation.report.evidence import Evidence
from editable_cache.evaluation.report.measures import chosen, interval, same_as_plain_update
from editable_cache.evaluation.report.shown import STUDIES
from editable_cache.evaluation.report.views import Study, everything, number
from editable_cache.evaluation.results import Results

LONGEST = 300
"""Characters of settings that are shown."""


def document(evidence: Evidence, verdicts: Sequence[Verdict]) -> list[Block]:
    """Everything that a report says."""
    blocks: list[Block] = [Heading("Evidence: what replicated and what did not", 1)]
    blocks += [Paragraph(_summary(evidence, verdicts)), Paragraph(_reading(verdicts))]
    judged = [verdict for verdict in verdicts if verdict.by_model]
    rest = [verdict for verdict in verdicts if not verdict.by_model]
    if judged:
        blocks += [Heading("Verdicts"), _verdict_table(judged)]
    if rest:
        blocks += [Heading("Claims without a verdict"), _untested_table(rest)]
    blocks += [Heading("What an appended line can show"), *_errata(evidence)]
    blocks += _computed_again(evidence)
    known = {study.name: study for study in STUDIES}
    names = [study.name for study in STUDIES if study.name in evidence.studies]
    for name in [*names, *(name for name in evidence.studies if name not in known)]:
        blocks += _study(known.get(name), evidence.of(name))
    blocks += [Heading("Every condition"), _condition_table(verdicts)]
    return [*blocks, Heading("Where the results come from"), _origins(evidence)]


def _summary(evidence: Evidence, verdicts: Sequence[Verdict]) -> str:
    counts = Counter(verdict.status for verdict in verdicts)
    told = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    return (
        f"{len(verdicts)} claims of the study Models Take Notes at Prefill and of its rivals: {told}. Models: "
        f"{', '.join(evidence.models)}. All are far smaller than the study's (8B to 70B)."
    )


def _reading(verdicts: Sequence[Verdict]) -> str:
    tests = sum(each.p is not None for verdict in verdicts for each in verdict.findings)
    return (
        "A claim asks for conditions. One holds if the whole 95 % interval (bootstrap over domains) lies within its "
        "thresholds, fails if the whole interval lies outside, and is undecided otherwise, or with fewer than "
        f"{LEAST_CLUSTERS} domains. Replicated: all hold on every model that counts. Not on these models: one fails "
        "on each. Mixed: one fails on some. Undecided: none fails, but not all are sure to hold. Where a test decides, "
        f"its p-value is adjusted (Benjamini & Hochberg) over all {tests} tests of this page and must be below "
        f"{ALPHA:g}. Models whose full prefills decide right in fewer than {LEAST:g} of the items do not count for "
        "claims on decisions; claims on errata ask the same of a plain update. Not testable here: no model here can be "
        "asked, for the reasons given."
    )


def _verdict_table(verdicts: Sequence[Verdict]) -> Table:
    rows = []
    for verdict in verdicts:
        claim = verdict.claim
        why = "\n".join(part for part in (verdict.why, claim.remark) if part)
        rows.append((verdict.status, claim.text, claim.section, claim.figure, "\n".join(verdict.measured), why))
    return Table(("verdict", "claim", "section", "published", "measured", "why"), rows, status=0, wide=(1, 4, 5))


def _untested_table(verdicts: Sequence[Verdict]) -> Table:
    rows = [(each.status, each.claim.text, each.claim.section, each.claim.figure, each.why) for each in verdicts]
    return Table(("verdict", "claim", "section", "published", "why"), rows, status=0, wide=(1, 4))


def _condition_table(verdicts: Sequence[Verdict]) -> Table:
    rows = [(verdict.claim.id, *_cells(each)) for verdict in verdicts for each in verdict.findings]
    return Table(("claim", "model", "condition", "measured", "asked", "items", "adjusted p", "outcome"), rows)


def _cells(finding: Finding) -> tuple[str, ...]:
    asked, measured = finding.condition.threshold, finding.measured
    if measured is None:
        return (finding.model, finding.condition.what, "", asked, "", "", finding.left_out or "not measured")
    note = f" ({measured.note})" if measured.note else ""
    p = "" if finding.p is None else f"{finding.p:.2g}"
    found = f"{number(measured.interval)}{note}"
    return (finding.model, finding.condition.what, found, asked, str(measured.interval.n), p, finding.outcome)


def _errata(evidence: Evidence) -> list[Block]:
    """How well each model reads an update in a plain prefill, beside what the erratum achieves."""
    text = (
        "A line that is only appended leaves the cache of a plain prefill of the amended text, by construction. That "
        "it recovers the decision is the model's ability to read updates, and no property of the cache: a model that "
        "reads none in a plain prefill gains nothing from it. The last column compares the two, item by item."
    )
    rows = []
    for found in evidence.of("frontier"):
        for mode in ("direct", "cot"):
            gate = chosen(found, {"arm": "gate", "task": "gated", "mode": mode})
            if not gate:
                continue
            facts = {"arm": "erratum", "task": "gated", "mode": mode, "set": (mode, "")}
            measured = [interval(gate, name) for name in ("old", "new", "update")]
            same = same_as_plain_update(facts)(found)
            measured += [interval(chosen(found, facts), "correct"), None if same is None else same.interval]
            counts = dict.fromkeys((len(gate), *(m.n for m in measured if m is not None)))
            items = ", of the line ".join(map(str, counts))
            rows.append((found.model, mode, items, *("" if m is None else number(m) for m in measured)))
    head = ("model", "mode", "items", "old value", "new value", "old value and an update", "erratum", "same answer")
    return [Paragraph(text), Table(head, rows)] if rows else [Paragraph(text)]


def _computed_again(evidence: Evidence) -> list[Block]:
    """What tokens of large effect recover with exact cells in their places, and what if they are computed again."""
    probes = {found.model: found for found in evidence.of("mechanism")}
    rows = []
    for found in evidence.of("frontier"):
        for count in (1, 8, 32, 64):
            patched = {"probe": "suffix", "arm": "by_effect", "task": "gated", "measure": "recovery", "x": count}
            again = {"arm": f"selective@{count}", "task": "gated", "mode": "direct", "set": ("direct", "")}
            put = interval(chosen(probes[found.model], patched), "value") if found.model in probes else None
            run = interval(chosen(found, again), "recovery")
            if put is not None and run is not None:
                rows.append((found.model, str(count), number(put), str(put.n), number(run), str(run.n)))
    if not rows:
        return []
    text = (
        "The probes give the tokens of largest effect the cells of an exact prefill. An edit has no exact prefill: it "
        "computes these tokens again, and what they read in front of them is stale unless it was chosen too. Recovery "
        "of both, for tokens ranked alike; the prompts of the two studies differ in their number of neutral rules."
    )
    head = ("model", "K", "exact cells", "items", "computed again", "items")
    return [Heading("Exact cells, and cells computed again"), Paragraph(text), Table(head, rows)]


def _study(study: Study | None, results: Sequence[Results]) -> list[Block]:
    if study is None:
        name = results[0].study
        return [
            Heading(name),
            Paragraph("A study that this report does not know; all its numbers."),
            *everything(results).blocks(results),
        ]
    blocks: list[Block] = [Heading(study.title), Paragraph(study.text)]
    for view in study.views:
        made = view.blocks(results)
        if made and isinstance(made[0], Table):
            blocks.append(Heading(view.title, 3))
        blocks += made
    return blocks


def _origins(evidence: Evidence) -> Table:
    rows = []
    for found in evidence.results:
        versions = ", ".join(
            f"{name} {found.environment[name]}"
            for name in ("editable_cache", "transformers", "torch", "python")
            if name in found.environment
        )
        machine = f"{found.environment.get('processor', '')}, {found.environment.get('threads', '?')} threads"
        items = len({str(row.get("key")) for row in found.rows})
        settings = json.dumps(dict(found.settings), sort_keys=True, ensure_ascii=False)
        shown = settings if len(settings) <= LONGEST else f"{settings[:LONGEST]}..."
        rows.append((found.study, found.model, str(items), str(len(found.rows)), versions, machine, shown))
    return Table(("study", "model", "items", "rows", "versions", "machine", "settings"), rows)
