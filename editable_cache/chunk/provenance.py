"""What the tokens of a chunk had seen, and which of them stand for images."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

STORED = re.compile(r"\bstored as (int8|fp8)\b")
CONVERTED = re.compile(r"\bconverted from \w+ to \w+")
"""What notes say of cells that were rounded after they were computed."""


@dataclass(frozen=True)
class Part:
    """A chunk inside a merged one: it had seen its own prefix and itself, not the parts in front of it.

    Attributes:
        start, stop: its tokens ``[start, stop)`` in the merged chunk.
        prefix_ids: what had stood before it when it was compiled.
        name: its name before the merge, or None.
        note: what was done to it, for people.
    """

    start: int
    stop: int
    prefix_ids: tuple[int, ...] = ()
    name: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Provenance:
    """What the tokens of a chunk had seen when their cells were computed.

    Attributes:
        how: ``"precompiled"`` (alone, or after ``prefix_ids`` only), ``"extracted"`` (cut out of a longer context),
            ``"merged"`` (chunks put side by side, see ``parts``) or ``"trained"`` (no forward of tokens made it).
        prefix_ids: every id that stood before the chunk, in order, -1 for a cell that no token made; empty when it was
            compiled alone. A chunk that saw something carries it with it: it is another chunk than the same ids
            compiled alone.
        note: what was done to its context before an extraction, or to its cells afterwards, for people.
        parts: of a merged chunk, ascending and without gaps; else empty.
    """

    how: str
    prefix_ids: tuple[int, ...] = ()
    note: str = ""
    parts: tuple[Part, ...] = ()

    def __str__(self) -> str:
        seen = f"behind {len(self.prefix_ids)} tokens" if self.prefix_ids else "alone"
        if self.parts:
            seen = f"of {len(self.parts)} chunks"
        return f"{self.how} {seen}" + (f" ({self.note})" if self.note else "")

    def noted(self, note: str) -> Provenance:
        """The same with one more note."""
        return replace(self, note="; ".join(filter(None, (self.note, note))))


@dataclass(frozen=True)
class ImageSpan:
    """Tokens ``[start, stop)`` of a chunk that stand for an image, whose content ``digest`` tells."""

    start: int
    stop: int
    digest: str
