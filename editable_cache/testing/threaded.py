"""THREADED: the oracle of a chunk that was spliced into a model with recurrent layers.

What a composed state must equal: the body of the chunk runs through the model's own forward on the live cache, while
every token mixer (recurrent or attention) is fed the layer inputs that it had when the chunk ran alone. The recurrent
states are threaded through from the live head; the convolution windows are those that the head left when it ran alone.
A recurrent state of which the body keeps nothing (a value that is delayed by a token) is a window too. As the layer
inputs are frozen, the body has seen nothing of the prefix except through the threaded states: the same approximation
that keys and values of a chunk make.

Stock transformers only; nothing here imports the rest of `editable_cache`. The token mixers are found by what their own
`forward` says (it updates a cache), which is another way than the library's, on purpose.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

WRITES = ("update_recurrent_state(", "update_conv_state(", "cache.update(", "values.update(", "update_indexer(")
"""Calls by which a `forward` is known as that of a token mixer."""

Inputs = list[tuple[str, Tensor]]


class ThreadedResult(NamedTuple):
    """What the oracle saw."""

    logits: Tensor  # [1, num_query, vocab_size], float
    body: dict[str, Tensor]  # every tensor of the cache after the body, by name
    end: dict[str, Tensor]  # the same after tail and query


def threaded(
    model: PreTrainedModel,
    prefix_ids: Tensor,
    chunk_ids: Tensor,
    query_ids: Tensor,
    *,
    head: int,
    tail: int = 0,
    base: int = 1,
    step: int | None = None,
) -> ThreadedResult:
    """Prefix live, chunk head live, body threaded as above, chunk tail and query live; each `[1, n]`.

    The chunk alone runs at the very positions where it is spliced, so that its keys need no rotation.

    Args:
        head: tokens of the chunk that run live in front of the body, at least 1.
        tail: tokens of the chunk that run live behind the body.
        base: position of the first token of the prefix.
        step: tokens at a time on a warm cache; None for any number. Some models need 1.
    """
    start = base + prefix_ids.shape[1]
    stop = chunk_ids.shape[1] - tail
    head_ids, body_ids, tail_ids = chunk_ids[:, :head], chunk_ids[:, head:stop], chunk_ids[:, stop:]

    def live_head() -> Any:
        cache = DynamicCache(config=model.config)
        _forward(model, prefix_ids, cache, base, None)
        _forward(model, head_ids, cache, start, step)
        return cache

    with torch.no_grad():
        alone = DynamicCache(config=model.config)
        _forward(model, head_ids, alone, start, None)
        left = tensors(alone)
        with recorded(model) as inputs:
            _forward(model, body_ids, alone, start + head, step)
        windows = {name for name in left if ".conv." in name}
        forgotten = _threaded_body(model, live_head(), body_ids, start + head, step, inputs, left, windows)
        windows |= {name for name in _equal(tensors(forgotten), tensors(alone)) if ".recurrent." in name}
        live = _threaded_body(model, live_head(), body_ids, start + head, step, inputs, left, windows)
        body = tensors(live)
        logits = _forward(model, torch.cat([tail_ids, query_ids], dim=1), live, start + stop, step)
    return ThreadedResult(logits[:, tail:], body, tensors(live))


def _threaded_body(
    model: PreTrainedModel,
    live: Any,
    body_ids: Tensor,
    start: int,
    step: int | None,
    inputs: Inputs,
    left: dict[str, Tensor],
    windows: set[str],
) -> Any:
    """The live cache after the body; the states named in `windows` start as the isolated head `left` them."""
    for name in windows:
        layer_idx, kind, state_idx = name.split(".")
        layer: Any = live.layers[int(layer_idx)]
        states = layer.conv_states if kind == "conv" else layer.recurrent_states
        states[int(state_idx)].copy_(left[name])
    with fed(model, inputs):
        _forward(model, body_ids, live, start, step)
    return live


def _equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    return [name for name, tensor in first.items() if name in second and torch.equal(tensor, second[name])]


def tensors(cache: Any) -> dict[str, Tensor]:
    """Copies of every filled tensor of a cache, by layer and kind."""
    found: dict[str, Tensor] = {}
    for i, layer in enumerate(cache.layers):
        for name in ("keys", "values", "indexer_keys"):
            value = getattr(layer, name, None)
            if isinstance(value, Tensor) and value.numel():
                found[f"{i}.{name}"] = value.clone()
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for kind, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                found.update({f"{i}.{kind}.{j}": state.clone() for j, state in states.items() if state is not None})
    return found


def named_cells(end: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a result under the names that `OracleResult.cells` and `OracleResult.states` give them."""
    named = {}
    for name, tensor in end.items():
        layer, kind, index = (*name.split("."), "")[:3]
        if index:
            named[f"layer {layer} {kind}_states.{index}"] = tensor
        else:
            named[f"layer {layer} {kind}"] = tensor[:, None] if kind == "indexer_keys" else tensor
    return named


def _forward(model: PreTrainedModel, ids: Tensor, cache: Any, start: int, step: int | None) -> Tensor:
    names = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    logits = []
    for first in range(0, ids.shape[1], step or max(ids.shape[1], 1)):
        part = ids[:, first : first + (step or ids.shape[1])]
        arguments: dict[str, Any] = {
            next(n for n in ("cache", "past_key_values", "cache_params") if n in names): cache,
            "use_cache": True,
        }
        if "position_ids" in names or "kwargs" in names:
            arguments["position_ids"] = torch.arange(start + first, start + first + part.shape[1])[None]
        logits.append(model(part, **arguments).logits)
    return torch.cat(logits, dim=1)


def _token_mixers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    found = []
    for name, module in model.named_modules():
        try:
            source = inspect.getsource(inspect.unwrap(type(module).forward))
        except (OSError, TypeError):
            continue
        if any(write in source for write in WRITES):
            found.append((name, module))
    return found


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The keyword of the hidden states, or None where they come first."""
    return None if args else next(name for name in ("hidden_states", "input_states") if name in kwargs)


@contextmanager
def recorded(model: nn.Module) -> Iterator[Inputs]:
    """What every token mixer is fed while this is open, in order of the calls."""
    inputs: Inputs = []

    def record(name: str) -> Any:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            key = _hidden(args, kwargs)
            inputs.append((name, (args[0] if key is None else kwargs[key]).clone()))

        return before

    with ExitStack() as hooks:
        for name, module in _token_mixers(model):
            hooks.callback(module.register_forward_pre_hook(record(name), with_kwargs=True).remove)
        yield inputs


@contextmanager
def fed(model: nn.Module, inputs: Inputs) -> Iterator[None]:
    """Every token mixer is fed what was recorded, whatever it is given; the calls must be the same."""
    rest = iter(inputs)

    def feed(name: str) -> Any:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            recorded, hidden = next(rest)
            if recorded != name:
                raise RuntimeError(f"threaded: expected a call of {recorded}, got {name}")
            key = _hidden(args, kwargs)
            return ((hidden, *args[1:]), kwargs) if key is None else (args, {**kwargs, key: hidden})

        return before

    with ExitStack() as hooks:
        for name, module in _token_mixers(model):
            hooks.callback(module.register_forward_pre_hook(feed(name), with_kwargs=True).remove)
        yield
    if next(rest, None) is not None:
        raise RuntimeError("threaded: fewer calls of token mixers than when the chunk ran alone")
