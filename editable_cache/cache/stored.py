"""`StoredCache`: the layers of a cache, what they hold, and how to keep and put back all of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from editable_cache.adapters import host
from editable_cache.cache.kept_layers import KeptLayer
from editable_cache.cache.layer import EditableLayer, LayerState
from editable_cache.cache.state_layers import KeepsState, StateLayer
from editable_cache.cache.twins import editable_twin
from editable_cache.errors import UnsupportedModelError

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_MARKS = 32
"""How many earlier states of the recurrent layers a cache keeps; beyond that, every other old one is let go."""

States = tuple[Any, ...]
"""A ``StateValue`` or ``KeptValue`` of each layer that has a state."""


class Contents(NamedTuple):
    """What all layers hold, by reference; recurrent states are copies."""

    cells: tuple[LayerState, ...]
    states: States
    marks: Mapping[int, States]


class StoredCache(DynamicCache):
    """The storage half of a cache.

    Attributes:
        marks: earlier states of the recurrent layers, by the number of tokens that they stand for. A state can't be
            cut by token: after a change the tokens behind the nearest mark are computed again.
        dirty: first slot whose cells have to be computed again before anything else runs (with recurrent layers), or
            None.
        settled: first slot and number of the tokens that an operation computed again for that.
    """

    def __init__(self, *, config: Any = None) -> None:
        super().__init__(config=config)
        if config is None:
            self.layer_class_to_replicate = EditableLayer
        else:
            kinds = host.cache_layout(config).kinds
            if "foreign" not in kinds:  # else sliding ones may count on dropping tokens
                self.layers = [editable_twin(layer, kind) for layer, kind in zip(self.layers, kinds, strict=True)]
        self.marks: dict[int, States] = {}
        self.dirty: int | None = None
        self.settled: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def editable_layers(self) -> list[EditableLayer]:
        """Every holder of per-token cells: layers, and what belongs to an indexer beside them."""
        return [holder for layer in self.layers if isinstance(layer, EditableLayer) for holder in layer.holders]

    @property
    def state_layers(self) -> list[KeepsState]:
        """The layers with a recurrent state, or with other contents that stand for all tokens."""
        return [layer for layer in self.layers if isinstance(layer, KeepsState)]

    @property
    def kept_layers(self) -> list[Any]:
        """Those of them that are kept as a whole, each a ``KeptLayer`` and a layer of transformers."""
        return [layer for layer in self.layers if isinstance(layer, KeptLayer)]

    @property
    def has_foreign_layers(self) -> bool:
        """Whether a layer holds something that nothing here can take back."""
        return any(map(_is_foreign, self.layers))

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the stored cells, or None while there are none."""
        return next((layer.dtype for layer in self.editable_layers if layer.is_initialized), None)

    def require_editable(self, operation: str) -> None:
        """Refuse ``operation`` where a layer holds something else than cells and recurrent states.

        Raises:
            UnsupportedModelError: naming the layers.
        """
        foreign = {i: type(layer).__name__ for i, layer in enumerate(self.layers) if _is_foreign(layer)}
        if foreign:
            raise UnsupportedModelError(
                f"{operation}: expected per-token keys and values, or a recurrent state, in every layer, got "
                f"{foreign}. This cache still works as a plain transformers cache: append by running the model, and "
                "recompute from the start after an edit."
            )

    def require_cells_only(self, operation: str, instead: str) -> None:
        """Refuse ``operation`` where some layers hold a recurrent state.

        Raises:
            UnsupportedModelError: with what to do ``instead``.
        """
        self.require_editable(operation)
        if self.state_layers:
            raise UnsupportedModelError(
                f"{operation}: {len(self.state_layers)} of {len(self.layers)} layers hold a recurrent state, which "
                f"stands for all tokens and can't be cut by token; {instead}."
            )

    # -- recurrent states

    def states(self) -> States:
        """A copy of every recurrent state as it is now."""
        return tuple(layer.state_value() for layer in self.state_layers)

    def set_states(self, states: States) -> None:
        """Put recurrent states back."""
        for layer, value in zip(self.state_layers, states, strict=True):
            layer.set_state_value(value)

    @property
    def only_states(self) -> bool:
        """Whether nothing is stored by token."""
        return bool(self.state_layers) and not self.editable_layers and not self.kept_layers

    @property
    def has_states(self) -> bool:
        """Whether a recurrent layer has folded any token in."""
        return any(layer.has_state for layer in self.state_layers if isinstance(layer, StateLayer))

    def own_states(self) -> None:
        """Let states that were born under ``torch.inference_mode`` be written outside of it."""
        for layer in self.state_layers:
            if isinstance(layer, StateLayer):
                layer.own_state()

    def mark(self, length: int) -> None:
        """Keep the states that stand for the first ``length`` tokens, so that a later edit can start from here."""
        if self.state_layers and length and length not in self.marks:
            self.marks[length] = self.states()
            if len(self.marks) > MOST_MARKS:
                old = sorted(self.marks)
                self.marks = {slot: self.marks[slot] for slot in sorted({*old[1::2], old[-1]})}

    def touch(self, slot: int) -> None:
        """Note that the cells from ``slot`` on have to be computed again (see ``dirty``)."""
        self.dirty = slot if self.dirty is None else min(self.dirty, slot)

    def go_back(self, slot: int) -> int:
        """Put recurrent layers back to the last mark up to ``slot`` and cut all cells there; returns its slot."""
        self.marks = {at: states for at, states in self.marks.items() if at <= slot}
        nearest = max(self.marks, default=0)
        for holder in self.editable_layers:
            holder.truncate(nearest)
        if nearest:
            self.set_states(self.marks[nearest])
        else:
            for layer in self.state_layers:
                layer.forget_state()
        return nearest

    # -- everything

    def contents(self) -> Contents:
        """What all layers hold; cells are shared from now on until one side writes."""
        cells = tuple(layer.share() for layer in self.editable_layers)
        return Contents(cells, self.states(), dict(self.marks))

    def set_contents(self, contents: Contents) -> None:
        """Hold what ``contents`` held; it stays valid."""
        holders = self.editable_layers
        for layer, state in zip(holders, contents.cells, strict=False):
            layer.set_state(state)
        for layer in holders[len(contents.cells) :]:  # made by a first forward after the contents were kept
            layer.reset()
        self.set_states(contents.states)
        self.marks = dict(contents.marks)

    def copy_contents_to(self, twin: Self, memo: dict[int, Any]) -> None:
        """Let the empty ``twin`` hold the same, sharing no storage."""
        for mine, theirs in zip(self.editable_layers, twin.editable_layers, strict=True):
            if mine.length:
                theirs.append({name: tensor.detach() for name, tensor in mine.view().items()})
                theirs.pristine = {name: tensor.clone() for name, tensor in mine.pristine.items()}
        twin.set_states(self.states())
        twin.marks = dict(self.marks)
        for mine_layer, their_layer in zip(self.layers, twin.layers, strict=True):
            if _is_foreign(mine_layer):
                their_layer.__dict__.update(copy.deepcopy(mine_layer.__dict__, memo))

    def foreign_layers(self) -> list[Any]:
        """The layers that hold something else than cells and recurrent states."""
        return [layer for layer in self.layers if _is_foreign(layer)]

    def marks_of_rows(self, rows: Tensor) -> None:
        """Keep the given rows of every mark."""
        self.marks = {slot: tuple(value.rows(rows) for value in states) for slot, states in self.marks.items()}


def _is_foreign(layer: Any) -> bool:
    return not isinstance(layer, EditableLayer | KeepsState) and host.kind_of(layer) != "empty"
