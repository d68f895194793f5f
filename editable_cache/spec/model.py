"""What each layer stores per token, which of it rotates, and how the model wants its masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from editable_cache.spec.rotary import RotarySpec


@dataclass(frozen=True)
class TensorSpec:
    """One stored per-token tensor ``[batch, num_heads, seq_len, head_dim]``.

    Attributes:
        name: attribute of the cache layer that holds it (``"keys"``, ``"values"``).
        rotary: how it rotates with the position, or None if it does not depend on the position.
    """

    name: str
    rotary: RotarySpec | None = None


@dataclass(frozen=True)
class LayerSpec:
    """The cells of one layer.

    Attributes:
        tensors: every per-token tensor of the layer, in storage order.
        layer_type: transformers' name (``"full_attention"``, ``"sliding_attention"``): the key of its attention mask.
        sliding_window: number of slots that a query sees, itself included, or None for all earlier ones.
    """

    tensors: tuple[TensorSpec, ...]
    layer_type: str = "full_attention"
    sliding_window: int | None = None


@dataclass(frozen=True)
class ModelSpec:
    """What the self-test proved about one model.

    Attributes:
        layers: one entry for each layer that owns a cache.
        mask_form: ``"tensor"`` if the model takes one 4-D mask, ``"dict"`` if it takes one for each layer type,
            ``"none"`` if it ignores or refuses masks over chosen cells (then cells can be moved but not recomputed by
            mask).
        max_positions: number of positions that the model was built for.
        worst_error: largest relative error that the self-test saw between a moved and a computed tensor.
    """

    layers: tuple[LayerSpec, ...]
    mask_form: Literal["tensor", "dict", "none"]
    max_positions: int
    worst_error: float

    def rotaries(self) -> tuple[RotarySpec, ...]:
        """The distinct rotations of the model, in order of first use."""
        found = (tensor.rotary for layer in self.layers for tensor in layer.tensors)
        return tuple(dict.fromkeys(rotary for rotary in found if rotary is not None))
