"""What a model leaves in a cache: name, dtype and shape of every tensor, without its content."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from editable_cache.adapters import host
from editable_cache.adapters.leaves import Path, leaves_of, tensors_of
from editable_cache.adapters.sample import NUM_TOKENS, prefill, random_ids
from editable_cache.adapters.wrappers import inner_model
from editable_cache.spec import CompressedSpec


class Shape(NamedTuple):
    """Dtype and shape of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


Cells = tuple[Mapping[str, Shape], ...]
Entries = Mapping[int, Mapping[Path, Shape]]

States = tuple[Mapping[str, Shape], ...]


class _Held(NamedTuple):
    cells: Cells
    states: States


_held: weakref.WeakKeyDictionary[nn.Module, dict[torch.dtype, _Held]] = weakref.WeakKeyDictionary()
_entries: weakref.WeakKeyDictionary[nn.Module, dict[tuple[torch.dtype, int], Entries]] = weakref.WeakKeyDictionary()


def cell_shapes(model: nn.Module) -> Cells:
    """The cells of one token by holder and name, ``[1, num_heads, 1, head_dim]``."""
    return _measured(model).cells


def state_shapes(model: nn.Module) -> States:
    """The recurrent states of each layer, ``[1, ...]``, by kind and number: ``"conv.0"``, ``"recurrent.0"``."""
    return _measured(model).states


def _measured(model: nn.Module) -> _Held:
    """One short forward for each dtype of a model."""
    model = inner_model(model)
    known, dtype = _held.setdefault(model, {}), host.dtype_of(model)
    if dtype not in known:
        found = prefill(model, random_ids(model, NUM_TOKENS), None)
        cells = ({name: _shape(tensor[..., :1, :]) for name, tensor in held.items()} for held in found.cells)
        states = ({name.replace("_states", ""): _shape(t) for name, t in held.items()} for held in found.states)
        known[dtype] = _Held(tuple(cells), tuple(states))
    return known[dtype]


def entry_shapes(model: nn.Module, spec: CompressedSpec, num_tokens: int, *, behind: bool) -> Entries:
    """What compressed layers hold of a chunk of ``num_tokens``, by layer and path, each ``[1, ...]``.

    One forward for each dtype and number of tokens beyond whole windows, of no more tokens than decide the shapes.

    Args:
        behind: other tokens stand before the chunk.
    """
    model = inner_model(model)
    layers = [host.stock_layers(model.config)[facts.layer_idx] for facts in spec.layers]
    window = max((size for layer in layers if type(size := getattr(layer, "sliding_window", 0)) is int), default=0)
    least = -(-window // spec.alignment) * spec.alignment + num_tokens % spec.alignment
    count = num_tokens if num_tokens < least and not behind else least
    known, key = _entries.setdefault(model, {}), (host.dtype_of(model), count)
    if key not in known:
        cache = host.full_cache(model.config)
        host.run(model, random_ids(model, count), cache, last_logits_only=True)
        known[key] = {
            facts.layer_idx: {
                path: _shape(t) for path, t in tensors_of(leaves_of(cache.layers[facts.layer_idx])).items()
            }
            for facts in spec.layers
        }
    return {
        facts.layer_idx: {
            path: _scaled(path, shape, num_tokens, facts.rate) for path, shape in known[key][facts.layer_idx].items()
        }
        for facts in spec.layers
    }


def _scaled(path: Path, found: Shape, num_tokens: int, rate: int | None) -> Shape:
    """The shape of a tensor that a chunk of ``num_tokens`` leaves."""
    shape = list(found.shape)
    if path[0] in ("keys", "values"):
        shape[-2] = min(num_tokens, shape[-2])
    elif path[0] == host.COMPRESSED_ENTRIES and rate is not None:
        shape[1] = num_tokens // rate
    return Shape(found.dtype, tuple(shape))


def _shape(tensor: Tensor) -> Shape:
    return Shape(tensor.dtype, tuple(tensor.shape))
