"""The traveller: cells of a token span with everything needed to seat them elsewhere."""

from editable_cache.chunk.kv_chunk import KVChunk, LayerStates, Provenance

__all__ = ["KVChunk", "LayerStates", "Provenance"]
