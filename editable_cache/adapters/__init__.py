"""From a transformers model to facts: what its cache holds, how it moves, who it is."""

from editable_cache.adapters.fingerprint import identify, weights_state
from editable_cache.adapters.probe import model_spec

__all__ = ["identify", "model_spec", "weights_state"]
