"""A report on results: a verdict for each claim, tables beside the published figures, plots."""

from editable_cache.evaluation.report import html, markdown, plot
from editable_cache.evaluation.report.claim import Claim, Condition, Finding, Measured, Status, Verdict, judge
from editable_cache.evaluation.report.claims import CLAIMS
from editable_cache.evaluation.report.document import document
from editable_cache.evaluation.report.evidence import Evidence, gather

__all__ = [
    "CLAIMS",
    "Claim",
    "Condition",
    "Evidence",
    "Finding",
    "Measured",
    "Status",
    "Verdict",
    "document",
    "gather",
    "html",
    "judge",
    "markdown",
    "plot",
]
