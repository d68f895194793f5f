"""Facts about a model's cache: frozen values without tensors, comparable and hashable."""

from editable_cache.spec.compressed import CompressedLayerSpec, CompressedSpec
from editable_cache.spec.identity import ModelIdentity, Origin, compare
from editable_cache.spec.model import LayerSpec, MaskForm, MaskKind, ModelSpec, PositionLimit, TensorSpec
from editable_cache.spec.rotary import RotarySpec

__all__ = [
    "CompressedLayerSpec",
    "CompressedSpec",
    "LayerSpec",
    "MaskForm",
    "MaskKind",
    "ModelIdentity",
    "ModelSpec",
    "Origin",
    "PositionLimit",
    "RotarySpec",
    "TensorSpec",
    "compare",
]
