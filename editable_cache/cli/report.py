"""``report``: results of studies as one page, with a verdict for each claim."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from editable_cache.cli.options import Json
from editable_cache.cli.screen import command, line, table

if TYPE_CHECKING:
    from editable_cache.evaluation.report import Evidence, Verdict

Given = Annotated[list[Path], typer.Argument(metavar="RESULTS...", help="Results files, or folders that hold them.")]
Output = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FILE", help="The HTML page to write.", show_default=False)
]


def report(results: Given, out: Output = None, as_json: Json = False) -> None:
    """Say what replicated and what did not, with tables, plots and intervals, on one page that needs no network.

    Without -o only the verdicts are shown. Exit code 0 if there is a report, 2 if there are no results, or some that
    are damaged, of another format, or of different versions of the library; or if the page can't be written.
    """
    with command(as_json) as screen:
        from editable_cache.evaluation.report import CLAIMS, document, gather, html, judge

        if out is not None:
            _require_apart(out, results)
        evidence = gather(results)
        with screen.stage("weighing the evidence"):
            verdicts = judge(CLAIMS, evidence)
            if out is not None:
                out.write_text(html.page(document(evidence, verdicts)), encoding="utf-8")
        screen.answer(_facts(evidence, verdicts, out), _shown(verdicts, out))


def _require_apart(out: Path, results: list[Path]) -> None:
    """Refuse to write the page over what it is made of, or where nothing can be written."""
    from editable_cache.errors import ResultsError
    from editable_cache.evaluation.results import require_writable

    require_writable(out)
    read = {path.resolve() for given in results for path in ([given] if given.is_file() else given.glob("*.json"))}
    if out.resolve() in read:
        raise ResultsError(f"Output {out}: expected another file than the results that are read; name a page (*.html).")


def _facts(evidence: Evidence, verdicts: list[Verdict], out: Path | None) -> dict[str, Any]:
    return {
        "ok": True,
        "page": None if out is None else str(out),
        "studies": evidence.studies,
        "models": evidence.models,
        "counts": Counter(verdict.status for verdict in verdicts),
        "verdicts": [_verdict(verdict) for verdict in verdicts],
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    claim = verdict.claim
    return {
        "id": claim.id,
        "section": claim.section,
        "claim": claim.text,
        "published": claim.figure,
        "status": verdict.status,
        "measured": verdict.measured,
        "why": verdict.why,
        "models": dict(verdict.by_model),
    }


def _shown(verdicts: list[Verdict], out: Path | None) -> list[RenderableType]:
    rows = (
        (each.status, each.claim.id, each.claim.section, each.claim.figure, "; ".join(each.measured))
        for each in verdicts
    )
    parts: list[RenderableType] = [table("", ("verdict", "claim", "section", "published", "measured"), rows)]
    return parts if out is None else [*parts, line(f"written: {out}")]
