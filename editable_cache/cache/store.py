"""Growable storage of one layer, shared between forks until one of them writes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Store:
    """Buffers ``[batch, num_heads, capacity, head_dim]`` of one layer, by tensor name.

    A layer looks at the first ``length`` slots of a store; the store itself only knows how far it has been written
    (``used``). Several layers (forks, checkpoints) may look at one store. The rules that keep them apart:

    * slots below ``used`` of a ``shared`` store are never written again;
    * a layer may append in place if its own length equals ``used``, shared or not; what others see does not change;
    * otherwise the writer takes a copy first.
    """

    __slots__ = ("buffers", "shared", "used")

    def __init__(self, buffers: dict[str, Tensor], used: int) -> None:
        self.buffers = buffers
        self.used = used
        self.shared = False

    @classmethod
    def allocate(cls, like: Mapping[str, Tensor], capacity: int) -> Store:
        """Empty store for tensors of the batch, heads, head_dim, dtype and device of ``like``."""
        return cls({name: t.new_empty((*t.shape[:2], capacity, t.shape[-1])) for name, t in like.items()}, 0)

    @property
    def capacity(self) -> int:
        """Number of slots that fit without growing."""
        return min((buffer.shape[-2] for buffer in self.buffers.values()), default=0)

    def view(self, length: int) -> dict[str, Tensor]:
        """The first ``length`` slots of every tensor; shares storage."""
        return {name: buffer[..., :length, :] for name, buffer in self.buffers.items()}

    def room(self, length: int, extra: int, *, headroom: bool = True) -> Store:
        """A store in which a layer of ``length`` slots may write ``extra`` more: this one, or a copy that has grown.

        Args:
            length: slots of the layer that is going to write.
            extra: slots that it is going to write.
            headroom: leave a quarter more when growing, so that token-by-token appends copy each slot a constant
                number of times.
        """
        needed = length + extra
        fits = needed <= self.capacity
        if fits and (length == self.used or not self.shared) and self._writable():
            return self
        grown = Store.allocate(self.buffers, needed + (needed // 4 + 64 if headroom else 0))
        for name, buffer in self.buffers.items():
            grown.buffers[name][..., :length, :].copy_(buffer[..., :length, :].detach())
        grown.used = length
        return grown

    def own(self, length: int) -> Store:
        """A store in which a layer of ``length`` slots may overwrite its slots: this one if nobody shares it."""
        if not self.shared and self._writable():
            return self
        mine = Store.allocate(self.buffers, self.capacity)
        for name, buffer in self.buffers.items():
            mine.buffers[name][..., :length, :].copy_(buffer[..., :length, :].detach())
        mine.used = length
        return mine

    def _writable(self) -> bool:
        """Buffers born under ``torch.inference_mode`` may not be written outside of it."""
        return torch.is_inference_mode_enabled() or not any(b.is_inference() for b in self.buffers.values())


def wants_graph(states: Mapping[str, Tensor]) -> bool:
    """Whether autograd records these tensors, so that they must not be written into a buffer in place."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in states.values())
