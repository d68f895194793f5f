"""What a cache holds, as a table for people."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from editable_cache.cache import LedgeredCache
from editable_cache.cache.isolated import trained

RECENT = 8


@dataclass(frozen=True)
class CacheReport:
    """A printable picture of a cache at one moment.

    Prints as text (``print(report)``), as a rich table (``rich.print(report)``) and as HTML in a notebook.

    Attributes:
        title: one line about the whole cache.
        segments: rows of name, slots, positions, origin, freshness.
        fields: rows of name, text value, current value, errata.
        operations: the last operations with their cost.
    """

    title: str
    segments: tuple[tuple[str, ...], ...]
    fields: tuple[tuple[str, ...], ...]
    operations: tuple[str, ...]

    @classmethod
    def of(cls, cache: LedgeredCache) -> CacheReport:
        """The picture of ``cache`` now."""
        ledger = cache.ledger
        held = sum(t.nbytes for layer in cache.editable_layers for t in layer.view().values())
        stores = [layer.state().store for layer in cache.editable_layers]
        shared = any(store is not None and store.shared for store in stores)
        owner = type(cache.model).__name__ if cache.model is not None else "no model"
        dtype = str(cache.dtype or "empty").removeprefix("torch.")
        size = f"{held / 2**20:.1f} MiB{' (shared)' if shared else ''}"
        waiting = f" + {cache.unfed.shape[1]} not fed yet" if cache.unfed is not None else ""
        title = f"{len(ledger)} tokens{waiting} x {ledger.batch} rows, {size}, {dtype}, {owner}"
        segments = []
        for segment in ledger.segments:
            positions = ledger.positions[0, segment.start : segment.stop]
            isolated = int((ledger.groups[0, segment.start : segment.stop] != 0).sum())
            freshness = [f"isolated: {isolated} of {len(segment)} never saw what precedes them"] if isolated else []
            lost = int(trained(ledger)[0, segment.start : segment.stop].sum())
            freshness += [f"trained: no token made {lost} of {len(segment)}"] if lost else []
            freshness += [f"stale: {cause}" for cause in ledger.causes(*segment.span)]
            segments.append(
                (
                    segment.name,
                    f"{segment.start}-{segment.stop - 1}",
                    f"{int(positions.min())}-{int(positions.max())}",
                    segment.origin,
                    "; ".join(freshness) or "fresh",
                )
            )
        fields = tuple((f.name, f.value, f.current, str(len(f.errata))) for f in ledger.fields)
        return cls(title, tuple(segments), fields, tuple(map(str, cache.history[-RECENT:])))

    def __rich__(self) -> Any:
        parts: list[Any] = [_table(self.title, ("segment", "slots", "positions", "origin", "freshness"), self.segments)]
        if self.fields:
            parts.append(_table("fields", ("field", "text says", "current", "errata"), self.fields))
        parts += [Text(f"  {line}") for line in self.operations]
        return Group(*parts)

    def __str__(self) -> str:
        console = Console(width=120, color_system=None, record=True, file=io.StringIO())
        console.print(self)
        return console.export_text().rstrip()

    def _repr_html_(self) -> str:
        console = Console(width=120, record=True, file=io.StringIO())
        console.print(self)
        return console.export_html(inline_styles=True, code_format="<pre style='font-family:monospace'>{code}</pre>")


def _table(title: str, columns: tuple[str, ...], rows: tuple[tuple[str, ...], ...]) -> Table:
    table = Table(title=Text(title), title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
