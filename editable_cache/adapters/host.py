"""The only file that knows transformers' argument names and versions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from editable_cache.adapters.wrappers import execution_device
from editable_cache.spec import MaskKind

CACHE_OF_GENERATE = "past_key_values"
"""The argument of ``generate`` that takes a cache, in every version."""

CACHE_NAMES = ("cache", CACHE_OF_GENERATE, "cache_params")
"""The cache argument is called ``cache`` since transformers 5.2x, and before that ``cache_params`` by Mamba; users may
pass any of these names.
"""


DUMMY_LAYER: Any = getattr(cache_utils, "DummyLayer", None)
"""A layer that stores nothing; unknown before transformers 5.22 or so, where such layers were left out."""

LayerKind = Literal["plain", "indexed", "state", "hybrid", "kept", "empty", "foreign"]
"""What a stock cache layer holds: keys and values of every token; the same with keys of an indexer beside them; a
recurrent state; both; what can only be kept as a whole (compressed entries, and the windows of layers beside them);
nothing (it reads the cells of another layer, or needs none); something else.
"""

COMPRESSED_ENTRIES = "compressed_kv"
COMPRESSED_COUNTS = "entry_count"
COMPRESS_RATE = "compress_rate"
"""How a layer that compresses windows of tokens calls its entries ``[batch, num_entries, head_dim]`` and their number,
both by name, and the tokens in a window. Only DeepSeek V4 has such layers, and their forwards use these names.
"""

KEEPS_STOCK_LAYERS: Mapping[str, str] = {
    "moshi": "its mask has no window: decoding sees one only because the stock cache drops rows, a prefill sees none",
}
"""Model types whose decoding depends on the stock cache's own layers, with the reason; they get these, and no edits."""

RESTARTS_POSITIONS: Mapping[str, str] = {
    "bamba": "without position_ids it numbers the tokens of every forward from 0 on, also behind a filled cache",
}
"""Model types that have to be told positions that others find out, with the reason."""

TOKEN_TENSORS = ("keys", "values", "indexer_keys", "indexer_position_ids", "idx_keys")
"""Every per-token tensor that a stock layer of a known kind may hold."""

HOLDERS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "plain": (("keys", "values"),),
    "indexed": (("keys", "values"), ("indexer_keys",), ("indexer_position_ids",), ("idx_keys",)),
    "state": (),
    "hybrid": (("keys", "values"),),
    "kept": (),
    "empty": (),
    "foreign": (),
}
"""Tensors that are written together, for each holder of cells of a layer of each kind."""


IMAGE_IDS = tuple(f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index"))
"""Config fields with the id of the token that stands for a piece of an image, a video or a sound."""

TOKEN_KINDS = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")
"""Arguments that say of each token whether it is text (0), image (1) or video (2); as long as the ids."""

KINDS_BY_SLOT = ("mm_token_type_ids", "token_type_ids")
"""Those that masks look up by slot of the cache (Gemma 3), where an image is among the new tokens."""

IMAGE_ARGUMENTS = re.compile(r"pixel|image|video|vision|grid|tile|patch|spatial|aspect|target_sizes|audio|feature")
"""Arguments that carry pixels and sizes of images, or sounds, where they are tensors."""

CROSS_ATTENTION = ("cross_attention_states", "cross_attention_mask")
"""Arguments of models whose layers attend to images that no token of the sequence stands for."""


class CacheLayout(NamedTuple):
    """What a stock cache for a config looks like.

    ``kinds[i]`` says what layer ``i`` holds and ``names[i]`` is its class's name; ``masks`` are the distinct ways in
    which its attention layers let a query see the slots before it.
    """

    kinds: tuple[LayerKind, ...]
    names: tuple[str, ...]
    masks: tuple[MaskKind, ...]

    @property
    def has_states(self) -> bool:
        """Whether a layer holds something that stands for all tokens: a recurrent state, or compressed entries."""
        return any(kind in ("state", "hybrid", "kept") for kind in self.kinds)


def text_config(config: Any) -> Any:
    """The config of the decoder."""
    return config.get_text_config(decoder=True)


def stock_layers(config: Any) -> list[Any]:
    """The layers that a stock ``DynamicCache`` gives this config."""
    return list(DynamicCache(config=config).layers)


def kind_of(layer: Any) -> LayerKind:
    """What a stock layer holds."""
    kind = type(layer)
    if kind in (DynamicLayer, DynamicSlidingWindowLayer):
        return "plain"
    blocks = getattr(kind, "update_index", None) is not None and kind.__bases__ == (DynamicLayer,)
    if kind is DynamicIndexedLayer or blocks:
        return "indexed"
    if kind is LinearAttentionLayer:
        return "state"
    if kind in (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer):
        return "hybrid"
    if compresses(layer):
        return "kept"
    return "empty" if kind is DUMMY_LAYER else "foreign"


def compresses(layer: Any) -> bool:
    """Whether a layer keeps a window of keys and folds older tokens into compressed entries.

    Before ``DummyLayer`` there were such layers too, but they kept other things; they stay plain caches.
    """
    if DUMMY_LAYER is None:
        return False
    wanted = {COMPRESSED_ENTRIES, COMPRESSED_COUNTS, COMPRESS_RATE}
    return isinstance(layer, DynamicSlidingWindowLayer) and wanted <= vars(layer).keys()


def kinds_of(layers: Sequence[Any]) -> tuple[LayerKind, ...]:
    """What each layer of a stock cache holds.

    Beside compressed layers, layers with a window have to drop the same tokens: all of them share one mask, which is as
    long as what the first one holds.
    """
    beside = any(map(compresses, layers))
    return tuple("kept" if beside and type(layer) is DynamicSlidingWindowLayer else kind_of(layer) for layer in layers)


def cache_layout(config: Any) -> CacheLayout:
    """Read the layout off the stock cache of this config."""
    layers, text = stock_layers(config), text_config(config)
    quirk = getattr(text, "model_type", "") in KEEPS_STOCK_LAYERS
    kinds: tuple[LayerKind, ...] = tuple("foreign" for _ in layers) if quirk else kinds_of(layers)
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    block = getattr(text, "attention_chunk_size", None)
    declared = getattr(text, "layer_types", None)
    if declared is None:
        sliding = "chunked_attention" if block is not None else "sliding_attention"
        declared = ["full_attention" if window is None else sliding for window in windows]
    masks: dict[str, MaskKind] = {}
    for layer_type, window, kind in zip(declared, windows, kinds, strict=False):
        if kind == "empty" and layer_type == "sliding_attention":
            window = getattr(text, "sliding_window", None)  # it reads the cells of another layer of its type
        if kind != "state" and layer_type not in ("mlp", "moe"):
            chunked = layer_type == "chunked_attention"
            masks[layer_type] = MaskKind(layer_type, None if chunked else window, block if chunked else None)
    return CacheLayout(kinds, tuple(type(layer).__name__ for layer in layers), tuple(masks.values()))


def holders_of(cache: Cache) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Layer index and tensor names of every holder of cells of a stock cache."""
    return tuple((i, names) for i, kind in enumerate(kinds_of(cache.layers)) for names in HOLDERS[kind])


def full_cache(config: Any) -> DynamicCache:
    """A stock cache for this config in which sliding layers keep every token; the model's mask applies the window.

    Those beside compressed layers stay as they are (see ``kinds_of``).
    """
    cache = DynamicCache(config=config)
    kinds = kinds_of(cache.layers)
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer and kinds[i] == "plain":
            cache.layers[i] = DynamicLayer()
        elif type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
            cache.layers[i] = LinearAttentionAndFullAttentionLayer(number_of_states=layer.number_of_states)
    return cache


def token_tensors(layer: Any, names: Sequence[str] = TOKEN_TENSORS) -> dict[str, Tensor]:
    """Per-token tensors of a layer by name, each as ``[batch, num_heads, seq_len, head_dim]`` (views)."""
    found = {}
    for name in names:
        tensor = getattr(layer, name, None)
        if tensor is not None and tensor.dim() > 1:
            if name == "indexer_keys":
                tensor = tensor[:, None]
            elif name == "indexer_position_ids":
                tensor = tensor.transpose(0, 1)[..., None]
            found[name] = tensor
    return found


def state_tensors(layer: Any) -> dict[str, Tensor]:
    """Recurrent and convolution states of a layer by name, each ``[batch, ...]`` (views)."""
    found = {}
    for name in ("conv_states", "recurrent_states"):
        for index, tensor in (getattr(layer, name, None) or {}).items():
            if tensor is not None:
                found[f"{name}.{index}"] = tensor
    return found


def device_of(model: nn.Module) -> torch.device:
    """Where the model wants its ids and masks."""
    embeddings = _embeddings(model)
    return execution_device(embeddings, embeddings.weight.device)


def restarts_positions(model: nn.Module) -> bool:
    """Whether the model must be told the positions of tokens behind others."""
    return getattr(text_config(model.config), "model_type", "") in RESTARTS_POSITIONS


def num_embeddings(model: nn.Module) -> int:
    """How many token ids the model knows."""
    return int(_embeddings(model).weight.shape[0])


def _embeddings(model: nn.Module) -> Any:
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    return embeddings[0] if isinstance(embeddings, nn.ModuleList) else embeddings  # a list has one for each codebook


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


def image_ids(model: nn.Module) -> tuple[int, ...]:
    """Ids of the tokens that stand for pieces of images and videos."""
    config: Any = model.config
    found = (getattr(config, name, None) for name in IMAGE_IDS)
    return tuple(sorted({value for value in found if isinstance(value, int)}))


def token_kinds(model: nn.Module, ids: Tensor) -> Tensor:
    """int64, shape of ``ids``: 0 for text, 1 for an image, 2 for a video, as processors say it."""
    kinds = torch.zeros_like(ids)
    for name in IMAGE_IDS:
        value = getattr(model.config, name, None)
        if isinstance(value, int):
            kinds[ids == value] = {"image": 1, "video": 2}.get(name[:5], 0)
    return kinds


def image_tensors(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """The arguments that carry pixels and sizes of images."""
    return {
        name: value
        for name, value in arguments.items()
        if isinstance(value, Tensor) and IMAGE_ARGUMENTS.search(name) and name not in TOKEN_KINDS
    }


def cross_attention_arguments(model: nn.Module) -> tuple[str, ...]:
    """Arguments that show that the model keeps images outside of its tokens."""
    return tuple(name for name in CROSS_ATTENTION if name in _parameters(type(model).forward))


def numbering(model: nn.Module) -> Any:
    """The module that gives several positions to each token (M-RoPE), or None.

    Such modules also keep ``rope_deltas`` of the last image that they saw, whoever's it was. Explicit positions keep
    that out of everybody else's forwards.
    """
    for module in model.modules():
        if getattr(module, "get_rope_index", None) is not None:
            return module
    return None


def accepted(function: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``arguments`` that a function takes by name."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names and value is not None}


def plain_id(model: nn.Module) -> int:
    """An id to which the config gives no meaning."""
    special = set(special_ids(model))
    return next(i for i in range(int(text_config(model.config).vocab_size)) if i not in special)


def special_ids(model: nn.Module) -> Sequence[int]:
    """Ids to which the config gives a meaning (images, padding, ends)."""
    configs = (model.config, text_config(model.config))
    items = [item for config in configs for item in vars(config).items()]
    return [value for name, value in items if type(value) is int and name.endswith(("token_id", "index"))]


def run(
    model: nn.Module,
    input_ids: Tensor,
    cache: Cache,
    *,
    position_ids: Tensor | None = None,
    attention_mask: Any = None,
    last_logits_only: bool = False,
    images: Mapping[str, Any] | None = None,
) -> Tensor:
    """One forward without gradients that fills ``cache``; returns logits ``[batch, num_tokens or 1, vocab]``.

    ``images`` are further arguments: pixels, their sizes, and which tokens stand for them.
    """
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
    for name, value in (images or {}).items():
        arguments[name] = value.to(device) if isinstance(value, Tensor) else value
    with torch.no_grad():
        logits: Tensor = model(**arguments).logits
    return logits
