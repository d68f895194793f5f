"""How a study is shown: which rows make a table or a plot, and the published figures beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from editable_cache.evaluation.report import plot
from editable_cache.evaluation.report.blocks import Block, Figure, Table
from editable_cache.evaluation.report.measures import chosen, interval
from editable_cache.evaluation.report.plot import Point
from editable_cache.evaluation.results import Results, Row
from editable_cache.evaluation.statistics import Interval, share

MOST_GROUPS = 120
"""Lines of one table; more are cut, and the last line says so."""


@dataclass(frozen=True)
class TableView:
    """One line for each model and each combination of ``by``, one column for each of ``values``.

    Attributes:
        where: facts that rows must have, as ``measures.chosen`` takes them.
        by: entries; ``"key#3"`` is part 3 of the key from its end, which slashes divide.
        values: entries whose mean is shown, with their headings. Empty means every entry that is a number.
        published: the study's figure for a combination, by the words of ``by`` joined by a space.
    """

    title: str
    by: tuple[str, ...]
    values: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[str, str] = field(default_factory=dict)

    def blocks(self, results: Sequence[Results]) -> list[Block]:
        """The table; nothing without rows."""
        columns = dict(self.values) or {name: name for name in _numbers(results, self)}
        lines = []
        for found in results:
            for words, rows in _groups(found, self):
                cells = [_cell(interval(rows, name)) for name in columns]
                items = len({str(row.get("key")) for row in rows})
                given = [self.published.get(" ".join(words), "")] if self.published else []
                lines.append([found.model, *words, *cells, str(items), *given])
        if not lines:
            return []
        if len(lines) > MOST_GROUPS:
            rest = f"{len(lines) - MOST_GROUPS} lines more: see the results"
            lines = [*lines[:MOST_GROUPS], [rest, *[""] * (len(lines[0]) - 1)]]
        full = [number for number in range(len(lines[0])) if any(line[number] for line in lines)]
        published = ["published"] if self.published else []
        by = [self.heads.get(name, name) for name in self.by]
        head = ("model", *by, *columns.values(), "items", *published)
        return [Table([head[number] for number in full], [[line[number] for number in full] for line in lines])]


@dataclass(frozen=True)
class ShareView:
    """One line for each model and each combination of ``by``, one column for each of ``words`` of entry ``across``.

    A cell is the share of yes in ``value``, with the exact interval of its items: they are few, and of one domain.
    """

    title: str
    by: tuple[str, ...]
    across: str
    words: Sequence[str]
    value: str
    where: Mapping[str, Any] = field(default_factory=dict)

    def blocks(self, results: Sequence[Results]) -> list[Block]:
        """The table; nothing without rows."""
        lines = []
        for found in results:
            for words, rows in _groups(found, self):
                by_word = ([row for row in rows if row.get(self.across) == word] for word in self.words)
                answers = [[bool(row[self.value]) for row in some] for some in by_word]
                cells = [number(share(given)) if given else "" for given in answers]
                if any(cells):
                    lines.append([found.model, *words, *cells, str(max(map(len, answers)))])
        if not lines:
            return []
        return [Table(["model", *self.by, *self.words, "items"], lines)]


@dataclass(frozen=True)
class DotView:
    """For each combination of ``by`` a point with its interval for each model, beside the published figure."""

    name: str
    title: str
    by: tuple[str, ...]
    value: str
    label: str
    span: tuple[float, float] = (0.0, 1.0)
    where: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)

    def blocks(self, results: Sequence[Results]) -> list[Block]:
        """The plot; nothing without rows."""
        held = {found.model: {" ".join(words): rows for words, rows in _groups(found, self)} for found in results}
        points = {
            model: {words: made for words, rows in groups.items() if (made := _across(interval(rows, self.value)))}
            for model, groups in held.items()
        }
        lines = list(dict.fromkeys(words for groups in points.values() for words in groups))
        if not lines:
            return []
        series = [(model, [groups.get(line) for line in lines]) for model, groups in points.items() if groups]
        given = [self.published.get(line) for line in lines]
        svg = plot.dots(lines, series, label=self.label, span=self.span, published=given)
        return [Figure(self.name, self.title, svg)]


@dataclass(frozen=True)
class CurveView:
    """A curve over entry ``x`` for each model and each combination of ``by``.

    ``x`` may be the number behind ``@`` in the name of an arm: ``"arm@"``.
    """

    name: str
    title: str
    x: str
    value: str
    labels: tuple[str, str]
    by: tuple[str, ...] = ()
    span: tuple[float, float] = (0.0, 1.0)
    where: Mapping[str, Any] = field(default_factory=dict)
    logarithmic: bool = False

    def blocks(self, results: Sequence[Results]) -> list[Block]:
        """The plot; nothing without rows."""
        series = []
        for found in results:
            for words, rows in _groups(found, self):
                places: dict[float, list[Row]] = {}
                for row in rows:
                    at = _place(row, self.x)
                    if at is not None:
                        places.setdefault(at, []).append(row)
                points = [
                    Point(at, made.mean, made.low, made.high)
                    for at, some in sorted(places.items())
                    if (made := interval(some, self.value))
                ]
                if len(points) > 1:
                    series.append((" ".join((found.model, *words)), points))
        if not series:
            return []
        svg = plot.curves(series, labels=self.labels, span=self.span, logarithmic=self.logarithmic)
        return [Figure(self.name, self.title, svg)]


@dataclass(frozen=True)
class ScatterView:
    """A point for each model and each combination of ``by``: mean of ``y`` against mean of ``x``."""

    name: str
    title: str
    by: tuple[str, ...]
    x: str
    y: str
    labels: tuple[str, str]
    spans: tuple[tuple[float, float], tuple[float, float]] = ((0.0, 1.0), (0.0, 1.0))
    where: Mapping[str, Any] = field(default_factory=dict)
    diagonal: bool = False

    def blocks(self, results: Sequence[Results]) -> list[Block]:
        """The plot; nothing without rows."""
        series: dict[str, list[Point]] = {}
        for found in results:
            for words, rows in _groups(found, self):
                x, y = interval(rows, self.x), interval(rows, self.y)
                if x is not None and y is not None:
                    series.setdefault(" ".join(words), []).append(Point(x.mean, y.mean))
        if not series:
            return []
        svg = plot.scatter(list(series.items()), labels=self.labels, spans=self.spans, diagonal=self.diagonal)
        return [Figure(self.name, self.title, svg)]


View = TableView | ShareView | DotView | CurveView | ScatterView


@dataclass(frozen=True)
class Study:
    """How one study is shown.

    Attributes:
        name: as in its results.
        title: in words.
        text: what was measured and how to read it.
        views: tables and plots.
    """

    name: str
    title: str
    text: str
    views: tuple[View, ...] = ()


def everything(results: Sequence[Results]) -> TableView:
    """A table for a study that nobody described: by the entries that are words and few, all numbers."""
    values: dict[str, set[str]] = {}
    for found in results:
        for row in found.rows:
            for name, value in row.items():
                if isinstance(value, str):
                    values.setdefault(name, set()).add(value)
    by = tuple(name for name, words in values.items() if name not in ("key", "domain") and len(words) <= 30)
    return TableView("", by)


def _groups(found: Results, view: View) -> Iterable[tuple[tuple[str, ...], list[Row]]]:
    """Rows by the words of ``by``, in the order of their first appearance."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in chosen(found, dict(view.where)):
        if row.get("arm") == "gate" and "arm" not in view.where:
            continue
        groups.setdefault(tuple(_word(row, name) for name in view.by), []).append(row)
    return groups.items()


def _word(row: Row, name: str) -> str:
    if "#" in name:
        name, _, place = name.partition("#")
        return "/".join(str(row.get(name, "")).split("/")[-1 - int(place) :][:1])
    value = row.get(name)
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _numbers(results: Sequence[Results], view: View) -> list[str]:
    names = {
        name: None
        for found in results
        for row in found.rows
        for name, value in row.items()
        if isinstance(value, (int, float)) and name not in view.by
    }
    return list(names)


def _cell(found: Interval | None) -> str:
    return "" if found is None else number(found)


def number(found: Interval) -> str:
    """Mean and interval, with as many digits as their size needs."""
    digits = 3 if max(abs(found.mean), abs(found.low), abs(found.high)) < 100 else 0
    mean, low, high = (f"{round(bound, digits) + 0.0:.{digits}f}" for bound in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}]"


def _across(found: Interval | None) -> Point | None:
    return None if found is None else Point(found.mean, 0.0, found.low, found.high)


def _place(row: Row, x: str) -> float | None:
    if x.endswith("@"):
        count = str(row.get(x[:-1], "")).partition("@")[2]
        return float(count) if count.isdigit() else None
    value = row.get(x)
    return float(value) if isinstance(value, (int, float)) else None
