"""Layers that fold all tokens into a recurrent state, with or without keys and values beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from editable_cache.cache.layer import EditableLayer

_FLAGS = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size")


class StateValue(NamedTuple):
    """All states of one layer after some tokens, by state index; nobody else writes into these tensors."""

    conv: Mapping[int, Tensor | None]
    recurrent: Mapping[int, Tensor | None]
    flags: Mapping[str, Mapping[int, Any]]

    def rows(self, indices: Tensor) -> StateValue:
        """The states of the given rows of the batch."""

        def picked(states: Mapping[int, Tensor | None]) -> dict[int, Tensor | None]:
            return {i: None if t is None else t.index_select(0, indices.to(t.device)) for i, t in states.items()}

        return self._replace(conv=picked(self.conv), recurrent=picked(self.recurrent))

    @staticmethod
    def joined(values: Sequence[StateValue]) -> StateValue:
        """The rows of several, in one batch; a state knows of no padding."""

        def together(states: Sequence[Mapping[int, Tensor | None]]) -> dict[int, Tensor | None]:
            found = {i: [tensor for one in states if (tensor := one[i]) is not None] for i in states[0]}
            return {i: torch.cat(held) if held else None for i, held in found.items()}

        conv, recurrent = together([v.conv for v in values]), together([v.recurrent for v in values])
        return StateValue(conv, recurrent, values[0].flags)


class KeepsState:
    """A cache layer with something that stands for all tokens so far: it can't be cut by token, only kept at some of
    them, put back, and computed onward from there.
    """

    def state_value(self) -> Any:
        """A copy of it, with the methods ``rows`` and ``joined``."""
        raise NotImplementedError

    def set_state_value(self, value: Any) -> None:
        """Hold a copy of what ``value`` holds."""
        raise NotImplementedError

    def forget_state(self) -> None:
        """Hold what an empty layer holds."""
        raise NotImplementedError


class StateLayer(KeepsState, LinearAttentionLayer):
    """transformers' recurrent layer, whose state can be taken out, put back, and picked by row.

    ``conv_states[i]`` is ``[batch, channels, kernel]``, ``recurrent_states[i]`` ``[batch, ...]``; a model may use
    several of them in one layer. The state stands for all tokens so far: it can't be cut by token, only kept at some
    of them and computed onward from there.
    """

    is_compileable = False

    def __init__(self, number_of_states: int = 1, **kwargs: Any) -> None:
        super().__init__(number_of_states=number_of_states)

    @property
    def has_state(self) -> bool:
        """Whether any token has been folded in."""
        return any(self.has_previous_state.values())

    def own_state(self) -> None:
        """Let states born under ``torch.inference_mode`` be written outside of it."""
        held = (*self.conv_states.values(), *self.recurrent_states.values())
        if not torch.is_inference_mode_enabled() and any(t is not None and t.is_inference() for t in held):
            self.set_state_value(self.state_value())

    def state_value(self) -> StateValue:
        """A copy of all states."""
        flags = {name: dict(getattr(self, name)) for name in _FLAGS}
        return StateValue(_copied(self.conv_states), _copied(self.recurrent_states), flags)

    def set_state_value(self, value: StateValue) -> None:
        """Hold a copy of what ``value`` holds."""
        self.conv_states, self.recurrent_states = _copied(value.conv), _copied(value.recurrent)
        for name, flags in value.flags.items():
            setattr(self, name, dict(flags))
        held = next((t for t in (*self.conv_states.values(), *self.recurrent_states.values()) if t is not None), None)
        if held is not None and self.device is None:
            self.dtype, self.device = held.dtype, held.device  # type: ignore[assignment]

    def reset(self) -> None:
        """Forget all tokens."""
        self.forget_state()

    def forget_state(self) -> None:
        """Hold the state before any token."""
        fresh = LinearAttentionLayer(number_of_states=self.number_of_states)
        flags = {name: dict(getattr(fresh, name)) for name in _FLAGS}
        self.set_state_value(StateValue(fresh.conv_states, fresh.recurrent_states, flags))

    def activate_past_recording(self) -> None:
        """Nothing to do: going back is the cache's business."""

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing to do: the cache puts the state back (see ``LedgeredCache.crop``)."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Pick rows of the batch."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        rows = next(
            (t.shape[0] for t in (*self.conv_states.values(), *self.recurrent_states.values()) if t is not None), 0
        )
        self.batch_select_indices(torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows (indices or a bool mask), in this order."""
        rows = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self.set_state_value(self.state_value().rows(rows))


class EditableHybridLayer(StateLayer, EditableLayer):  # type: ignore[misc,override]
    """A recurrent state, and keys and values of every token."""

    def __init__(self, number_of_states: int = 1, **kwargs: Any) -> None:
        EditableLayer.__init__(self)
        StateLayer.__init__(self, number_of_states=number_of_states)

    def reset(self) -> None:
        self.forget_state()
        EditableLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        EditableLayer.crop(self, tokens_to_remove)

    def batch_select_indices(self, indices: Tensor) -> None:
        StateLayer.batch_select_indices(self, indices)
        EditableLayer.batch_select_indices(self, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        StateLayer.batch_repeat_interleave(self, repeats)


def _copied(states: Mapping[int, Tensor | None]) -> dict[int, Tensor | None]:
    return {i: None if t is None else t.detach().clone() for i, t in states.items()}
