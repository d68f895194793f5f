"""How one stored tensor is rotated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RotarySpec:
    """A rotary embedding as one stored tensor shows it.

    Attributes:
        inv_freq: float32 frequencies in radians per position, one for each rotated pair; negative where a model turns
            the other way (NanoChat).
        layout: ``"half"`` pairs channel ``i`` with ``i + rotary_dim / 2`` (GPT-NeoX, Llama); ``"interleaved"`` pairs
            ``2 i`` with ``2 i + 1`` (GPT-J, Cohere).
        start: first rotated channel of the head; channels outside ``[start, stop)`` are not touched.
        axes: where tokens have several positions (M-RoPE, Wang et al., 2024, Qwen2-VL, section 2.1), the axis that
            turns each frequency; None where they have one.

    Attention scaling (YaRN, Su et al.) multiplies cos and sin alike, at every position. Moving a key is a rotation by a
    *difference* of angles, so the scale is already in the key and does not appear here.
    """

    inv_freq: tuple[float, ...]
    layout: Literal["half", "interleaved"]
    start: int = 0
    axes: tuple[int, ...] | None = None

    @property
    def rotary_dim(self) -> int:
        """Number of rotated channels."""
        return 2 * len(self.inv_freq)

    @property
    def stop(self) -> int:
        """One past the last rotated channel."""
        return self.start + self.rotary_dim
