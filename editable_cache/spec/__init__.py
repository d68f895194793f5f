"""Facts about a model's cache: frozen values without tensors, comparable and hashable."""

from editable_cache.spec.identity import ModelIdentity, compare
from editable_cache.spec.model import LayerSpec, ModelSpec, TensorSpec
from editable_cache.spec.rotary import RotarySpec

__all__ = ["LayerSpec", "ModelIdentity", "ModelSpec", "RotarySpec", "TensorSpec", "compare"]
