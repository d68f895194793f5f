"""Reading and writing the recurrent and convolution states of transformers' cache layers.

A layer derives from `LinearAttentionCacheLayerMixin` and keeps `conv_states` and `recurrent_states` by state index,
most often one of each; either may be missing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from editable_cache.errors import CompatibilityError, Reason


class Slot(NamedTuple):
    """One recurrent state of a cache: layer and index within the layer."""

    layer_idx: int
    state_idx: int


def slots(cache: Any) -> tuple[Slot, ...]:
    """The slots that hold a convolution window, a recurrent state, or both, by layer."""
    return tuple(
        Slot(layer_idx, state_idx)
        for layer_idx, layer in enumerate(cache.layers)
        if isinstance(layer, LinearAttentionCacheLayerMixin)
        for state_idx in sorted(layer.conv_states)
        if layer.is_conv_states_initialized[state_idx] or layer.is_recurrent_states_initialized[state_idx]
    )


def conv_state(cache: Any, slot: Slot) -> Tensor | None:
    """The live convolution window `[batch, num_channels, kernel_size]`, or None; not a copy."""
    layer = cache.layers[slot.layer_idx]
    return layer.conv_states[slot.state_idx] if layer.is_conv_states_initialized[slot.state_idx] else None


def recurrent_state(cache: Any, slot: Slot) -> Tensor | None:
    """The live recurrent state `[batch, ...]`, or None where the layer keeps none; not a copy."""
    layer = cache.layers[slot.layer_idx]
    return layer.recurrent_states[slot.state_idx] if layer.is_recurrent_states_initialized[slot.state_idx] else None


def write_state(cache: Any, slot: Slot, *, recurrent: Tensor | None = None, conv: Tensor | None = None) -> None:
    """Overwrite a live state in place (its address stays); None leaves it as it is.

    Raises:
        CompatibilityError: if the cache has no such state yet, or one of another shape.
    """
    for what, live, new in (
        ("recurrent state", recurrent_state(cache, slot), recurrent),
        ("convolution window", conv_state(cache, slot), conv),
    ):
        if new is None:
            continue
        if live is None or live.shape[1:] != new.shape[1:] or new.shape[0] not in (1, live.shape[0]):
            got = "none: no token has run yet" if live is None else str(list(live.shape))
            raise CompatibilityError(
                f"Layer {slot.layer_idx}, state {slot.state_idx}: the live cache can't take this {what}; fill it with "
                "the same model first.",
                (Reason(what, str(list(new.shape)), got),),
            )
        live.copy_(new)


def cache_tensors(cache: Any) -> dict[str, Tensor]:
    """Every filled tensor of a cache by name (`"3.keys"`, `"0.recurrent.0"`); live, not copies."""
    found: dict[str, Tensor] = {}
    for layer_idx, layer in enumerate(cache.layers):
        for name in ("keys", "values", "indexer_keys"):
            tensor = getattr(layer, name, None)
            if isinstance(tensor, Tensor) and tensor.numel() > 0:
                found[f"{layer_idx}.{name}"] = tensor
    for slot in slots(cache):
        for name, state in (("conv", conv_state(cache, slot)), ("recurrent", recurrent_state(cache, slot))):
            if state is not None:
                found[f"{slot.layer_idx}.{name}.{slot.state_idx}"] = state
    return found
