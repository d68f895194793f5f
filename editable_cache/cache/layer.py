"""`EditableLayer`: a transformers cache layer that keeps every token and can be overwritten, moved and shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from editable_cache.cache.store import Store, wants_graph
from editable_cache.cache.undo import Undo
from editable_cache.errors import LedgerError


class LayerState(NamedTuple):
    """Everything that a layer holds; a value that can be kept and put back."""

    store: Store | None
    length: int
    pristine: Mapping[str, Tensor]


class Scatter(NamedTuple):
    """Where the rows of the next ``update`` go instead of the end.

    ``slots`` is int64 ``[num_rows]``, ascending; ``rows`` picks the rows that are written at this layer (None for all):
    the others keep the cells that they have.
    """

    slots: Tensor
    rows: Tensor | None


class EditableLayer(DynamicLayer):
    """Full-length keys and values of one layer, ``[batch, num_heads, seq_len, head_dim]``.

    A sliding-window model gets this layer too: it needs the cells that have left the window when something before
    them is edited, and its own mask enforces the window. Tensors handed out by ``update``, ``keys`` and ``values``
    are views of the storage; they stay valid until the next operation on the cache.

    Attributes:
        pristine: for 16-bit caches, rotating tensors as they were first computed (before any move), for the slots that
            existed at the last move. Moving starts from here, so that repeated moves do not add up their rounding.
        scatter: set while chosen cells are recomputed.
        exchange: set while what a forward appends is exchanged for something else first.
        undo: set while an operation may have to be taken back.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, **kwargs: Any) -> None:
        self._store: Store | None = None
        self._half: dict[str, Tensor] = {}
        self.length = 0
        self.pristine: Mapping[str, Tensor] = {}
        self.scatter: Scatter | None = None
        self.exchange: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
        self.undo: Undo | None = None
        super().__init__()  # type: ignore[no-untyped-call]

    # -- transformers' contract

    @property
    def keys(self) -> Tensor | None:
        return self._tensor("keys")

    @keys.setter
    def keys(self, tensor: Tensor | None) -> None:
        self._assign("keys", tensor)

    @property
    def values(self) -> Tensor | None:
        return self._tensor("values")

    @values.setter
    def values(self, tensor: Tensor | None) -> None:
        self._assign("values", tensor)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.set_store(Store.allocate({"keys": key_states, "values": value_states}, 0), 0)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new states, or write them where ``scatter`` says; return all keys and values (views)."""
        view = self.write({"keys": key_states, "values": value_states})
        return view["keys"], view["values"]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.length if self.scatter is not None else self.length + query_length), 0

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop: expected a count of tokens to remove as a number <= 0, got {tokens_to_remove}; call "
                f"crop(-{tokens_to_remove}) to remove {tokens_to_remove} tokens from the end."
            )
        self.truncate(max(self.length + tokens_to_remove, 0))

    def reset(self) -> None:
        self.set_state(LayerState(None, 0, {}))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._store is not None:
            rows = torch.arange(self._batch(), device=self.device).repeat_interleave(repeats)
            self.batch_select_indices(rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self._store is None:
            return
        rows = indices.to(self.device)
        if rows.dtype == torch.bool:
            rows = rows.nonzero()[:, 0]
        if torch.equal(rows, torch.arange(self._batch(), device=self.device)):
            return
        length = self.length
        picked = {name: t.index_select(0, rows) for name, t in self.view().items()}
        self.pristine = {name: t.index_select(0, rows) for name, t in self.pristine.items()}
        self.set_store(Store(picked, length), length)

    # -- storage

    @property
    def holders(self) -> tuple[EditableLayer, ...]:
        """This layer, and any further holders of cells that belong to it."""
        return (self,)

    def write(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Append the states of a forward, or write them where ``scatter`` says; return all of them (views)."""
        if self.scatter is None:
            self.append(states if self.exchange is None else self.exchange(states))
        else:
            slots, rows = self.scatter
            if rows is not None:
                slots, states = slots[rows], {name: t[..., rows, :] for name, t in states.items()}
            self.overwrite(slots, states)
        return self.view()

    def view(self, start: int = 0) -> dict[str, Tensor]:
        """All stored tensors from slot ``start`` on; shares storage."""
        if self._store is None:
            return {}
        return {name: buffer[..., start : self.length, :] for name, buffer in self._store.buffers.items()}

    def state(self) -> LayerState:
        """What the layer holds, by reference."""
        return LayerState(self._store, self.length, self.pristine)

    def set_state(self, state: LayerState) -> None:
        """Hold what ``state`` held; shares its storage."""
        self._half = {}
        self._store, self.length, self.pristine = state
        self.is_initialized = state.store is not None
        if state.store is not None:
            buffer = next(iter(state.store.buffers.values()))
            self.device, self.dtype = buffer.device, buffer.dtype
            if not state.store.shared:
                state.store.used = state.length

    def share(self) -> LayerState:
        """The layer's state for a fork or checkpoint; from now on nobody writes below the length of its storage."""
        if self._store is not None:
            self._store.shared = True
        return self.state()

    def prepare(self, like: Mapping[str, Tensor], batch: int) -> None:
        """Give an empty layer storage for ``batch`` rows of tensors shaped as ``like``."""
        if self._store is None:
            self.set_store(Store.allocate({name: t[:1].expand(batch, -1, -1, -1) for name, t in like.items()}, 0), 0)

    def set_store(self, store: Store, length: int) -> None:
        """Take ``store`` as storage, ``length`` slots of it."""
        self.set_state(LayerState(store, length, self.pristine))

    def reserve(self, extra: int) -> None:
        """Make room for ``extra`` more slots, without headroom."""
        if self._store is not None:
            self._grow(extra, headroom=False)

    def append(self, states: Mapping[str, Tensor]) -> None:
        """Write ``states`` behind the last slot."""
        first = next(iter(states.values()))
        extra = first.shape[-2]
        if self._store is None or (not self.length and self._batch() != first.shape[0]):
            self.set_store(Store.allocate(states, 0), 0)
        assert self._store is not None
        if wants_graph(states) or wants_graph(self._store.buffers):
            joined = {name: torch.cat((t, states[name]), dim=-2) for name, t in self.view().items()}
            self.set_store(Store(joined, self.length + extra), self.length + extra)
            return
        for name, slots in self.claim(extra).items():
            slots.copy_(states[name].detach())

    def claim(self, extra: int) -> dict[str, Tensor]:
        """Lengthen the layer by ``extra`` slots and hand out views of them, still unwritten, to be filled at once."""
        assert self._store is not None
        self._grow(extra)
        start, stop = self.length, self.length + extra
        held = 0 if self.undo is None else self.undo.held(self, self._store)
        if start < held:
            self.undo.keep(self, self._store, slice(start, min(stop, held)))  # type: ignore[union-attr]
        self._store.used = self.length = stop
        return self.view(start)

    def overwrite(self, slots: Tensor | slice, states: Mapping[str, Tensor]) -> None:
        """Write ``states`` over existing ``slots``."""
        if not isinstance(slots, slice) and not len(slots):
            return
        if self._store is None:
            raise LedgerError("overwrite: the layer holds no cells yet; run a forward with this cache first.")
        own = self._store.own(self.length)
        if own is not self._store:
            self._store = own
        elif self.undo is not None:
            self.undo.keep(self, own, slots)
        for name, tensor in states.items():
            own.buffers[name][..., slots, :] = tensor.detach()
        if self.pristine and not isinstance(slots, slice):
            self._renew_pristine(slots, states)

    def truncate(self, length: int) -> None:
        """Forget every slot from ``length`` on."""
        if length < self.length:
            self.length = length
            self.pristine = {name: t[..., :length, :] for name, t in self.pristine.items()}
            if self._store is not None and not self._store.shared and self.undo is None:
                self._store.used = length

    def replace_tail(self, start: int, tail: Mapping[str, Tensor], pristine: Mapping[str, Tensor]) -> None:
        """Forget every slot from ``start`` on and write ``tail`` instead; ``pristine`` replaces the old one whole."""
        self.truncate(start)
        self.append(tail)
        self.pristine = dict(pristine)

    def settle(self, slots: Tensor) -> None:
        """Take what ``slots`` hold now as pristine."""
        if self.pristine:
            self._renew_pristine(slots, {name: self.view()[name].index_select(-2, slots) for name in self.pristine})

    def full_pristine(self, name: str) -> Tensor:
        """Tensor ``name`` of every slot as first computed, ``[batch, num_heads, seq_len, head_dim]``."""
        stored = self.view()[name]
        kept = self.pristine.get(name)
        if kept is None:
            return stored
        return torch.cat((kept, stored[..., kept.shape[-2] :, :]), dim=-2)

    def _batch(self) -> int:
        assert self._store is not None
        return int(next(iter(self._store.buffers.values())).shape[0])

    def _grow(self, extra: int, *, headroom: bool = True) -> None:
        assert self._store is not None
        old = self._store
        self._store = old.room(self.length, extra, headroom=headroom)
        if self._store is not old and self.undo is not None:
            self.undo.grown(self, old, self._store)

    def _renew_pristine(self, slots: Tensor, states: Mapping[str, Tensor]) -> None:
        renewed = {}
        for name, kept in self.pristine.items():
            inside = slots < kept.shape[-2]
            renewed[name] = kept.clone()
            renewed[name][..., slots[inside], :] = states[name][..., inside, :].detach()
        self.pristine = renewed

    def _tensor(self, name: str) -> Tensor | None:
        if name in self._half:
            return self._half[name]
        return None if self._store is None else self._store.buffers[name][..., : self.length, :]

    def _assign(self, name: str, tensor: Tensor | None) -> None:
        """Take a tensor that someone assigned by hand; the layer follows once keys and values have one length."""
        if tensor is None:
            self.set_state(LayerState(None, 0, {}))
            return
        tensors = {**self.view(), **self._half, name: tensor}
        lengths = {t.shape[-2] for t in tensors.values()}
        if set(tensors) == {"keys", "values"} and len(lengths) == 1:
            store = Store(tensors, tensor.shape[-2])
            store.shared = True  # the tensors are the caller's: never write into them
            self.set_state(LayerState(store, tensor.shape[-2], {}))
        else:
            self._half = {**self._half, name: tensor}
