"""Chunks for models with recurrent layers: compiled as a map of states, composed at a cost that does not grow."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from editable_cache.adapters import host, measured
from editable_cache.adapters.continuation import run_in_steps
from editable_cache.adapters.mixers import MixerMap
from editable_cache.adapters.states import Slot
from editable_cache.adapters.transitions import capture
from editable_cache.cache import LedgeredCache, Segment
from editable_cache.cache.arrange import extend_with_chunk
from editable_cache.cache.state_layers import StateLayer
from editable_cache.chunk import KVChunk, LayerStates, Recurrence
from editable_cache.chunk.transition import Form
from editable_cache.errors import CompatibilityError, Reason, SpanError
from editable_cache.forward import run
from editable_cache.spec import ModelSpec

TAIL_TOKENS = 4
"""Tokens at a chunk's end that run live by default: what follows then finds a convolution window that has seen what
stands before the chunk. They help more than as many further tokens at the start.
"""

LEAST_BODY = 2
"""Fewest tokens between head and tail that are worth a map."""


class _Known(NamedTuple):
    """What an earlier chunk of a model found out; saves forwards."""

    spec: ModelSpec
    mixers: MixerMap | None
    forms: Mapping[Slot, Form]


_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


class Compiled(NamedTuple):
    """Cells of all tokens ``[1, num_heads, num_tokens, head_dim]`` by holder, and the map of states."""

    layers: tuple[LayerStates, ...]
    recurrence: Recurrence


def compile_recurrent(model: nn.Module, seen: Tensor, ids: Tensor, head: int | None, tail: int | None) -> Compiled:
    """Run a chunk alone and capture what the tokens between its first ``head`` and last ``tail`` do to every state.

    For fixed layer inputs a linear recurrent layer is affine in its initial state, so those tokens act on any state as
    ``factor * state + offset`` (``adapters.transitions``).

    Args:
        seen: ids ``[num_seen]`` that stand before the chunk while it is compiled.
        ids: ids ``[num_tokens]`` of the chunk.
        head: first tokens that will run live; by default as many as the longest convolution reaches back.
        tail: last tokens that will run live; 4 by default.

    Raises:
        SpanError: if the chunk is too short for a head, a tail and two tokens between.
        UnsupportedModelError: if a layer is not affine in its state.
    """
    spec = measured(model)
    step, known = spec.step_tokens, _known.get(model)
    if known is None or known.spec != spec:
        known = _Known(spec, None, {})
    head = _reach(model) if head is None else head
    tail = TAIL_TOKENS if tail is None else tail
    if head < 1 or tail < 0 or len(ids) < head + LEAST_BODY + tail:
        raise SpanError(
            f"precompile: this model has recurrent layers, so the first {head} and last {tail} tokens of a chunk run "
            f"live; expected at least {head + LEAST_BODY + tail} tokens, got {len(ids)}. Append a short text instead."
        )
    joined = torch.cat((seen, ids))[None]
    positions = torch.arange(joined.shape[1])[None]
    found = capture(
        model,
        joined,
        positions,
        head=len(seen) + head,
        tail=tail,
        cache_factory=lambda: host.full_cache(model.config),
        step=step,
        mixers=known.mixers,
        forms=known.forms,
    )
    forms = {slot: each.form for slot, each in found.transitions.items()}
    _known[model] = _Known(spec, found.mixers, forms)
    if tail:
        run_in_steps(model, joined[:, -tail:], positions[:, -tail:], found.cache, step=step)
    layers = []
    for layer_idx, names in host.holders_of(found.cache):
        tensors = host.token_tensors(found.cache.layers[layer_idx], names)
        layers.append({name: tensor[..., len(seen) :, :].clone() for name, tensor in tensors.items()})
    transitions = {(slot.layer_idx, slot.state_idx): each for slot, each in found.transitions.items()}
    return Compiled(tuple(layers), Recurrence(head, tail, transitions))


def _reach(model: nn.Module) -> int:
    """How many tokens the longest convolution of the model looks back, at least 1."""
    cache = host.full_cache(model.config)
    with torch.no_grad():
        host.run(model, torch.zeros((1, 2), dtype=torch.int64), cache, last_logits_only=True)
    kernels = [
        state.shape[-1]
        for layer in cache.layers
        for name, state in host.state_tensors(layer).items()
        if name.startswith("conv")
    ]
    return max(max(kernels, default=2) - 1, 1)


def splice_recurrent(cache: LedgeredCache, spec: ModelSpec, chunk: KVChunk, positions: Tensor, segment: Segment) -> int:
    """Put a chunk behind the last slot: its head live, its body composed, its tail live; call inside an operation.

    Args:
        positions: int64 ``[batch, len(chunk)]``, where the tokens go.

    Returns:
        The number of tokens that ran.
    """
    recurrence, batch = chunk.recurrence, cache.ledger.batch
    assert recurrence is not None
    head, stop = recurrence.head, len(chunk) - recurrence.tail
    ids = chunk.token_ids[None].expand(batch, -1)
    run.extend(cache, ids[:, :head], segment, positions=positions[:, :head])
    _check_states(cache, recurrence)
    for (layer_idx, state_idx), transition in recurrence.transitions.items():
        layer: Any = cache.layers[layer_idx]
        if transition.offset is not None:
            layer.recurrent_states[state_idx] = transition.apply(layer.recurrent_states[state_idx])
        if transition.conv is not None:
            live = layer.conv_states[state_idx]
            layer.conv_states[state_idx] = transition.conv.to(live).expand_as(live).clone()
    extend_with_chunk(cache, spec, chunk, head, positions[:, head:stop], segment, stop=stop)
    cache.mark(len(cache.ledger))
    if recurrence.tail:
        run.extend(cache, ids[:, stop:], segment, positions=positions[:, stop:])
    return head + recurrence.tail


def _check_states(cache: LedgeredCache, recurrence: Recurrence) -> None:
    """Refuse maps that are not those of the states that the cache holds, each of them once, or that are not finite.

    Raises:
        CompatibilityError: with everything that does not fit.
    """
    held = {
        (layer_idx, i): (layer.conv_states[i], layer.recurrent_states[i])
        for layer_idx, layer in enumerate(cache.layers)
        if isinstance(layer, StateLayer)
        for i in range(layer.number_of_states)
        if layer.conv_states[i] is not None or layer.recurrent_states[i] is not None
    }
    reasons = [
        Reason(f"layer {layer_idx} state {i}", *(("a map", "none") if (layer_idx, i) in held else ("none", "a map")))
        for layer_idx, i in sorted(held.keys() ^ recurrence.transitions.keys())
    ]
    for key in held.keys() & recurrence.transitions.keys():
        where, (conv, state), given = f"layer {key[0]} state {key[1]}", held[key], recurrence.transitions[key]
        for name, live, tensor in (("window", conv, given.conv), ("state", state, given.offset)):
            shape = None if live is None else [1, *live.shape[1:]]
            if shape != (None if tensor is None else list(tensor.shape)):
                reasons.append(Reason(f"{where}: {name}", str(shape), str(None if tensor is None else [*tensor.shape])))
        finite = all(bool(t.isfinite().all()) for t in (given.conv, given.offset, given.factor) if t is not None)
        reasons += [] if finite else [Reason(where, "finite numbers", "others")]
    if reasons:
        raise CompatibilityError(
            "splice: what this chunk does to the recurrent layers does not fit this model; compile it again.",
            tuple(reasons),
        )
