"""What a chunk does to the recurrent layers of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from editable_cache.chunk.transition import Transition
from editable_cache.errors import SpanError


@dataclass(frozen=True, eq=False)
class Recurrence:
    """A chunk as a map of recurrent states, between tokens that run live at its start and at its end.

    The first tokens run live because their convolutions reach back into what stands before the chunk; the last ones
    because what follows reaches back into them.

    Attributes:
        head: number of tokens at the start that run live, at least 1.
        tail: number of tokens at the end that run live.
        transitions: for every state, by layer index and index within the layer, what the tokens between do to it.
    """

    head: int
    tail: int
    transitions: Mapping[tuple[int, int], Transition]

    def __post_init__(self) -> None:
        if self.head < 1 or self.tail < 0:
            raise SpanError(f"A recurrence needs a head of at least 1 live token, got {self.head} and {self.tail}.")
        object.__setattr__(self, "transitions", MappingProxyType(dict(self.transitions)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Recurrence, (self.head, self.tail, dict(self.transitions))

    @property
    def nbytes(self) -> int:
        """Bytes of all transitions."""
        return sum(transition.nbytes for transition in self.transitions.values())
