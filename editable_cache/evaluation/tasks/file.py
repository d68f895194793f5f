"""Items on disk, so that one's own decisions can be judged like the built-in ones."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

from editable_cache.errors import TaskError
from editable_cache.evaluation.tasks.item import Item, Mode, Section

FORMAT = 1


@dataclass(frozen=True)
class ItemFile:
    """What a task file holds.

    Attributes:
        items: at least one.
        erratum: template of the correcting line with ``{name}`` and ``{value}``, or None for the usual one.
    """

    items: tuple[Item, ...]
    erratum: str | None = None


def write_items(path: Path | str, items: Iterable[Item], *, erratum: str | None = None) -> None:
    """Write items as one JSON file."""
    content = {"format": FORMAT, "erratum": erratum, "items": [asdict(item) for item in items]}
    Path(path).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_items(path: Path | str) -> ItemFile:
    """Read a task file.

    Raises:
        TaskError: if it is missing, empty, not of this format, or an item is not whole: without exactly one
            placeholder, with a value that has no answer, or with answers that begin alike.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TaskError(f"Task file {path}: can't be read ({error.strerror}).") from error
    except ValueError as error:
        raise TaskError(f"Task file {path}: expected JSON, got something else ({error}).") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise TaskError(f"Task file {path}: expected format {FORMAT}, got {found}.")
    entries = content.get("items")
    if not isinstance(entries, list) or not entries:
        raise TaskError(f"Task file {path}: expected at least one item under 'items', got none.")
    items = tuple(_item(path, number, entry) for number, entry in enumerate(entries))
    keys = [item.key for item in items]
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise TaskError(f"Task file {path}: expected keys that differ, got {twice!r} twice.")
    erratum = content.get("erratum")
    if erratum is not None and (not isinstance(erratum, str) or "{value}" not in erratum):
        raise TaskError(f"Task file {path}: expected an erratum with {{value}}, got {erratum!r}.")
    return ItemFile(items, erratum)


def _item(path: Path | str, number: int, entry: Any) -> Item:
    where = f"Task file {path}, item {number}"
    names = {field.name for field in fields(Item)}
    if not isinstance(entry, dict) or set(entry) != names:
        given = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        raise TaskError(f"{where}: expected the entries {sorted(names)}, got {given}.")
    try:
        item = Item(**{**entry, "sections": tuple(Section(**section) for section in entry["sections"])})
    except TypeError as error:
        raise TaskError(f"{where}: expected sections of name and text ({error}).") from error
    texts = (item.key, item.task, item.domain, item.field, item.old, item.new, item.question, item.prefix)
    if not all(isinstance(text, str) and text for text in texts):
        raise TaskError(f"{where}: expected texts that are not empty, got {[*texts]}.")
    if item.mode not in get_args(Mode):
        raise TaskError(f"{where}: expected a mode among {list(get_args(Mode))}, got {item.mode!r}.")
    if item.template().count("{" + item.field + "}") != 1:
        raise TaskError(f"{where}: expected the placeholder {{{item.field}}} once in the sections.")
    if set(item.answers) != {item.old, item.new} or item.old == item.new:
        raise TaskError(f"{where}: expected an answer for each of two values, got {item.answers}.")
    return item
