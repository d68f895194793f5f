"""Results so far, one JSON line per finished item: a stopped run goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PARTIAL = Path(__file__).parents[1] / "results" / "partial"


class Kept:
    """Finished items of one run, by key.

    Args:
        name: of the file in ``results/partial``; None keeps nothing.
    """

    def __init__(self, name: str | None) -> None:
        self._path = None if name is None else PARTIAL / f"{name}.jsonl"
        self._items: dict[tuple[Any, ...], dict[str, Any]] = {}
        if self._path is not None and self._path.is_file():
            text = self._path.read_text("utf-8")
            whole = text[: text.rfind("\n") + 1]
            if whole != text:  # a killed run left half a line
                self._path.write_text(whole, encoding="utf-8")
            for line in whole.splitlines():
                item = _parsed(line)
                if item is not None:
                    self._items[tuple(item["key"])] = item["value"]

    def has(self, *key: Any) -> bool:
        """Whether the item is finished."""
        return key in self._items

    def items(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        """All finished items."""
        return dict(self._items)

    def add(self, key: tuple[Any, ...], value: dict[str, Any]) -> None:
        """Keep one more, at once."""
        self._items[key] = value
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "value": value}) + "\n")


def _parsed(line: str) -> dict[str, Any] | None:
    """An item; None for the half of a line that a killed run left."""
    try:
        return dict(json.loads(line))
    except ValueError:
        return None
