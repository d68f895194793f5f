"""What a chunk leaves in layers that compress windows of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

Path = tuple[str, ...]
"""Where a tensor stands in a cache layer: ``("keys",)``, ``("compressed_kv", "indexer")``."""


@dataclass(frozen=True, eq=False)
class Compressed:
    """A chunk as it stands behind the start of a window: recent keys, entries, and the window that is still open.

    Attributes:
        layers: for each compressed layer by its index, tensors of one row by path: keys and values ``[1, num_heads,
            num_recent, head_dim]`` of the chunk's last tokens, entries ``[1, num_entries, head_dim]``, and whatever
            else the layer holds ``[1, ...]``. Values that are the keys are left out.
    """

    layers: Mapping[int, Mapping[Path, Tensor]]

    def __post_init__(self) -> None:
        frozen = {layer_idx: MappingProxyType(dict(tensors)) for layer_idx, tensors in self.layers.items()}
        object.__setattr__(self, "layers", MappingProxyType(frozen))

    def __reduce__(self) -> tuple[Any, ...]:
        return Compressed, ({layer_idx: dict(tensors) for layer_idx, tensors in self.layers.items()},)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensors in self.layers.values() for tensor in tensors.values())

    def equals(self, other: Compressed) -> bool:
        """Whether every stored bit is the same."""
        return self.layers.keys() == other.layers.keys() and all(
            mine.keys() == other.layers[layer_idx].keys()
            and all(torch.equal(tensor, other.layers[layer_idx][path]) for path, tensor in mine.items())
            for layer_idx, mine in self.layers.items()
        )
