"""What a report consists of, before it is HTML or Markdown."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    """A title; level 1 is the report's."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """Plain text."""

    text: str


@dataclass(frozen=True)
class Table:
    """Cells of plain text, in which a line break is one.

    Attributes:
        status: the column whose cells are statuses, if there is one.
        wide: columns that hold sentences.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    status: int | None = None
    wide: Sequence[int] = ()


@dataclass(frozen=True)
class Figure:
    """A plot.

    Attributes:
        name: unique in its report; names the file where plots are files.
        title: what it shows.
        svg: from ``plot``.
    """

    name: str
    title: str
    svg: str


Block = Heading | Paragraph | Table | Figure


def harmless(raw: str) -> str:
    """On one line, and without characters that steer a terminal or the direction of writing."""
    flat = " ".join(raw.split())
    return "".join(char if not unicodedata.category(char).startswith("C") else REPLACED for char in flat)


REPLACED = "\N{REPLACEMENT CHARACTER}"
