"""The only file that knows transformers' argument names and versions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

CACHE_NAMES = ("cache", "past_key_values")
"""The cache argument is called ``cache`` since transformers 5.2x; users may pass either name."""


class CacheLayout(NamedTuple):
    """What a stock cache for a config looks like.

    ``layer_types[i]`` is transformers' name of layer ``i``, ``windows[i]`` its sliding window or None, and
    ``foreign[i]`` the class name of a layer that is not plain per-token keys and values (recurrent, hybrid, indexed,
    shared), or None.
    """

    layer_types: tuple[str, ...]
    windows: tuple[int | None, ...]
    foreign: tuple[str | None, ...]


def text_config(config: Any) -> Any:
    """The config of the decoder."""
    return config.get_text_config(decoder=True)


def stock_layers(config: Any) -> list[Any]:
    """The layers that a stock ``DynamicCache`` gives this config."""
    return list(DynamicCache(config=config).layers)


def is_plain(layer: Any) -> bool:
    """Whether a stock layer holds per-token keys and values and nothing else."""
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)


def cache_layout(config: Any) -> CacheLayout:
    """Read the layout off the stock cache of this config."""
    layers = stock_layers(config)
    declared = getattr(text_config(config), "layer_types", None)
    windows = [layer.sliding_window if type(layer) is DynamicSlidingWindowLayer else None for layer in layers]
    if declared is None:
        chunked = getattr(text_config(config), "attention_chunk_size", None) is not None
        sliding = "chunked_attention" if chunked else "sliding_attention"
        declared = ["full_attention" if window is None else sliding for window in windows]
    foreign = [None if is_plain(layer) else type(layer).__name__ for layer in layers]
    return CacheLayout(tuple(declared[: len(layers)]), tuple(windows), tuple(foreign))


def plain_layers(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer of a stock cache that holds nothing else."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def device_of(model: nn.Module) -> torch.device:
    """Where the model wants its ids and masks."""
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    device: torch.device = embeddings.weight.device
    return device


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype that the model computes in."""
    dtype: Any = model.dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


@lru_cache(maxsize=64)
def _parameters(forward: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)


def bind(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a forward call by name."""
    names = [name for name in _parameters(type(module).forward) if name != "self"]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among named arguments, or None."""
    for name in CACHE_NAMES:
        if arguments.get(name) is not None:
            return arguments[name]
    return None


def with_own_name(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The same arguments with the cache under the name that this model knows it by."""
    renamed = {name: value for name, value in arguments.items() if name not in CACHE_NAMES}
    return {**renamed, cache_argument(model): cache_in(arguments)}


def uses_cache(model: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Whether a ``generate`` with these arguments will use a cache."""
    config = arguments.get("generation_config") or getattr(model, "generation_config", None)
    chosen = arguments.get("use_cache", getattr(config, "use_cache", None))
    return chosen is None or bool(chosen)


def cache_argument(model: nn.Module) -> str:
    """How this model calls its cache argument."""
    names = _parameters(type(model).forward)
    return next((name for name in CACHE_NAMES if name in names), CACHE_NAMES[0])


def run(
    model: nn.Module,
    input_ids: Tensor,
    cache: Cache,
    *,
    position_ids: Tensor | None = None,
    attention_mask: Any = None,
    last_logits_only: bool = False,
) -> Tensor:
    """One forward without gradients that fills ``cache``; returns logits ``[batch, num_tokens or 1, vocab]``."""
    device = device_of(model)
    arguments: dict[str, Any] = {
        "input_ids": input_ids.to(device),
        cache_argument(model): cache,
        "use_cache": True,
    }
    if position_ids is not None:
        arguments["position_ids"] = position_ids.to(device)
    if attention_mask is not None:
        arguments["attention_mask"] = attention_mask
    if last_logits_only and "logits_to_keep" in _parameters(type(model).forward):
        arguments["logits_to_keep"] = 1
    with torch.no_grad():
        logits: Tensor = model(**arguments).logits
    return logits
