"""The cache's own record: ids, positions, segments, fields and freshness.

A `Ledger` is a value. Every change makes a new one, so that forks share it, a failed operation keeps the old one, and
nobody can change it behind the cache's back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from editable_cache.cache.axes import every_axis, furthest, join_axes, renumbered
from editable_cache.cache.pieces import merge, spans_of
from editable_cache.errors import FieldError, SpanError

UNKNOWN = -1
"""Id of a token that reached the cache unseen."""

TENSORS = ("ids", "positions", "sources", "valid", "groups", "offsets", "axes", "images")
"""Per-slot records of a ledger, each ``[batch, length]``, ``axes`` with one more dimension."""

Span = tuple[int, int]


@dataclass(frozen=True)
class Segment:
    """A named, half-open span of slots.

    Attributes:
        name: unique in its cache.
        start, stop: slots ``[start, stop)``.
        origin: ``"prefilled"``, ``"generated"``, ``"spliced"``, ``"erratum"`` or ``"unseen"``.
        template: for a segment with fields, its text as ``(literal, field name or None)`` pieces.
        note: where it comes from, for people.
        grows: made by a bare forward or ``generate``: more tokens of the same origin continue it.
    """

    name: str
    start: int
    stop: int
    origin: str
    template: tuple[tuple[str, str | None], ...] = ()
    note: str = ""
    grows: bool = False

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def span(self) -> Span:
        """``(start, stop)``."""
        return self.start, self.stop

    def slots(self, start: int, stop: int) -> Span:
        """Slots of the cache for tokens ``[start, stop)`` counted from the segment's own first token."""
        if not 0 <= start < stop <= len(self):
            raise SpanError(f"Segment {self.name!r}: expected 0 <= start < stop <= {len(self)}, got {start}, {stop}.")
        return self.start + start, self.start + stop


@dataclass(frozen=True)
class Erratum:
    """A correcting line: the segment that holds it, the value that it states, and how many tokens it has."""

    segment: str
    value: str
    tokens: int


@dataclass(frozen=True)
class Field:
    """A named value inside a segment.

    Attributes:
        name: unique in its cache.
        value: what the text of the cache says.
        segment: name of the segment whose template defines it.
        spans: the tokens of each occurrence, as spans of slots.
        errata: correcting lines in the context, oldest first; only the last one is live, the others are superseded.
    """

    name: str
    value: str
    segment: str
    spans: tuple[Span, ...]
    errata: tuple[Erratum, ...] = ()

    @property
    def current(self) -> str:
        """The value that a reader of the whole context should believe."""
        return self.errata[-1].value if self.errata else self.value


@dataclass(frozen=True)
class Stale:
    """Cells ``[start, stop)`` that were computed before something in front of them changed."""

    start: int
    stop: int
    cause: str


@dataclass(frozen=True)
class Isolated:
    """What a spliced chunk was when it was compiled: its ids, and those that it had seen before them."""

    ids: tuple[int, ...]
    prefix_ids: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Ledger:
    """Record of every slot of a cache.

    Attributes:
        ids: int64 ``[batch, length]``; ``UNKNOWN`` where the token was never seen.
        positions: int64 ``[batch, length]``, what the rotary embedding saw.
        sources: int64 ``[batch, length]``, where the pristine bits of the cell were computed (``positions`` unless
            moved).
        valid: bool ``[batch, length]``, False for padding that nobody may attend to.
        groups: int64 ``[batch, length]``; 0 for cells that saw everything before them, ``g > 0`` for cells of an
            isolated chunk, which saw only what that chunk had seen.
        offsets: int64 ``[batch, length]``, index of the token in its isolated chunk; 0 for group 0.
        axes: int64 ``[batch, length, num_axes - 1]``, how far the token's other positions are from its first one, which
            is in ``positions`` (time, height and width of an image). All axes move alike, so this never changes. Zeros
            for text; no columns where tokens have one position, or no image was seen.
        images: int64 ``[batch, length]``, for tokens that stand for an image its number in ``digests``, from 1 on; 0
            for all others.
        segments: ascending and without gaps, covering every slot.
        fields: in order of definition.
        stale: spans with causes; may overlap.
        chunks: for each group, from 1 on, what its chunk was when it was compiled.
        open_gap: positions left free behind the last token, where the end was removed without closing the gap.
        digests: content of each image, as text.
    """

    ids: Tensor
    positions: Tensor
    sources: Tensor
    valid: Tensor
    groups: Tensor
    offsets: Tensor
    axes: Tensor
    images: Tensor
    segments: tuple[Segment, ...] = ()
    fields: tuple[Field, ...] = ()
    stale: tuple[Stale, ...] = ()
    chunks: tuple[Isolated, ...] = ()
    open_gap: int = 0
    digests: tuple[str, ...] = ()

    @classmethod
    def empty(cls, batch: int = 1) -> Ledger:
        """A ledger without slots."""
        none = torch.empty((batch, 0), dtype=torch.int64)
        return cls(none, none, none, none.bool(), none, none, none[..., None][..., :0], none)

    def __len__(self) -> int:
        return int(self.ids.shape[1])

    @property
    def batch(self) -> int:
        """Number of rows."""
        return int(self.ids.shape[0])

    @property
    def ids_known(self) -> bool:
        """Whether every id that may be attended to was seen."""
        return not bool(((self.ids == UNKNOWN) & self.valid).any())

    def same(self, other: Ledger) -> bool:
        """Whether both record exactly the same."""
        values = ("segments", "fields", "stale", "chunks", "open_gap", "digests")
        return all(torch.equal(getattr(self, t), getattr(other, t)) for t in TENSORS) and all(
            getattr(self, v) == getattr(other, v) for v in values
        )

    # -- looking up

    @property
    def reach(self) -> Tensor:
        """int64 ``[batch, length]``: the largest position of each token over all axes."""
        return self.positions + furthest(self.axes)

    def image_at(self, row: int, slot: int) -> str:
        """The digest of the image that a token stands for, or an empty text."""
        number = int(self.images[row, slot])
        return self.digests[number - 1] if number else ""

    def places(self, slots: slice | Tensor) -> Tensor:
        """``position_ids`` of slots: int64 ``[batch, n]``, or ``[num_axes, batch, n]`` where axes differ."""
        return every_axis(self.positions[:, slots], self.axes[:, slots])

    def next_positions(self, valid: Tensor) -> Tensor:
        """Positions for new tokens: one after the largest position of the row, padding not counted.

        Args:
            valid: bool ``[batch, num_tokens]``, False for padding.

        Returns:
            int64 ``[batch, num_tokens]``; 0 for padding.
        """
        last = torch.full((self.batch, 1), -1, dtype=torch.int64)
        if len(self):
            last = self.reach.masked_fill(~self.valid, -1).amax(dim=1, keepdim=True)
        last = last + self.open_gap
        return (last + valid.long().cumsum(dim=1)).masked_fill(~valid, 0)

    def segment(self, name: str) -> Segment:
        """The segment called ``name``.

        Raises:
            SpanError: if there is none; lists those there are.
        """
        for segment in self.segments:
            if segment.name == name:
                return segment
        raise SpanError(f"Unknown segment {name!r}; this cache has {[segment.name for segment in self.segments]}.")

    def field(self, name: str) -> Field:
        """The field called ``name``.

        Raises:
            FieldError: if there is none; lists those there are.
        """
        for field in self.fields:
            if field.name == name:
                return field
        raise FieldError(
            f"Unknown field {name!r}; this cache has {[field.name for field in self.fields]}. Declare it with "
            f"append('... {{{name}}} ...', fields={{{name!r}: value}})."
        )

    def free_name(self, wanted: str) -> str:
        """``wanted``, with a number behind it if a segment is called that already."""
        taken = {segment.name for segment in self.segments}
        name, count = wanted, 1
        while name in taken:
            count += 1
            name = f"{wanted} ({count})"
        return name

    def causes(self, start: int, stop: int) -> tuple[str, ...]:
        """What the cells of a span are stale with respect to."""
        return tuple(dict.fromkeys(s.cause for s in self.stale if s.start < stop and start < s.stop))

    # -- changing

    def extended(
        self,
        ids: Tensor,
        positions: Tensor,
        valid: Tensor,
        segment: Segment,
        *,
        sources: Tensor | None = None,
        groups: Tensor | None = None,
        offsets: Tensor | None = None,
        axes: Tensor | None = None,
        images: Tensor | None = None,
        digests: Sequence[str] = (),
    ) -> Ledger:
        """With new slots at the end.

        A segment continues the last one if it has its name, or no name and its origin where that one ``grows``;
        otherwise it becomes a new one.

        Args:
            groups, offsets, axes: as recorded; zeros by default.
            images, digests: for tokens that stand for an image, its number in ``digests``; none by default.
        """
        start, count = len(self), ids.shape[1]
        segments = self.segments
        last = segments[-1] if segments else None
        continues = last is not None and not segment.name and last.grows and last.origin == segment.origin
        if last is not None and (segment.name == last.name or continues):
            segments = (*segments[:-1], replace(last, stop=last.stop + count))
        elif count:
            name = segment.name or self.free_name(segment.origin)
            segments = (*segments, replace(segment, name=name, start=start, stop=start + count))
        images = torch.zeros_like(ids) if images is None else images
        return replace(
            self,
            axes=join_axes([self.axes, ids.new_zeros((*ids.shape, 0)) if axes is None else axes]),
            images=torch.cat((self.images, renumbered(images, len(self.digests))), dim=1),
            digests=(*self.digests, *digests),
            ids=torch.cat((self.ids, ids), dim=1),
            positions=torch.cat((self.positions, positions), dim=1),
            sources=torch.cat((self.sources, positions if sources is None else sources), dim=1),
            valid=torch.cat((self.valid, valid), dim=1),
            open_gap=0 if count else self.open_gap,
            groups=torch.cat((self.groups, torch.zeros_like(ids) if groups is None else groups), dim=1),
            offsets=torch.cat((self.offsets, torch.zeros_like(ids) if offsets is None else offsets), dim=1),
            segments=segments,
        )

    def truncated(self, length: int) -> Ledger:
        """The first ``length`` slots; segments and fields that are cut off disappear."""
        segments = tuple(
            replace(s, stop=length, template=()) if s.stop > length else s for s in self.segments if s.start < length
        )
        cut = replace(
            self,
            **{name: getattr(self, name)[:, :length] for name in TENSORS},
            open_gap=0 if length < len(self) else self.open_gap,
            segments=segments,
            stale=tuple(replace(s, stop=min(s.stop, length)) for s in self.stale if s.start < length),
        )
        return cut.with_fields(f for f in self.fields if all(stop <= length for _, stop in f.spans))

    def with_fields(self, fields: Iterable[Field]) -> Ledger:
        """With these fields; errata whose line is gone, or was cut, are forgotten."""
        lengths = {segment.name: len(segment) for segment in self.segments}
        whole = (
            replace(field, errata=tuple(e for e in field.errata if lengths.get(e.segment) == e.tokens))
            for field in fields
        )
        return replace(self, fields=tuple(whole))

    def with_field(self, field: Field) -> Ledger:
        """With ``field`` in place of the one of its name, or added."""
        if any(old.name == field.name for old in self.fields):
            return replace(self, fields=tuple(field if old.name == field.name else old for old in self.fields))
        return replace(self, fields=(*self.fields, field))

    def marked_stale(self, spans: Sequence[Span], cause: str) -> Ledger:
        """With ``spans`` stale because of ``cause``."""
        new = tuple(Stale(start, stop, cause) for start, stop in merge(spans))
        return replace(self, stale=tuple(dict.fromkeys((*self.stale, *new))))

    def marked_fresh(self, slots: Tensor) -> Ledger:
        """After every layer of ``slots`` was recomputed: no longer stale, no longer part of an isolated chunk."""
        fresh = torch.zeros(len(self), dtype=torch.bool)
        fresh[slots] = True
        causes = dict.fromkeys(old.cause for old in self.stale)
        stale = tuple(
            Stale(start, stop, cause) for cause in causes for start, stop in spans_of(self._stale_mask(cause) & ~fresh)
        )
        return self._as_live(slots, stale)

    def recomputed(self, whole: Tensor, partly: Tensor) -> Ledger:
        """After chosen cells were computed anew: in every layer at slots ``whole``, in some layers at ``partly``.

        Cells that were exact have not changed by it. Where others have, live cells behind them that were not computed
        anew know what stood there before.
        """
        inexact, known_stale = (self.groups != 0).any(dim=0), self._stale_mask()
        chosen = torch.cat((whole, partly))
        changed = chosen[(inexact | known_stale)[chosen]]
        fresh = self.marked_fresh(whole)
        stale = torch.zeros(len(self), dtype=torch.bool)
        if len(changed):
            stale[int(changed.min()) + 1 :] = True
            stale &= ~inexact & ~known_stale
            stale[whole] = False
        if len(partly):
            stale[partly] |= inexact[partly]
            fresh = fresh._as_live(partly, fresh.stale)
        return fresh.marked_stale(spans_of(stale), "recompute")

    def _stale_mask(self, cause: str | None = None) -> Tensor:
        """bool ``[length]``: cells that are stale, because of ``cause`` or of anything."""
        mask = torch.zeros(len(self), dtype=torch.bool)
        for span in self.stale:
            if cause in (None, span.cause):
                mask[span.start : span.stop] = True
        return mask

    def _as_live(self, slots: Tensor, stale: tuple[Stale, ...]) -> Ledger:
        groups, offsets, sources = self.groups.clone(), self.offsets.clone(), self.sources.clone()
        groups[:, slots] = offsets[:, slots] = 0
        sources[:, slots] = self.positions[:, slots]
        return replace(self, groups=groups, offsets=offsets, sources=sources, stale=stale)

    def mixed(self, start: int, stop: int, cause: str) -> Ledger:
        """Cells ``[start, stop)`` are of no isolated chunk and of no live prefill: stale from the beginning."""
        groups, offsets = self.groups.clone(), self.offsets.clone()
        groups[:, start:stop] = offsets[:, start:stop] = 0
        return replace(self, groups=groups, offsets=offsets).marked_stale([(start, stop)], cause)

    def with_last(self, ids: Tensor, positions: Tensor) -> Ledger:
        """After the last slot ran again: ``ids`` and ``positions`` are ``[batch, 1]``, of as many or more rows."""
        repeats = ids.shape[0] // self.batch
        ledger = self if repeats == 1 else self.rows(torch.arange(self.batch).repeat_interleave(repeats))
        ledger = replace(
            ledger,
            ids=torch.cat((ledger.ids[:, :-1], ids), dim=1),
            positions=torch.cat((ledger.positions[:, :-1], positions), dim=1),
        )
        return ledger.marked_fresh(torch.tensor([len(self) - 1]))

    def rows(self, indices: Tensor) -> Ledger:
        """With the given rows of the batch, in this order."""
        picked = {name: getattr(self, name)[indices] for name in TENSORS}
        return replace(self, **picked)
