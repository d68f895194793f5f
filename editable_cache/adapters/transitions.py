"""Capturing the transitions of a chunk by whole-model forwards alone.

The chunk runs alone: its head live, then its body, whose layer inputs are recorded. The body then runs again with
these inputs frozen, from recurrent states of our choice: from zeros, what comes out is the offset; from a constant, the
difference to that is the factor of an elementwise map; where this map does not predict what a random state becomes,
columns of the identity give a matrix; where that fails too, the layer is not affine in its state and is refused.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from editable_cache.adapters.continuation import run_in_steps
from editable_cache.adapters.mixers import MixerInput, MixerMap, find_mixers, recording, replaying
from editable_cache.adapters.states import Slot, conv_state, recurrent_state, slots, write_state
from editable_cache.chunk.transition import Form, Transition, compacted
from editable_cache.errors import Reason, SpanError, UnsupportedModelError
from editable_cache.ops import relative_error

TOLERANCE = 1e-4
"""Largest relative error between a predicted and a replayed state; states of 16 bits don't reach it."""

EXACT = 1e-5
"""Above this error an elementwise map is held against a matrix: what a delta rule has nearly forgotten fits both."""

HEADROOM = 4096.0
"""How far the probing states stand above the offset, so that the difference of two runs keeps its digits."""

States = Mapping[Slot, Tensor]


@dataclass(frozen=True, eq=False)
class Captured:
    """A chunk's body as transitions, and what else the capture computed.

    Attributes:
        transitions: one for each slot, for the tokens `ids[head : n - tail]`.
        cache: the stock cache after `ids[: n - tail]` alone; its keys and values are those of head and body.
        logits: `[batch, vocab_size]` of the last body token.
        mixers: the token mixers of the model.
        inputs: recorded mixer inputs of the body, one list for each forward that it took.
        errors: relative error of the prediction for a random state, by slot.
        num_forwards: forwards of the whole model that the capture took, those over the body counted once each.
    """

    transitions: Mapping[Slot, Transition]
    cache: Any
    logits: Tensor
    mixers: MixerMap
    inputs: tuple[tuple[MixerInput, ...], ...]
    errors: Mapping[Slot, float]
    num_forwards: int


def capture(
    model: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor | None,
    *,
    head: int,
    tail: int = 0,
    cache_factory: Callable[[], Any],
    step: int | None,
    mixers: MixerMap | None = None,
    forms: Mapping[Slot, Form] | None = None,
) -> Captured:
    """Run a chunk alone and capture what its body `ids[head : n - tail]` does to every recurrent state.

    Args:
        model: in evaluation mode.
        input_ids: int64 `[1, n]`.
        position_ids: int64 `[1, n]` or with leading axes, taken as given; None for models that take none. Position 0
            is special in some recurrences (RG-LRU): compile at 1 or later.
        head: tokens that will run live in front of the body, at least 1. The convolution windows that they leave
            alone are those from which the body starts; take the kernel size - 1 or more.
        tail: tokens that will run live behind the body; they are not run here.
        cache_factory: makes an empty stock cache of this model.
        step: most tokens that may run at once on a warm cache (``step_tokens`` of the continuation self-test), or None.
        mixers: of an earlier capture with this model, to save a forward.
        forms: of an earlier capture with this model: slots known to be "matrix" skip the elementwise attempt.

    Raises:
        SpanError: if head, body and tail do not fit the chunk.
        UnsupportedModelError: if a state is neither elementwise nor matrix affine, with the errors as reasons.
    """
    num_body = input_ids.shape[1] - head - tail
    least = 2 if step is None else 1  # a model that runs several tokens rightly may still decode single ones otherwise
    if head < 1 or tail < 0 or num_body < least:
        raise SpanError(
            f"A chunk of {input_ids.shape[1]} tokens with a live head of {head} and a live tail of {tail}: expected at "
            f"least 1 token of head and {least} between; keep the chunk live."
        )
    run = _Capture(model, input_ids, position_ids, head, num_body, cache_factory, step)
    with torch.no_grad():
        return run(mixers, forms or {})


class _Capture:
    """The forwards of one capture. Replays start from copies of the cache that the head left."""

    def __init__(
        self,
        model: nn.Module,
        input_ids: Tensor,
        position_ids: Tensor | None,
        head: int,
        num_body: int,
        cache_factory: Callable[[], Any],
        step: int | None,
    ) -> None:
        self.model, self.input_ids, self.position_ids = model, input_ids, position_ids
        self.head, self.num_body, self.cache_factory = head, num_body, cache_factory
        self.step = num_body if step is None else step
        self.num_forwards = 0
        self.inputs: list[tuple[MixerInput, ...]] = []

    def __call__(self, mixers: MixerMap | None, forms: Mapping[Slot, Form]) -> Captured:
        self.mixers = self._find() if mixers is None else mixers
        self.start = self.cache_factory()
        self._forward(self.start, 0, self.head)
        body = copy.deepcopy(self.start)
        logits = self._run_body(body, frozen=False)
        live = {slot: state for slot in slots(body) if (state := recurrent_state(body, slot)) is not None}
        transitions, errors = self._transitions(live, forms) if live else ({}, {})
        for slot in slots(body):
            conv = conv_state(body, slot)
            known = transitions.get(slot, Transition("replace", None, None, None))
            transitions[slot] = replace(known, conv=None if conv is None else conv.clone())
        return Captured(transitions, body, logits, self.mixers, tuple(self.inputs), errors, self.num_forwards)

    def _transitions(
        self, live: States, forms: Mapping[Slot, Form]
    ) -> tuple[dict[Slot, Transition], dict[Slot, float]]:
        offsets = self._replay({slot: torch.zeros_like(state) for slot, state in live.items()})
        scales = {slot: _power_of_two(offset) for slot, offset in offsets.items()}
        generator = torch.Generator().manual_seed(0)
        probe = {
            slot: scales[slot] * torch.randn(state.shape, generator=generator).to(state) for slot, state in live.items()
        }
        seen = self._replay(probe)

        def fit(found: Mapping[Slot, Transition]) -> dict[Slot, float]:
            return {slot: relative_error(each.apply(probe[slot]), seen[slot]) for slot, each in found.items()}

        elementwise = [slot for slot in live if forms.get(slot) != "matrix"]
        transitions = self._elementwise(live, elementwise, offsets, scales) if elementwise else {}
        errors = fit(transitions)
        doubtful = {slot: offsets[slot] for slot in live if not errors.get(slot, math.inf) <= EXACT}
        if doubtful:
            matrices = self._matrices(doubtful, offsets, scales)
            better = {slot: error for slot, error in fit(matrices).items() if error < errors.get(slot, math.inf)}
            transitions.update({slot: matrices[slot] for slot in better})
            errors.update(better)
        _refuse({slot: errors.get(slot, math.nan) for slot in live})
        return transitions, errors

    def _elementwise(
        self, live: States, wanted: Sequence[Slot], offsets: States, scales: Mapping[Slot, float]
    ) -> dict[Slot, Transition]:
        chosen = {
            slot: torch.full_like(state, HEADROOM * scales[slot] if slot in wanted else 0.0)
            for slot, state in live.items()
        }
        ends = self._replay(chosen)
        found = {}
        for slot in wanted:
            moved = ends[slot].float() - offsets[slot].float()
            if not bool(moved.any()):
                found[slot] = Transition("replace", None, offsets[slot], None)
            else:
                factor = compacted(moved / (HEADROOM * scales[slot]))
                found[slot] = Transition("diagonal", factor, offsets[slot], None)
        return found

    def _matrices(self, doubtful: States, offsets: States, scales: Mapping[Slot, float]) -> dict[Slot, Transition]:
        """Columns of the identity, as many at a time as a state is wide, in every doubtful slot of the same replay."""
        doubtful = {slot: offset for slot, offset in doubtful.items() if offset.dim() >= 3}
        if not doubtful:
            return {}
        columns: dict[Slot, list[Tensor]] = {slot: [] for slot in doubtful}
        for block in range(max(-(-state.shape[-2] // state.shape[-1]) for state in doubtful.values())):
            states = {slot: torch.zeros_like(offset) for slot, offset in offsets.items()}
            widths = {}
            for slot, state in doubtful.items():
                rows, width = state.shape[-2:]
                first = min(block * width, rows)
                widths[slot] = count = min(width, rows - first)
                within = torch.arange(count, device=state.device)
                states[slot][..., first + within, within] = HEADROOM * scales[slot]
            ends = self._replay(states)
            for slot, count in widths.items():
                moved = ends[slot].float() - offsets[slot].float()
                columns[slot].append(moved[..., :count] / (HEADROOM * scales[slot]))
        return {
            slot: Transition("matrix", torch.cat(parts, -1).contiguous(), offsets[slot], None)
            for slot, parts in columns.items()
        }

    def _replay(self, states: States) -> dict[Slot, Tensor]:
        """Where the body's frozen inputs lead from `states`, with the convolution windows that the head left."""
        cache = copy.deepcopy(self.start)
        for slot, state in states.items():
            write_state(cache, slot, recurrent=state)
        self._run_body(cache, frozen=True)
        return {slot: _state(cache, slot).clone() for slot in states}

    def _run_body(self, cache: Any, *, frozen: bool) -> Tensor:
        """One pass over the body in as many forwards as the model needs: recorded at first, then from the records."""
        self.num_forwards += 1
        logits = None
        for index, start in enumerate(range(self.head, self.head + self.num_body, self.step)):
            stop = min(start + self.step, self.head + self.num_body)
            if frozen:
                with replaying(self.model, self.mixers, self.inputs[index]):
                    logits = self._forward(cache, start, stop, count=False)
            else:
                with recording(self.model, self.mixers) as recorded:
                    logits = self._forward(cache, start, stop, count=False)
                self.inputs.append(tuple(recorded))
        assert logits is not None
        return logits

    def _find(self) -> MixerMap:
        self.num_forwards += 1
        count = min(self.input_ids.shape[1], self.head + self.num_body, 8)
        positions = None if self.position_ids is None else self.position_ids[..., :count]
        return find_mixers(self.model, self.input_ids[:, :count], positions, self.cache_factory())

    def _forward(self, cache: Any, start: int, stop: int, *, count: bool = True) -> Tensor:
        self.num_forwards += count
        positions = None if self.position_ids is None else self.position_ids[..., start:stop]
        return run_in_steps(self.model, self.input_ids[:, start:stop], positions, cache, step=None)


def _state(cache: Any, slot: Slot) -> Tensor:
    state = recurrent_state(cache, slot)
    assert state is not None
    return state


def _power_of_two(offset: Tensor) -> float:
    """A power of two at or above the largest value of a state, so that scaling by it is exact; 1 for zeros."""
    largest = float(offset.abs().max())
    return 2.0 ** math.ceil(math.log2(largest)) if 0.0 < largest < math.inf else 1.0


def _refuse(errors: Mapping[Slot, float]) -> None:
    wrong = {slot: error for slot, error in errors.items() if not error <= TOLERANCE}
    if wrong:
        raise UnsupportedModelError(
            "Capture of a chunk: recurrent layers are not affine in their state (or keep it in 16 bits), so a chunk "
            "can't be composed; load the model in float32, or prefill instead.",
            tuple(
                Reason(
                    f"layer {slot.layer_idx}, state {slot.state_idx}",
                    f"a random state predicted to {TOLERANCE:.0e}, elementwise or by a matrix",
                    f"error {error:.1e}",
                )
                for slot, error in wrong.items()
            ),
        )
