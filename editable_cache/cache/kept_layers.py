"""Stock layers that nothing here can edit, but that can be kept as a whole and put back.

DeepSeek V4's layers (its paper, sections 2.3.1 and 2.3.2) hold the keys of a window and entries that each stand for
several tokens. They can't be cut by token, and the model calls methods of their own, so their twins are the stock
classes themselves, which learn to hand out and take back all of their contents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from editable_cache.adapters.leaves import Leaves, copied, leaves_of, set_leaves, tensors_of
from editable_cache.cache.state_layers import KeepsState
from editable_cache.errors import SpanError

_OWN = ("empty",)


class KeptValue(NamedTuple):
    """All that one layer holds after some tokens; nobody else writes into these tensors."""

    leaves: Leaves

    def rows(self, indices: Tensor) -> KeptValue:
        """The given rows of the batch."""
        return self._mapped(lambda path, tensor: tensor.index_select(0, indices.to(tensor.device)))

    @staticmethod
    def joined(values: Sequence[KeptValue]) -> KeptValue:
        """The rows of several, in one batch.

        Raises:
            SpanError: if they stand for different numbers of tokens.
        """
        if len({value._counts() for value in values}) > 1:
            raise SpanError(
                "stack: expected caches with the same number of tokens: this model folds windows of tokens into "
                "compressed entries, in which padding can't be hidden."
            )
        return values[0]._mapped(lambda path, tensor: torch.cat([value.leaves[path] for value in values]))

    def _counts(self) -> tuple[Any, ...]:
        shapes = [tensor.shape[1:] for tensor in tensors_of(self.leaves).values()]
        return (*shapes, *(leaf for leaf in self.leaves.values() if isinstance(leaf, int)))

    def _mapped(self, function: Callable[[tuple[str, ...], Tensor], Tensor]) -> KeptValue:
        """The same with other tensors; two names for one tensor stay so."""
        new = {id(tensor): function(path, tensor) for path, tensor in tensors_of(self.leaves).items()}
        return KeptValue({path: new.get(id(value), value) for path, value in self.leaves.items()})


class KeptLayer(KeepsState):
    """Mixed into a stock layer's class: its contents can be taken out, put back, and picked by row.

    The stock layer's own behaviour stays, also that it drops what has left its window.

    Attributes:
        empty: what it held when it was made.
    """

    is_croppable = False
    empty: KeptValue

    def state_value(self) -> KeptValue:
        """A copy of everything in the layer."""
        return KeptValue(copied({path: leaf for path, leaf in leaves_of(self).items() if path[0] not in _OWN}))

    def set_state_value(self, value: KeptValue) -> None:
        """Hold a copy of what ``value`` holds."""
        set_leaves(self, copied(value.leaves))

    def forget_state(self) -> None:
        """Hold what an empty layer holds."""
        self.set_state_value(self.empty)

    def reset(self) -> None:
        """Forget all tokens."""
        self.forget_state()

    def activate_past_recording(self) -> None:
        """Nothing to do: going back is the cache's business."""

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing to do: the cache puts the contents back (see ``LedgeredCache.crop``)."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Pick rows of the batch."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.batch_select_indices(torch.arange(self.num_rows or 0).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows (indices or a bool mask), in this order."""
        rows = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self.set_state_value(self.state_value().rows(rows))

    @property
    def num_rows(self) -> int | None:
        """Rows of the batch, or None while the layer is empty."""
        return next((tensor.shape[0] for tensor in tensors_of(leaves_of(self)).values()), None)


def kept_twin(layer: Any) -> Any:
    """An empty layer of the same kind whose contents can be kept; ``layer`` must be empty, or such a twin."""
    stock: Any = type(layer)
    kept: Any = stock if isinstance(layer, KeptLayer) else _kept_class(stock)
    twin = kept.__new__(kept)
    twin.empty = layer.empty if isinstance(layer, KeptLayer) else KeptValue(copied(leaves_of(layer)))
    twin.forget_state()
    return twin


@functools.cache
def _kept_class(stock: type) -> type:
    # with a layer type of its own the class would register itself as the stock one for every new cache
    return type(f"Kept{stock.__name__}", (KeptLayer, stock), {"_layer_type": None})
