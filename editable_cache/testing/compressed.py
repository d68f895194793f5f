"""FROZEN for caches that fold windows of tokens into entries, where a mask does not reach.

What a spliced chunk must equal: the chunk runs through the model's own forward behind the live prefix, while every
token mixer is fed the inputs that it had when the chunk ran alone, and the first window takes nothing of the one before
it. So keys, entries and open windows are those of the chunk alone, written by the model itself at their place.

Stock transformers only, as in `editable_cache.testing.threaded`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from editable_cache.testing.threaded import fed, recorded

OVERLAP = ("overlap_kv", "overlap_gate")
"""What a layer keeps of its last whole window for the next one (DeepSeek V4's cache layers)."""


def forward(model: PreTrainedModel, cache: Any, ids: Tensor) -> Tensor:
    """Logits `[batch, n, vocab]` of a plain call with ids `[n]` or `[batch, n]`; fills the cache."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids if ids.dim() == 2 else ids[None], cache=cache).logits
    return logits


def prefilled(model: PreTrainedModel, *parts: Tensor) -> DynamicCache:
    """A stock cache behind all parts, ids `[n]` each, one forward for each part that is not empty."""
    cache = DynamicCache(config=model.config)
    for part in parts:
        if len(part):
            forward(model, cache, part)
    return cache


def frozen_behind(
    model: PreTrainedModel, cache: Any, ids: Tensor, seen: Tensor | None = None, *, cut: bool = True
) -> Any:
    """The stock `cache`, which is changed, behind a chunk that ran alone.

    Args:
        ids: of the chunk, `[n]`.
        seen: ids that stood before the chunk when it ran alone; its first window then takes of their last one.
        cut: otherwise the first window takes of the last one in `cache`.
    """
    alone = prefilled(model) if seen is None else prefilled(model, seen)
    if cut:
        for layer, theirs in zip(cache.layers, alone.layers, strict=True):
            for name in OVERLAP:
                vars(layer).get(name, {}).update(vars(theirs).get(name, {}))
    with recorded(model) as inputs:
        forward(model, alone, ids)
    with fed(model, inputs):
        forward(model, cache, ids)
    return cache


def contents(cache: Any) -> dict[str, Tensor]:
    """Copies of every tensor of every layer by name, and every counter as a tensor; what is empty is left out."""
    found: dict[str, Tensor] = {}
    for layer_idx, layer in enumerate(cache.layers):
        for name, value in vars(layer).items():
            for key, each in value.items() if isinstance(value, dict) else [("", value)]:
                where = f"layer {layer_idx} {name}{'.' if key else ''}{key}"
                if isinstance(each, Tensor) and each.numel():
                    found[where] = each.clone()
                elif type(each) is int:
                    found[where] = torch.tensor(float(each))
    return found
