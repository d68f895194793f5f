"""`editable_cache`: a transformers KV cache that a program can edit and compose instead of recomputing.

The public names are imported when they are first used, so that the command line can print its help without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from editable_cache.cache import Field, Segment, Stale
    from editable_cache.chunk import ImageSpan, KVChunk
    from editable_cache.editable import EditableCache
    from editable_cache.errors import (
        ArtifactError,
        BusyError,
        CompatibilityError,
        ContextWarning,
        EditableCacheError,
        FieldError,
        LedgerError,
        Reason,
        SpanError,
        TokenBoundaryWarning,
        TrustWarning,
        UnsupportedModelError,
    )
    from editable_cache.forward.outcome import Outcome
    from editable_cache.forward.sync import Plan
    from editable_cache.forward.text import boundary_ok
    from editable_cache.forward.verify import Verification
    from editable_cache.repair.repair import RepairOutcome
    from editable_cache.report import CacheReport
    from editable_cache.skill import Skill
    from editable_cache.vision import VisionChunk

__version__ = "0.1.0"

__all__ = [
    "ArtifactError",
    "BusyError",
    "CacheReport",
    "CompatibilityError",
    "ContextWarning",
    "EditableCache",
    "EditableCacheError",
    "Field",
    "FieldError",
    "ImageSpan",
    "KVChunk",
    "LedgerError",
    "Outcome",
    "Plan",
    "Reason",
    "RepairOutcome",
    "Segment",
    "Skill",
    "SpanError",
    "Stale",
    "TokenBoundaryWarning",
    "TrustWarning",
    "UnsupportedModelError",
    "Verification",
    "VisionChunk",
    "boundary_ok",
]

_HOMES = {
    "cache": ("Field", "Segment", "Stale"),
    "chunk": ("ImageSpan", "KVChunk"),
    "editable": ("EditableCache",),
    "errors": (
        "ArtifactError",
        "BusyError",
        "CompatibilityError",
        "ContextWarning",
        "EditableCacheError",
        "FieldError",
        "LedgerError",
        "Reason",
        "SpanError",
        "TokenBoundaryWarning",
        "TrustWarning",
        "UnsupportedModelError",
    ),
    "forward.outcome": ("Outcome",),
    "forward.sync": ("Plan",),
    "forward.text": ("boundary_ok",),
    "forward.verify": ("Verification",),
    "repair.repair": ("RepairOutcome",),
    "report": ("CacheReport",),
    "skill": ("Skill",),
    "vision": ("VisionChunk",),
}
"""Where each public name is defined."""


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
