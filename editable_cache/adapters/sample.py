"""A few tokens prefilled into a stock cache, and what they left there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicIndexedLayer

from editable_cache.adapters import host

NUM_TOKENS = 7
"""Tokens of the self-test: a prime, so that an axis of this size is an axis of tokens."""


class Sample(NamedTuple):
    """What a prefill left.

    ``cells[h]`` holds the tensors of holder ``h`` of the layout by name, ``[1, num_heads, num_tokens, head_dim]`` each
    (empty where the layer was never written); ``states[i]`` the recurrent states of layer ``i``; ``logits`` is
    ``[1, num_tokens, vocab]``; ``unknown`` names what else has an axis of tokens.
    """

    cells: list[dict[str, Tensor]]
    states: list[dict[str, Tensor]]
    logits: Tensor
    unknown: tuple[str, ...] = ()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by a name that tells its place."""
        named = {f"holder {i} {name}": t for i, cells in enumerate(self.cells) for name, t in cells.items()}
        return named | {f"layer {i} {name}": t for i, states in enumerate(self.states) for name, t in states.items()}


def random_ids(model: nn.Module, count: int = NUM_TOKENS, seed: int = 0) -> Tensor:
    """Random ids ``[1, count]`` without those to which the config gives a meaning (images, padding, ends)."""
    config = host.text_config(model.config)
    size = int(config.vocab_size)
    special = set(host.special_ids(model))
    plain = torch.tensor([i for i in range(min(size, 4096)) if i not in special])
    return plain[torch.randint(0, len(plain), (1, count), generator=torch.Generator().manual_seed(seed))]


def prefill(
    model: nn.Module,
    ids: Tensor,
    offset: int | None,
    mask: Any = None,
    *,
    behind: int = 0,
    like: Sample | None = None,
    hidden: bool = True,
    positions: Tensor | None = None,
) -> Sample:
    """Prefill ``ids`` alone.

    Args:
        offset: position of the first token; None gives no ``position_ids``.
        mask: over the new tokens.
        behind: number of slots in front of them that hold zeros.
        like: a sample that tells the shapes of those.
        hidden: nobody may see those slots; otherwise ``mask`` says who may.
        positions: ``position_ids`` instead of those that ``offset`` makes.
    """
    cache, count = host.full_cache(model.config), ids.shape[1]
    if behind:
        assert like is not None
        _fill(cache, like, behind)
    if behind and hidden:
        mask = torch.cat((torch.zeros(1, behind), torch.ones(1, count)), dim=1).long().to(host.device_of(model))
    if offset is not None:
        positions = torch.arange(offset, offset + count)[None]
    logits = host.run(model, ids, cache, position_ids=positions, attention_mask=mask)
    return read(cache, logits, behind)


def read(cache: Any, logits: Tensor, start: int = 0) -> Sample:
    """What a stock cache holds from slot ``start`` on."""
    cells = []
    for layer_idx, names in host.holders_of(cache):
        tensors = host.token_tensors(cache.layers[layer_idx], names)
        cells.append({name: tensor[..., start:, :] for name, tensor in tensors.items()})
    unknown = [
        f"layer {i} {name}"
        for i, layer in enumerate(cache.layers)
        for name, value in vars(layer).items()
        if isinstance(value, Tensor) and NUM_TOKENS in value.shape and name not in host.TOKEN_TENSORS
    ]
    return Sample(cells, [host.state_tensors(layer) for layer in cache.layers], logits, tuple(unknown))


def _fill(cache: Any, like: Sample, count: int) -> None:
    """Zeros in front of what will come; they take no memory until a layer is read."""
    for (layer_idx, _), cells in zip(host.holders_of(cache), like.cells, strict=True):
        layer = cache.layers[layer_idx]
        for name, tensor in cells.items():
            zeros = tensor.new_zeros(()).expand(*tensor.shape[:2], count, tensor.shape[-1])
            if name == "indexer_keys":
                layer.lazy_initialization_indexer(zeros[:, 0])
                layer.indexer_keys = zeros[:, 0]
            elif name == "indexer_position_ids":
                layer.indexer_position_ids = zeros[..., 0].transpose(0, 1)
            else:
                if name == "keys":
                    layer.lazy_initialization(zeros, zeros)
                setattr(layer, name, zeros)


class FilledLayer(DynamicIndexedLayer):
    """A layer of fixed length: what a forward writes goes to chosen slots, and all of it is handed out."""

    def __init__(self, cells: Mapping[str, Tensor], slots: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cells = {name: tensor.clone() for name, tensor in cells.items()}
        self.slots = list(slots)
        self.is_initialized = self.is_indexer_initialized = True

    def _write(self, name: str, states: Tensor) -> Tensor:
        self.cells[name][..., self.slots, :] = states
        return self.cells[name]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._write("keys", key_states), self._write("values", value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        return self._write("indexer_keys", indexer_key_states[:, None])[:, 0]

    def update_index(self, idx_k: Tensor) -> Tensor:
        """As MiniMax M3 calls it."""
        return self._write("idx_keys", idx_k)

    def get_seq_length(self) -> int:
        return int(next(iter(self.cells.values())).shape[-2]) if self.cells else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0
