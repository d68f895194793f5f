"""The traveller: cells of a token span with everything needed to seat them elsewhere."""

from editable_cache.chunk.compressed import Compressed
from editable_cache.chunk.kv_chunk import KVChunk, LayerStates
from editable_cache.chunk.provenance import ImageSpan, Part, Provenance
from editable_cache.chunk.recurrence import Recurrence
from editable_cache.chunk.transition import Transition

__all__ = ["Compressed", "ImageSpan", "KVChunk", "LayerStates", "Part", "Provenance", "Recurrence", "Transition"]
