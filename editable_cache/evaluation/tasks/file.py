"""Items on disk, so that one's own decisions can be judged like the built-in ones."""

from __future__ import annotations

import json
import string
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
            placeholder, with another one or a single brace, with a value that has no answer.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TaskError(f"Task file {path}: can't be read ({error.strerror}).") from error
    except ValueError as error:
        raise TaskError(f"Task file {path}: expected JSON, got something else ({error}).") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format", "no format") if isinstance(content, dict) else type(content).__name__
        raise TaskError(f"Task file {path}: expected format {FORMAT}, got {found}.")
    entries = content.get("items")
    if not isinstance(entries, list) or not entries:
        found = type(entries).__name__ if "items" in content and not isinstance(entries, list) else "none"
        raise TaskError(f"Task file {path}: expected at least one item in a list under 'items', got {found}.")
    items = tuple(_item(f"Task file {path}, item {number}", entry) for number, entry in enumerate(entries))
    keys = [item.key for item in items]
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise TaskError(f"Task file {path}: expected keys that differ, got {twice!r} twice.")
    erratum = content.get("erratum")
    if erratum is not None:
        _require_erratum(path, erratum)
    return ItemFile(items, erratum)


def _require_erratum(path: Path | str, erratum: Any) -> None:
    try:
        named = {piece[1:] for piece in string.Formatter().parse(erratum) if piece[1] is not None}
    except (TypeError, ValueError):
        named = set()
    if ("value", "", None) not in named or not named <= {("name", "", None), ("value", "", None)}:
        raise TaskError(
            f"Task file {path}: expected an erratum with {{value}}, and if it likes {{name}}, got {erratum!r}; write a "
            "literal brace twice."
        )
    plain = erratum.replace("{{", "{").replace("}}", "}")  # what an edit is given, which fills in names and no more
    if erratum.format(name="n", value="v") != plain.replace("{name}", "n").replace("{value}", "v"):
        raise TaskError(
            f"Task file {path}: expected an erratum without {{name}} or {{value}} as literal text, got {erratum!r}."
        )


def _item(where: str, entry: Any) -> Item:
    names = {field.name for field in fields(Item)}
    if not isinstance(entry, dict) or set(entry) != names:
        given = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        raise TaskError(f"{where}: expected the entries {sorted(names)}, got {given}.")
    for name in ("key", "task", "domain", "field", "old", "new", "question", "prefix"):
        if not isinstance(entry[name], str) or not entry[name]:
            raise TaskError(f"{where}: expected {name!r} as a text that is not empty, got {entry[name]!r}.")
    if not entry["field"].isidentifier():
        raise TaskError(
            f"{where}: expected 'field' as a name of letters, digits and underscores that begins with no digit, got "
            f"{entry['field']!r}."
        )
    if entry["mode"] not in get_args(Mode):
        raise TaskError(f"{where}: expected a mode among {list(get_args(Mode))}, got {entry['mode']!r}.")
    if entry["old"] == entry["new"]:
        raise TaskError(f"{where}: expected 'old' and 'new' to differ, got {entry['old']!r} twice.")
    values = {entry["old"], entry["new"]}
    for name, empty in (("answers", False), ("reasoning", True)):
        said = entry[name]
        if not isinstance(said, dict) or set(said) != values:
            raise TaskError(f"{where}: expected in {name!r} a text for each of {sorted(values)}, got {said}.")
        if not all(isinstance(text, str) and (empty or text.strip()) for text in said.values()):
            raise TaskError(
                f"{where}: expected {name!r} to be texts{'' if empty else ' that are not empty'}, got {said}."
            )
    if not isinstance(entry["sections"], list):
        raise TaskError(f"{where}: expected 'sections' as a list, got {type(entry['sections']).__name__}.")
    for number, section in enumerate(entry["sections"]):
        if not isinstance(section, dict) or {*section} != {"name", "text"} or not _are_texts(section.values()):
            raise TaskError(f"{where}: expected section {number} with 'name' and 'text' as texts, got {section!r}.")
    item = Item(**{**entry, "sections": tuple(Section(**section) for section in entry["sections"])})
    _require_placeholder(where, item)
    return item


def _require_placeholder(where: str, item: Item) -> None:
    template, holder = item.template(), f"{{{item.field}}}"
    try:
        found = [
            f"{{{name}{f'!{conversion}' if conversion else ''}{f':{form}' if form else ''}}}"
            for _, name, form, conversion in string.Formatter().parse(template)
            if name is not None
        ]
    except ValueError as error:
        found = [str(error)]
    if found != [holder] or holder not in template.replace("{{", ""):
        raise TaskError(
            f"{where}: expected the placeholder {holder} once in the sections, without a format, and no other, got "
            f"{', '.join(found) or 'none'}. In sections write a literal brace twice; question, prefix and answers are "
            "taken as they are."
        )


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)
