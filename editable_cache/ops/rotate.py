"""Move stored keys to other positions (also called re-rotation).

A model writes ``R(position * inv_freq) k`` with the angle rounded to float32. Rotating by ``inv_freq * delta``
therefore misses what the model itself would write, by 1e-3 to 2e-2 at 120,000 positions. Here the model's own two
float32 angles are formed, and the key is turned by their difference, with cos and sin in float64: the error stays near
1e-7 at every distance.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from editable_cache.spec import RotarySpec


class Rotation(NamedTuple):
    """A turn for every token, ready to be applied to any number of layers.

    ``cos`` is float32 ``[batch or 1, 1, seq_len, rotary_dim]``, each value standing at both channels of its pair;
    ``sin`` is ``[batch or 1, 1, seq_len, rotary_dim / 2]``, one for each pair.
    """

    rotary: RotarySpec
    cos: Tensor
    sin: Tensor

    def slots(self, start: int, stop: int) -> Rotation:
        """The turns of tokens ``start`` to ``stop``; shares storage."""
        return Rotation(self.rotary, self.cos[..., start:stop, :], self.sin[..., start:stop, :])

    def to(self, device: torch.device) -> Rotation:
        """The same turns on another device (layers of one model may live on several); itself if it is there."""
        return Rotation(self.rotary, self.cos.to(device), self.sin.to(device))


def rotation(
    rotary: RotarySpec,
    source: Tensor,
    target: Tensor,
    device: torch.device | str | None = None,
    *,
    axes: Tensor | None = None,
) -> Rotation:
    """Turns that carry keys from ``source`` positions to ``target`` positions.

    Args:
        rotary: the rotation of the tensor to be moved.
        source, target: integer positions ``[seq_len]`` or ``[batch, seq_len]``.
        device: where the tables are wanted; that of ``target`` by default.
        axes: int64 ``[..., seq_len, num_axes - 1]``, how far the other positions of a token are from its first, which
            ``source`` and ``target`` give; a token moves by the same distance on all axes. None where all are equal.
    """
    inv_freq = torch.tensor(rotary.inv_freq, dtype=torch.float32)
    source, target = torch.broadcast_tensors(source.cpu(), target.cpu())
    ahead = _ahead(rotary, axes)
    angle = _angle(target, inv_freq, ahead).double() - _angle(source, inv_freq, ahead).double()
    if angle.dim() == 2:
        angle = angle[None]
    angle = angle[:, None]
    cos, sin = angle.cos().float(), angle.sin().float()
    both = torch.cat((cos, cos), dim=-1) if rotary.layout == "half" else cos.repeat_interleave(2, dim=-1)
    where = device if device is not None else target.device
    return Rotation(rotary, both.to(where), sin.to(where))


def _ahead(rotary: RotarySpec, axes: Tensor | None) -> Tensor | int:
    """How far the position that turns each frequency is from the first one, ``[..., seq_len, num_frequencies]``."""
    if axes is None or rotary.axes is None or not axes.numel():
        return 0
    every = torch.cat((axes.new_zeros((*axes.shape[:-1], 1)), axes), dim=-1).cpu()
    return every[..., list(rotary.axes)]


def _angle(positions: Tensor, inv_freq: Tensor, ahead: Tensor | int) -> Tensor:
    own = positions[..., None] + ahead
    return own.to(torch.float32) * inv_freq  # float32, as the model rounds it


CACHE_BYTES = 2**20
"""Tensors above this size are turned in blocks of tokens of this size, so that the second pass over a block, and the
tables that its heads share, are found in the processor's cache.
"""


def rotate_into(out: Tensor, states: Tensor, turn: Rotation) -> None:
    """Write ``states`` turned by ``turn`` into ``out``; both ``[batch, heads, seq_len, head_dim]``, not overlapping.

    Arithmetic is float32 (float64 for float64 states); the result is cast once, on writing. Channels outside the
    rotated slice are copied.
    """
    length = out.shape[-2]
    if out.nbytes > CACHE_BYTES and out.device.type == "cpu":
        step = max(CACHE_BYTES * length // out.nbytes, 1)
        for low in range(0, length, step):
            high = min(low + step, length)
            _rotate_block(out[..., low:high, :], states[..., low:high, :], turn.slots(low, high))
    else:
        _rotate_block(out, states, turn)


def _rotate_block(out: Tensor, states: Tensor, turn: Rotation) -> None:
    start, stop = turn.rotary.start, turn.rotary.stop
    if start > 0:
        out[..., :start].copy_(states[..., :start])
    if stop < states.shape[-1]:
        out[..., stop:].copy_(states[..., stop:])
    wide = torch.promote_types(states.dtype, torch.float32)
    direct = states.dtype == out.dtype == wide
    turned = out[..., start:stop] if direct else torch.empty_like(out[..., start:stop], dtype=wide)
    source, cos, sin = states[..., start:stop].to(wide), turn.cos.to(wide), turn.sin.to(wide)
    first, second = _pairs(source, turn.rotary.layout)
    turned_first, turned_second = _pairs(turned, turn.rotary.layout)
    torch.mul(source, cos, out=turned)  # whole rows at once: two passes over half rows would take half as long again
    turned_first.addcmul_(second, sin, value=-1)
    turned_second.addcmul_(first, sin)
    if not direct:
        out[..., start:stop].copy_(turned)


def _pairs(states: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    if layout == "half":
        middle = states.shape[-1] // 2
        return states[..., :middle], states[..., middle:]
    return states[..., 0::2], states[..., 1::2]
