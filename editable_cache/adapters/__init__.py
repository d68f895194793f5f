"""From a transformers model to facts: what its cache holds, how it moves, who it is."""

from editable_cache.adapters.fingerprint import WeightsState, identify, same_weights, weights_state
from editable_cache.adapters.probe import measured, model_spec
from editable_cache.adapters.rope_types import length_limit

__all__ = ["WeightsState", "identify", "length_limit", "measured", "model_spec", "same_weights", "weights_state"]
