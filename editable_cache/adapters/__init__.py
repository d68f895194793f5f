"""From a transformers model to facts: what its cache holds, how it moves, who it is."""

from editable_cache.adapters.fingerprint import WeightsState, identify, rounded_digest, same_weights, weights_state
from editable_cache.adapters.origin import made_by
from editable_cache.adapters.probe import measured, model_spec
from editable_cache.adapters.rope_types import length_limit
from editable_cache.adapters.special import special_tokens

__all__ = [
    "WeightsState",
    "identify",
    "length_limit",
    "made_by",
    "measured",
    "model_spec",
    "rounded_digest",
    "same_weights",
    "special_tokens",
    "weights_state",
]
