"""How layers that compress windows of tokens move."""

from __future__ import annotations

import math
from dataclasses import dataclass

from editable_cache.spec.rotary import RotarySpec


@dataclass(frozen=True)
class CompressedLayerSpec:
    """One layer that is kept as a whole.

    Attributes:
        layer_idx: index of the cache layer.
        rate: tokens in a window, each of which becomes one entry; None for a layer that keeps recent keys only.
        rotaries: path of every tensor that rotates with the position of the chunk (``("keys",)``, ``("compressed_kv",
            "indexer")``), and how. All others are the same at every aligned position.
    """

    layer_idx: int
    rate: int | None
    rotaries: tuple[tuple[tuple[str, ...], RotarySpec], ...]


@dataclass(frozen=True)
class CompressedSpec:
    """All of them."""

    layers: tuple[CompressedLayerSpec, ...]

    @property
    def alignment(self) -> int:
        """A chunk's windows are cut alike where it starts at a multiple of this: of every rate."""
        return math.lcm(*(layer.rate for layer in self.layers if layer.rate is not None))
