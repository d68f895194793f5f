"""`editable_cache`: a transformers KV cache that a program can edit and compose instead of recomputing."""

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
