"""The claims of the study, and two rival ones, each with what would bear it out."""

from __future__ import annotations

from editable_cache.evaluation.report.claim import Claim
from editable_cache.evaluation.report.claims.beyond import BEYOND
from editable_cache.evaluation.report.claims.circuit import CIRCUIT
from editable_cache.evaluation.report.claims.combining import COMBINING
from editable_cache.evaluation.report.claims.composing import COMPOSING
from editable_cache.evaluation.report.claims.editing import EDITING
from editable_cache.evaluation.report.claims.mechanism import MECHANISM
from editable_cache.evaluation.report.claims.rivals import RIVALS
from editable_cache.evaluation.report.claims.weights import WEIGHTS

CLAIMS: tuple[Claim, ...] = (*MECHANISM, *CIRCUIT, *EDITING, *WEIGHTS, *COMPOSING, *COMBINING, *BEYOND, *RIVALS)
"""In the order of the study."""

__all__ = ["CLAIMS"]
