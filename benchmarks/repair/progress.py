"""Results so far, one JSON line per finished item: a stopped run goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PARTIAL = Path(__file__).parents[1] / "results" / "partial"

Items = dict[tuple[Any, ...], Any]


class Kept:
    """Finished items of one run, by key.

    Args:
        name: of the file in ``results/partial``; None keeps nothing.
    """

    def __init__(self, name: str | None) -> None:
        self._path = None if name is None else PARTIAL / f"{name}.jsonl"
        self._items: Items = {}
        if self._path is not None and self._path.is_file():
            text = self._path.read_text("utf-8")
            if not text.endswith("\n"):  # a killed run left half a line
                self._path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
            self._items = finished(self._path)

    def has(self, *key: Any) -> bool:
        """Whether the item is finished."""
        return key in self._items

    def items(self) -> Items:
        """All finished items."""
        return dict(self._items)

    def add(self, key: tuple[Any, ...], value: Any) -> None:
        """Keep one more, at once, in place of one of the same key."""
        self._items[key] = value
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "value": value}) + "\n")


def finished(path: Path) -> Items:
    """Items by key, the last of each; none if there is no file. Half a line, of a killed run, is as if not there."""
    found: Items = {}
    for line in path.read_text("utf-8").splitlines() if path.is_file() else []:
        try:
            item = json.loads(line)
        except ValueError:
            continue
        found[tuple(item["key"])] = item["value"]
    return found
