"""What a cache holds, in the form that oracles give it in, and the two ways to compare.

Shapes: n slots, L layers, H key/value heads, D head size; batch size 1 throughout. ``cells_in`` names every per-token
tensor of a cache as ``OracleResult.cells`` does. Lists of states are for models that store keys and values and nothing
else: the keys of every layer, then the values of every layer, 2 L tensors ``[1, H, n, D]``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from editable_cache.adapters import host
from editable_cache.cache import EditableLayer
from editable_cache.editable import EditableCache
from editable_cache.testing import oracles
from editable_cache.testing.tiny_models import FAMILIES, VOCAB_SIZE, tiny_model

FIRST_PLAIN_ID = 5
"""Ids below are the tiny tokenizer's special tokens."""

VISIBLE = 1e-3
"""Relative difference from which on two answers are surely different."""


@functools.cache
def shared_model(family: str, attention: str | None = None) -> PreTrainedModel:
    """A tiny float32 model that many tests share: nobody may change it."""
    return tiny_model(family, attn_implementation=attention)


def family_cases(families: Sequence[str]) -> list[tuple[str, str]]:
    """Each family with each attention implementation that it has."""
    return [(family, attention) for family in families for attention in FAMILIES[family].attention]


def random_ids(count: int, seed: int = 0) -> Tensor:
    """Ids of plain tokens, int64 ``[count]``."""
    return torch.randint(FIRST_PLAIN_ID, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed))


def layers_of(cache: EditableCache) -> list[dict[str, Tensor]]:
    """A copy of every per-token tensor of each layer, ``[1, H, n, D]``; empty where a layer stores none."""
    layers = []
    for layer in cache.layers:
        holders = layer.holders if isinstance(layer, EditableLayer) else ()
        layers.append({name: t.clone() for holder in holders for name, t in holder.view().items() if t.shape[-2]})
    return layers


def cells_in(cache: EditableCache, start: int = 0, stop: int | None = None) -> dict[str, Tensor]:
    """A copy of what slots ``[start, stop)`` hold, as ``OracleResult.cells`` names it."""
    return {
        f"layer {i} {name}": tensor[..., start:stop, :]
        for i, layer in enumerate(layers_of(cache))
        for name, tensor in layer.items()
    }


def recurrent_in(cache: EditableCache) -> dict[str, Tensor]:
    """A copy of every recurrent and convolution state, as ``OracleResult.states`` names it."""
    return {name: tensor.clone() for name, tensor in oracles.state_tensors(cache).items()}


def states_of(cache: EditableCache, start: int = 0, stop: int | None = None) -> list[Tensor]:
    """A copy of what slots ``[start, stop)`` hold; an empty list where nothing was ever stored."""
    views = [view for layer in cache.editable_layers if (view := layer.view())]
    return [view[name][..., start:stop, :].clone() for name in ("keys", "values") for view in views]


def states_in(result: oracles.OracleResult, start: int = 0, stop: int | None = None) -> list[Tensor]:
    """Slots ``[start, stop)`` of what an oracle saw, in the form of `states_of`."""
    return [tensor[..., start:stop, :] for tensor in (*result.keys, *result.values)]


def halves(states: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Keys of every layer and values of every layer of `states_of`."""
    middle = len(states) // 2
    return list(states[:middle]), list(states[middle:])


def same_cells(actual: oracles.Cells, expected: oracles.Cells) -> bool:
    """Whether two sets of named tensors are equal bit for bit."""
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in expected)


def ids_known_to(model: PreTrainedModel, count: int, seed: int = 3) -> Tensor:
    """Ids of the model's vocabulary but its first few, which are often special, int64 ``[count]``."""
    size = int(model.config.get_text_config().vocab_size)
    return torch.randint(FIRST_PLAIN_ID, size, (count,), generator=torch.Generator().manual_seed(seed))


def same_bits(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether two lists of states are equal bit for bit."""
    return len(actual) == len(expected) and all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def must_differ(actual: oracles.States, expected: oracles.States, least: float = VISIBLE) -> None:
    """The negative control: raise unless the two differ clearly.

    Raises:
        AssertionError: if `oracles.check` accepts them at the tolerance `least`.
    """
    try:
        error = oracles.check(actual, expected, least)
    except AssertionError:
        return
    raise AssertionError(f"negative control: expected a relative error above {least:.1e}, got {error:.1e}")


def logits_after(model: PreTrainedModel, ids: Tensor, cache: Cache) -> Tensor:
    """Logits ``[1, n, vocab]`` of a plain call ``model(ids, cache)`` as a user would write it; fills the cache."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids[None], **{host.cache_argument(model): cache}).logits
    return logits


def generated(model: PreTrainedModel, cache: EditableCache, content: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Greedy ``model.generate`` behind the cache and ``content`` ``[n]``, as a user would write it.

    Returns:
        The whole sequence ``[length + count]`` and the logits of each new token ``[1, count, vocab]``.
    """
    out: Any = model.generate(  # type: ignore[operator]
        **cache.inputs(content),
        **{host.cache_argument(model): cache},
        max_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0], torch.stack(out.logits, dim=1)


def windows_behind(model: PreTrainedModel, *texts: Tensor) -> dict[tuple[int, int], Tensor]:
    """The convolution windows that ``texts`` leave, by layer index and state index."""
    cache = EditableCache(model)
    cache.append(torch.cat(texts))
    return {
        (layer_idx, index): window.clone()
        for layer_idx, layer in enumerate(cache.layers)
        for index, window in (getattr(layer, "conv_states", None) or {}).items()
        if window is not None
    }
