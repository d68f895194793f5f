"""The registry of signals: what scores cells, by name, each with the tier that says what it may read.

A *signal* scores every cell of a document: the higher, the sooner to be repaired. It is a function of exactly its
tier's view: a tier-0 signal is handed the trace of a prefill, and nothing that leads to a query or to the clean cache.
A new one is a few lines:

    @signal("value_norm", tier=0)
    def value_norm(view: Tier0View) -> Tensor:
        \"\"\"Formula. Source: where it is from.\"\"\"
        return view.prefill.value_norm
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_type_hints, overload

import torch
from torch import Tensor

from editable_cache.errors import SpanError
from editable_cache.repair.view import VIEWS, Tier0View, Tier1View, Tier2View, View, narrowed


@dataclass(frozen=True)
class Signal:
    """A registered signal.

    Attributes:
        name: what it is called.
        tier: 0, 1 or 2.
        function: the function of that tier's view; its docstring has the formula and the source.
    """

    name: str
    tier: int
    function: Callable[..., Tensor]

    def __call__(self, view: View) -> Tensor:
        """Scores of all cells, new float32 ``[num_layers, num_tokens]``, from a view of exactly this tier.

        Raises:
            TypeError: for any other view, also for one that holds more.
            SpanError: if the function returns another shape, or a score that is no finite number.
        """
        wanted = VIEWS[self.tier]
        if type(view) is not wanted:
            raise TypeError(f"Signal {self.name!r} reads exactly a {wanted.__name__}, got {type(view).__name__}.")
        found, shape = self.function(view), list(view.prefill.shape)
        if not isinstance(found, Tensor) or list(found.shape) != shape or not bool(found.isfinite().all()):
            got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise SpanError(f"Signal {self.name!r}: expected finite scores of shape {shape}, got {got}.")
        return found.to(torch.float32).clone(memory_format=torch.contiguous_format)


_SIGNALS: dict[str, Signal] = {}

F0 = TypeVar("F0", bound=Callable[[Tier0View], Tensor])
F1 = TypeVar("F1", bound=Callable[[Tier1View], Tensor])
F2 = TypeVar("F2", bound=Callable[[Tier2View], Tensor])


@overload
def signal(name: str, *, tier: Literal[0]) -> Callable[[F0], F0]: ...
@overload
def signal(name: str, *, tier: Literal[1]) -> Callable[[F1], F1]: ...
@overload
def signal(name: str, *, tier: Literal[2]) -> Callable[[F2], F2]: ...
def signal(name: str, *, tier: int) -> Callable[[Any], Any]:
    """Register the decorated function as a signal of `tier`, and return it as it is.

    Raises:
        SpanError: if the name is taken.
        TypeError: if its one positional argument is not annotated with the tier's view, or if it brings along something
            else: a closure, or a default that is no plain number or word.
    """

    def register(function: Any) -> Any:
        if name in _SIGNALS:
            raise SpanError(f"Signal {name!r} is already registered by {_SIGNALS[name].function.__module__}.")
        _require_contract(name, tier, function)
        _SIGNALS[name] = Signal(name, tier, function)
        return function

    return register


def get_signal(name: str) -> Signal:
    """The registered signal of that name; ``SpanError`` with the names nearest to it if there is none."""
    if not isinstance(name, str):
        raise SpanError(f"Signal: expected the name of a signal (see list_signals()), got {type(name).__name__}.")
    if name not in _SIGNALS:
        near = difflib.get_close_matches(name, _SIGNALS, n=3)
        advice = (
            f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(sorted(_SIGNALS))}."
        )
        raise SpanError(f"Unknown signal {name!r}; {advice}")
    return _SIGNALS[name]


def list_signals(tier: int | None = None) -> tuple[Signal, ...]:
    """All registered signals, or those of one tier, by tier and name."""
    chosen = (found for found in _SIGNALS.values() if tier is None or found.tier == tier)
    return tuple(sorted(chosen, key=lambda found: (found.tier, found.name)))


def scores(name: str, available: View) -> Tensor:
    """Scores of all cells by a signal that sees its own tier's part of `available` and nothing else.

    Returns:
        float32 ``[num_layers, num_tokens]``; the higher, the sooner to be repaired.

    Raises:
        SpanError: if there is no such signal, or its tier needs a trace that is missing.
    """
    found = get_signal(name)
    return found(narrowed(available, found.tier))


def ranks(values: Tensor, *, per_layer: bool = False) -> Tensor:
    """Ranks from 0 (lowest) to 1 (highest), ties with their average: ``(below + (equal - 1) / 2) / (n - 1)``.

    Where all values are equal every rank is 0.5.

    Args:
        values: any shape, n of them.
        per_layer: rank each row ``values[l]`` by itself, so that no layer outranks another.

    Returns:
        float32 of the same shape.
    """
    if per_layer:
        return torch.stack([ranks(row) for row in values])
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    if len(counts) < 2:
        return torch.full(values.shape, 0.5, dtype=torch.float32)
    equal = counts.to(torch.float64)
    middle = equal.cumsum(0) - equal + (equal - 1) / 2
    found: Tensor = (middle / (values.numel() - 1)).to(torch.float32)[inverse]
    return found


def _require_contract(name: str, tier: int, function: Any) -> None:
    where = f"Signal {name!r} of tier {tier}"
    if tier not in range(len(VIEWS)):
        raise TypeError(f"{where}: expected tier 0, 1 or 2.")
    if not inspect.isfunction(function) or function.__closure__:
        raise TypeError(f"{where}: expected a plain function without a closure: what it reads comes with the view.")
    arguments = list(inspect.signature(function).parameters.values())
    found = get_type_hints(function).get(arguments[0].name) if arguments else None
    if found is not VIEWS[tier]:
        raise TypeError(f"{where}: expected its first argument to be a {VIEWS[tier].__name__}, got {found}.")
    for other in arguments[1:]:
        if other.kind is not other.KEYWORD_ONLY or type(other.default) not in (int, float, bool, str):
            raise TypeError(f"{where}: expected {other.name!r} by keyword only, with a number or word as its default.")
