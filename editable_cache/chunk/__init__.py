"""The traveller: cells of a token span with everything needed to seat them elsewhere."""

from editable_cache.chunk.compressed import Compressed
from editable_cache.chunk.kv_chunk import KVChunk, LayerStates
from editable_cache.chunk.provenance import CONVERTED, STORED, ImageSpan, Part, Provenance
from editable_cache.chunk.recurrence import Recurrence
from editable_cache.chunk.transition import Transition

__all__ = [
    "CONVERTED",
    "STORED",
    "Compressed",
    "ImageSpan",
    "KVChunk",
    "LayerStates",
    "Part",
    "Provenance",
    "Recurrence",
    "Transition",
]
