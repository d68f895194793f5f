"""The studies that the report knows, with the published figures beside ours. Others are shown as they are."""

from __future__ import annotations

from editable_cache.evaluation.report.shown.composing import COMPOSING, DIAGONAL, HORIZON, MULTIHOP
from editable_cache.evaluation.report.shown.editing import FACTS, FRONTIER, GATE, WEIGHTS
from editable_cache.evaluation.report.shown.mechanism import MECHANISM
from editable_cache.evaluation.report.views import Study

STUDIES: tuple[Study, ...] = (GATE, MECHANISM, FRONTIER, FACTS, WEIGHTS, COMPOSING, DIAGONAL, HORIZON, MULTIHOP)
"""In the order in which they are shown."""

__all__ = ["STUDIES"]
