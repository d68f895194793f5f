"""What an operation did and what it cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from editable_cache.adapters import WeightsState, weights_state
from editable_cache.cache import LedgeredCache, Segment, Stale
from editable_cache.forward import run


@dataclass(frozen=True)
class Outcome:
    """Report of one operation.

    Attributes:
        operation: its name.
        segment: the segment that it made or changed, as it stands afterwards, or None.
        tokens_computed: tokens that ran through the model.
        tokens_moved: tokens whose keys were rotated to another position.
        tokens_pasted: tokens copied from a chunk.
        tokens_removed: tokens that were forgotten.
        seconds: wall time.
        stale: every span of the cache that is stale now, with its cause.
        notes: what else to know, for people.
    """

    operation: str
    segment: Segment | None = None
    tokens_computed: int = 0
    tokens_moved: int = 0
    tokens_pasted: int = 0
    tokens_removed: int = 0
    seconds: float = 0.0
    stale: tuple[Stale, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = (
            (self.tokens_computed, "computed"),
            (self.tokens_moved, "moved"),
            (self.tokens_pasted, "pasted"),
            (self.tokens_removed, "removed"),
        )
        done = ", ".join(f"{count} {what}" for count, what in counts if count) or "nothing to do"
        stale = f"; {sum(s.stop - s.start for s in self.stale)} cells stale" if self.stale else ""
        return f"{self.operation}: {done} in {self.seconds * 1e3:.1f} ms{stale}"


@dataclass
class Tally:
    """What an operation counts while it runs."""

    segment: str | None = None
    computed: int = 0
    moved: int = 0
    pasted: int = 0
    removed: int = 0
    notes: list[str] = field(default_factory=list)
    outcome: Outcome | None = None

    def done(self) -> Outcome:
        """The outcome, after the operation has ended."""
        assert self.outcome is not None
        return self.outcome


@contextmanager
def operating(
    cache: LedgeredCache, name: str, *, renews_all: bool = False, state: WeightsState | None = None
) -> Iterator[Tally]:
    """Run an operation whole or not at all, and measure it.

    Args:
        renews_all: every cell is computed again, so that it does not matter which weights computed the old ones.
        state: the model's ``weights_state`` where the caller has it already.
    """
    tally, started = Tally(), time.perf_counter()
    cache.require_idle(name)
    if state is None and cache.model is not None:
        state = weights_state(cache.model)
    run.require_continuing(cache, name, state)
    cache.settled.clear()
    with cache.operation(name):
        if not renews_all:
            cache.require_same_weights(name, state)
        yield tally
        run.settle(cache)
        for start, again in cache.settled:
            tally.computed += again
            tally.notes.append(f"recurrent state: {again} tokens computed again from slot {start} on")
        segments = {segment.name: segment for segment in cache.ledger.segments}
        tally.outcome = Outcome(
            name,
            segments.get(tally.segment or ""),
            tally.computed,
            tally.moved,
            tally.pasted,
            tally.removed,
            time.perf_counter() - started,
            cache.ledger.stale,
            tuple(tally.notes),
        )
    cache.history.append(tally.outcome)
