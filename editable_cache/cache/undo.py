"""What it takes to put a cache back bit for bit after an operation that failed half-way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from editable_cache.cache.layer import EditableLayer
    from editable_cache.cache.state_layers import KeepsState
    from editable_cache.cache.store import Store

Slots = Tensor | slice


class Undo:
    """Remembers lengths and storage of layers, and every cell that is overwritten while it is attached.

    Storage is held by reference, so an operation that only appends costs nothing here; growing replaces the reference,
    because the grown storage holds the same cells.
    """

    def __init__(self, layers: Sequence[EditableLayer], states: Sequence[KeepsState] = ()) -> None:
        self._recurrent = [(layer, layer.state_value()) for layer in states]
        self._states = {id(layer): (layer, layer.state()) for layer in layers}
        self._cells: list[tuple[EditableLayer, Store, Slots, dict[str, Tensor]]] = []
        for layer in layers:
            layer.undo = self

    def keep(self, layer: EditableLayer, store: Store, slots: Slots) -> None:
        """Copy cells that are about to be overwritten in ``store``."""
        saved = {name: buffer[..., slots, :].clone() for name, buffer in store.buffers.items()}
        self._cells.append((layer, store, slots, saved))

    def held(self, layer: EditableLayer, store: Store) -> int:
        """How many slots of ``store`` must be kept before they are overwritten."""
        known = self._states.get(id(layer))  # not of layers that a model adds while it runs
        return known[1].length if known is not None and known[1].store is store else 0

    def grown(self, layer: EditableLayer, old: Store, new: Store) -> None:
        """Note that ``new`` holds the layer's present cells of ``old``; forget ``old`` if nothing else needs it."""
        known = self._states.get(id(layer))
        if known is None:
            return
        state = known[1]
        if (
            state.store is old
            and layer.length >= state.length
            and not any(store is old for _, store, _, _ in self._cells)
        ):
            self._states[id(layer)] = (layer, state._replace(store=new))

    def __deepcopy__(self, memo: dict[int, object]) -> Undo:
        """Itself: a copy of a layer is none of its layers."""
        return self

    def restore(self) -> None:
        """Put every layer back."""
        for _, store, slots, saved in reversed(self._cells):
            for name, cells in saved.items():
                store.buffers[name][..., slots, :] = cells
        for layer, state in self._states.values():
            layer.set_state(state)
        for recurrent, value in self._recurrent:
            recurrent.set_state_value(value)

    def detach(self) -> None:
        """Stop watching."""
        for layer, _ in self._states.values():
            layer.undo = None
