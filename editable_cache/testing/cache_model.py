"""A perfect model of a cache, too simple to be wrong: a plain list of (token id, position).

Every token also has a number of its own, so that its cell can be followed wherever it goes, and the name of the field
that it belongs to. Each method does to the list what the operation of its name does to a cache of one row.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

Span = tuple[int, int]


@dataclass(frozen=True)
class Token:
    """One slot: id, position, the field it belongs to (name and which occurrence), and a number of its own."""

    id: int
    position: int
    field: tuple[str, int] | None = None
    number: int = dataclasses.field(default_factory=itertools.count().__next__)


class RefusedError(Exception):
    """The operation makes no sense for this list; a cache must raise, and stay as it is."""


@dataclass
class CacheModel:
    """The list. ``computed`` collects the numbers of tokens whose cells an operation may have computed anew, ``unfed``
    holds the token that a ``generate`` returned last, and ``open_gap`` counts positions left free at the end.
    """

    tokens: list[Token] = dataclasses.field(default_factory=list)
    computed: set[int] = dataclasses.field(default_factory=set)
    unfed: list[int] = dataclasses.field(default_factory=list)
    open_gap: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def ids(self) -> list[int]:
        """Token id of every slot."""
        return [token.id for token in self.tokens]

    @property
    def positions(self) -> list[int]:
        """Position of every slot."""
        return [token.position for token in self.tokens]

    def copy(self) -> CacheModel:
        """The same list, free to go another way."""
        return CacheModel(list(self.tokens), unfed=list(self.unfed), open_gap=self.open_gap)

    def spans_of(self, name: str) -> list[Span]:
        """Slots of each occurrence of a field, ascending."""
        slots: dict[tuple[str, int], list[int]] = {}
        for slot, token in enumerate(self.tokens):
            if token.field is not None and token.field[0] == name:
                slots.setdefault(token.field, []).append(slot)
        return sorted((found[0], found[-1] + 1) for found in slots.values())

    def append(self, ids: Sequence[int], field: tuple[str, int] | None = None) -> None:
        """New tokens behind everything, after the largest position; what was not fed yet comes before them."""
        ids, self.unfed = ([*self.unfed, *ids], []) if field is None else (ids, self.unfed)
        first = max(self.positions, default=-1) + 1 + self.open_gap
        self.open_gap = 0 if ids else self.open_gap
        new = [Token(token_id, first + step, field) for step, token_id in enumerate(ids)]
        self.computed |= {token.number for token in new}
        self.tokens += new

    def insert(self, ids: Sequence[int], at: int, seam: int | None = None) -> None:
        """New tokens at a slot; those behind make room. Of a spliced chunk only ``seam`` tokens are computed later."""
        self._refuse_cut(at)
        if at == len(self):
            self.append(ids)
            return
        first = min(self.positions[at:])
        new = [Token(token_id, first + step) for step, token_id in enumerate(ids)]
        self.computed |= {token.number for token in new}
        later = [replace(token, position=token.position + len(ids)) for token in self.tokens[at:]]
        self.tokens[at:] = [*new, *later]

    def remove(self, start: int, stop: int, *, close_gap: bool = True) -> None:
        """Forget a span; those behind close up."""
        self._refuse_cut(start, stop)
        gone = stop - start if close_gap else 0
        later = [replace(token, position=token.position - gone) for token in self.tokens[stop:]]
        if any(token.position < 0 for token in later):
            raise RefusedError("a position below 0")
        after = max(self.positions) + 1 + self.open_gap
        self.tokens[start:] = later
        if not later:
            self.unfed = []
            self.open_gap = 0 if close_gap else after - max(self.positions, default=-1) - 1

    def crop(self, count: int) -> None:
        """Forget the last ``count`` tokens; a field that is cut is one no longer."""
        kept = self.tokens[: len(self) - count]
        cut = {token.field[0] for token in self.tokens[len(kept) :] if token.field is not None}
        self.open_gap, self.unfed = (0, []) if count else (self.open_gap, self.unfed)
        self.tokens = [replace(t, field=None) if t.field is not None and t.field[0] in cut else t for t in kept]

    def move(self, start: int, stop: int, to: int) -> None:
        """Put a span elsewhere in the order; the positions in between are dealt out anew, ascending."""
        if stop == len(self):  # what moves away from the end takes the token along that follows it
            self.append([])
            stop = len(self)
        if not 0 <= to <= len(self) - (stop - start):
            raise RefusedError("no such place")
        if to == start:
            return
        rest = self.tokens[:start] + self.tokens[stop:]
        moved = rest[:to] + self.tokens[start:stop] + rest[to:]
        low, high = min(start, to), max(stop, to + stop - start)
        self._refuse_cut(start, stop, *((high,) if to > start else (low,)))
        places = sorted(self.positions[low:high])
        moved[low:high] = [replace(token, position=place) for token, place in zip(moved[low:high], places, strict=True)]
        self.tokens = moved

    def shift(self, start: int, stop: int, position: int) -> None:
        """Other positions in the same place: the smallest of the span becomes ``position``."""
        by = position - min(self.positions[start:stop])
        self.tokens[start:stop] = [replace(t, position=t.position + by) for t in self.tokens[start:stop]]

    def refresh(self, name: str, ids: Sequence[int]) -> None:
        """Give every occurrence of a field other tokens; what follows keeps its distance to the token before it."""
        spans = self.spans_of(name)
        same_length = all(stop - start == len(ids) for start, stop in spans)
        for start, stop in reversed(spans):
            first, last = self.tokens[start].position, self.tokens[stop - 1].position
            field = self.tokens[start].field
            places = [token.position for token in self.tokens[start:stop]] if same_length else None
            new = [
                Token(token_id, first + step if places is None else places[step], field)
                for step, token_id in enumerate(ids)
            ]
            self.computed |= {token.number for token in new}
            by = new[-1].position - last
            later = [replace(token, position=token.position + by) for token in self.tokens[stop:]]
            if any(token.position < 0 for token in later):
                raise RefusedError("a position below 0")
            self.tokens[start:] = [*new, *later]

    def recompute(self, slots: Sequence[int]) -> None:
        """Cells of these slots may change."""
        self.computed |= {self.tokens[slot].number for slot in slots}

    def _refuse_cut(self, *borders: int) -> None:
        for slot in borders:
            if 0 < slot < len(self):
                left, right = self.tokens[slot - 1], self.tokens[slot]
                if left.field is not None and left.field == right.field:
                    raise RefusedError(f"cuts the field {left.field}")
