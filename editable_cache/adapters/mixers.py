"""Which modules of a model write its cache, measured, and how to feed them recorded inputs again.

One forward runs into a cache whose layers are watched. The innermost module that is running when a layer is written is
the token mixer of that write: a recurrent mixer or an attention. No source is read and no class is named. A module may
run several times in a forward (a block shared between layers), so calls are told apart by their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from editable_cache.adapters import host
from editable_cache.adapters.states import Slot
from editable_cache.errors import UnsupportedModelError

STATE_WRITES = ("update_conv_state", "update_recurrent_state")
KEY_WRITES = ("update", "update_indexer")


@dataclass(frozen=True)
class MixerCall:
    """One call of a token mixer within a forward.

    Attributes:
        name: path of the module in the model.
        slots: recurrent or convolution states that it wrote.
        layers: indices of the layers whose keys and values it wrote.
    """

    name: str
    slots: tuple[Slot, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True)
class MixerMap:
    """The token mixers of a model in the order in which one forward calls them."""

    calls: tuple[MixerCall, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Paths of the modules, each once, in order of their first call."""
        return tuple(dict.fromkeys(call.name for call in self.calls))

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Every recurrent or convolution state that a mixer writes, in order."""
        return tuple(sorted({slot for call in self.calls for slot in call.slots}))


@dataclass(frozen=True, eq=False)
class MixerInput:
    """What one mixer call was fed: arguments by position or name, each `[batch, num_tokens, ...]`."""

    name: str
    tensors: Mapping[int | str, Tensor]


class _Frame:
    """A module that is running, and what it has written so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.slots: dict[Slot, None] = {}
        self.layers: dict[int, None] = {}


def find_mixers(model: nn.Module, input_ids: Tensor, position_ids: Tensor | None, cache: Any) -> MixerMap:
    """Run one forward of `input_ids` `[batch, num_tokens]` into the empty stock `cache` and see who writes it.

    Two tokens or more, so that the model takes the path of a prefill. Leaves nothing on model or cache layers.

    Raises:
        UnsupportedModelError: if a layer is written while no module of the model runs.
    """
    frames: list[_Frame] = []
    stack: list[_Frame] = []

    def enter(name: str, *_: Any) -> None:
        frame = _Frame(name)
        frames.append(frame)
        stack.append(frame)

    def leave(*_: Any) -> None:
        stack.pop()

    def wrote(layer_idx: int, state_idx: int | None) -> None:
        if not stack:
            raise UnsupportedModelError(
                f"Layer {layer_idx}: its cache was written outside of every module, so its mixer can't be found."
            )
        if state_idx is None:
            stack[-1].layers[layer_idx] = None
        else:
            stack[-1].slots[Slot(layer_idx, state_idx)] = None

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            for handle in (
                module.register_forward_pre_hook(partial(enter, name), prepend=True),
                module.register_forward_hook(leave, always_call=True),
            ):
                hooks.callback(handle.remove)
        hooks.enter_context(_watched(cache, wrote))
        host.run(model, input_ids, cache, position_ids=position_ids, last_logits_only=True)
    mixers = {frame.name for frame in frames if frame.slots or frame.layers}
    return MixerMap(
        tuple(MixerCall(f.name, tuple(sorted(f.slots)), tuple(f.layers)) for f in frames if f.name in mixers)
    )


@contextmanager
def recording(model: nn.Module, mixers: MixerMap) -> Iterator[list[MixerInput]]:
    """Within the context, the list that is given out grows by what each mixer call is fed, in call order."""
    recorded: list[MixerInput] = []

    def before(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorded.append(MixerInput(name, _token_tensors(args, kwargs)))

    with _before_each(model, mixers, before):
        yield recorded


@contextmanager
def replaying(
    model: nn.Module, mixers: MixerMap, recorded: Sequence[MixerInput], tokens: slice | None = None
) -> Iterator[None]:
    """Within the context, each mixer call is fed what was recorded for it (of `tokens` only), whatever it is given.

    So layer inputs are frozen: what the model computes between the mixers no longer reaches them. Holds for forwards
    of as many tokens as the recorded inputs (or the slice of them) have, and for exactly the recorded calls.

    Raises:
        UnsupportedModelError: if the mixers are called in another order, or fewer or more times.
    """
    expected = iter(recorded)
    tokens = slice(None) if tokens is None else tokens

    def before(
        name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        item = next(expected, None)
        if item is None or item.name != name:
            raise _out_of_order(name, item)
        frozen: dict[int | str, Tensor] = {key: tensor[:, tokens].clone() for key, tensor in item.tensors.items()}
        args = tuple(frozen.get(index, value) for index, value in enumerate(args))
        return args, {key: frozen.get(key, value) for key, value in kwargs.items()}

    with _before_each(model, mixers, before):
        yield
    missing = next(expected, None)
    if missing is not None:
        raise _out_of_order("the end of the forward", missing)


@contextmanager
def _before_each(model: nn.Module, mixers: MixerMap, before: Any) -> Iterator[None]:
    with ExitStack() as hooks:
        for name in mixers.names:
            handle = model.get_submodule(name).register_forward_pre_hook(partial(before, name), with_kwargs=True)
            hooks.callback(handle.remove)
        yield


def _out_of_order(called: str, expected: MixerInput | None) -> UnsupportedModelError:
    wanted = "the end of the forward" if expected is None else expected.name
    return UnsupportedModelError(
        f"Replay of recorded layer inputs: expected {wanted}, got {called}; this model does not call its mixers in "
        "the same order each time, so its chunks can't be compiled: prefill them."
    )


def _token_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int | str, Tensor]:
    """The floating arguments that carry one row per token: the hidden states come first and say how many tokens run.

    Further ones count if they are `[batch, num_tokens, size]`; masks have another rank.
    """
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    found: dict[int | str, Tensor] = {}
    lead: torch.Size | None = None
    for key, value in given:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 3:
            continue
        if lead is None:
            lead = value.shape[:2]
        elif value.dim() != 3 or value.shape[:2] != lead:
            continue
        found[key] = value.detach().clone()
    return found


@contextmanager
def _watched(cache: Any, wrote: Any) -> Iterator[None]:
    """Within the context, `wrote(layer_idx, state_idx or None)` is called before each write into a layer."""

    def state_write(
        layer_idx: int, original: Any, states: Tensor, state_idx: int = 0, *args: Any, **kwargs: Any
    ) -> Any:
        wrote(layer_idx, state_idx)
        return original(states, state_idx, *args, **kwargs)

    def key_write(layer_idx: int, original: Any, *args: Any, **kwargs: Any) -> Any:
        wrote(layer_idx, None)
        return original(*args, **kwargs)

    with ExitStack() as undo:
        for layer_idx, layer in enumerate(cache.layers):
            for names, spy in ((STATE_WRITES, state_write), (KEY_WRITES, key_write)):
                for name in names:
                    original = getattr(layer, name, None)
                    if original is not None:
                        setattr(layer, name, partial(spy, layer_idx, original))
                        undo.callback(delattr, layer, name)
        yield
