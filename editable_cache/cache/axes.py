"""Several positions of one token: the first in ``positions``, the distances of all others from it in ``axes``.

Tokens of an image have one position for each of several axes (M-RoPE, Wang et al., 2024, Qwen2-VL, section 2.1). All of
them move by the same distance (docs/numerics.md), so one number tells where a token stands, and the distances stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def furthest(axes: Tensor) -> Tensor:
    """How far the largest position of each token is from its first one, ``[batch, length]``."""
    return axes.amax(dim=-1).clamp_min(0) if axes.shape[-1] else axes.new_zeros(axes.shape[:-1])


def every_axis(positions: Tensor, axes: Tensor) -> Tensor:
    """``position_ids``: ``[batch, n]`` where all positions of each token are equal, else ``[num_axes, batch, n]``."""
    if not bool(axes.any()):
        return positions
    return torch.cat((positions[None], positions + axes.movedim(-1, 0)))


def join_axes(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """``axes`` of several ledgers joined; zeros where one has fewer columns than another."""
    columns = max(part.shape[-1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, columns - part.shape[-1])) for part in parts], dim=dim)


def renumbered(numbers: Tensor, ahead: int) -> Tensor:
    """Numbers that count from 1, 0 meaning none, behind ``ahead`` others."""
    return torch.where(numbers > 0, numbers + ahead, 0)
