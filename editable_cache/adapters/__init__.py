"""From a transformers model to facts: what its cache holds, how it moves, who it is."""

from editable_cache.adapters.fingerprint import identify
from editable_cache.adapters.probe import model_spec

__all__ = ["identify", "model_spec"]
