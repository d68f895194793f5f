"""Results on disk: rows of measurements with the settings, versions and machine that they come from.

A run keeps every finished item at once, in ``NAME.partial.jsonl`` beside the file that it will write, and goes on from
there after it was stopped. The final file is one JSON object.
"""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import editable_cache
from editable_cache.errors import ResultsError

FORMAT = 1

VERSIONS = ("editable_cache", "transformers", "torch")
"""Of the environment, what rows of one run must have in common."""

Row = dict[str, Any]
"""One measurement: what was asked (``key``, ``domain``, ``arm`` ...) and what came out."""


@dataclass(frozen=True)
class Results:
    """What one study measured on one model.

    Attributes:
        study: its name, for example ``"frontier"``.
        model: the model's name.
        settings: everything that was chosen, seeds included.
        environment: versions and machine.
        rows: all measurements.
    """

    study: str
    model: str
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        """The model's name without the folders or the organization before it."""
        return self.model.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1]

    def where(self, **facts: Any) -> list[Row]:
        """The rows that have all these entries."""
        return [row for row in self.rows if all(row.get(name) == value for name, value in facts.items())]


def environment() -> dict[str, Any]:
    """Versions and machine that results depend on."""
    return {
        "editable_cache": editable_cache.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
    }


def load(path: Path | str) -> Results:
    """Read a finished results file.

    Raises:
        ResultsError: if it is missing, damaged, or of another format.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultsError(f"Results {path}: can't be read ({error.strerror}).") from error
    except ValueError as error:
        raise ResultsError(f"Results {path}: expected JSON, got something else ({error}).") from error
    given = content.get("format") if isinstance(content, dict) else type(content).__name__
    if given != FORMAT:
        raise ResultsError(f"Results {path}: expected format {FORMAT}, got {given}; measure again with this version.")
    wanted = {"study": str, "model": str, "settings": dict, "environment": dict, "rows": list}
    for name, kind in wanted.items():
        if not isinstance(content.get(name), kind):
            raise ResultsError(
                f"Results {path}: expected {name!r} as a {kind.__name__}, got {content.get(name)!r:.60}."
            )
    rows = content["rows"]
    _require_rows(path, content["study"], rows)
    return Results(content["study"], content["model"], content["settings"], content["environment"], tuple(rows))


def _require_rows(path: Path | str, study: str, rows: Sequence[Any]) -> None:
    """An entry is of one kind in all rows, or null; every arm has its decision."""
    kinds: dict[str, str] = {}
    for number, row in enumerate(rows):
        where = f"Results {path}, row {number}"
        if not isinstance(row, dict):
            raise ResultsError(f"{where}: expected an object, got {row!r:.60}.")
        if not isinstance(row.get("key"), str):
            raise ResultsError(f"{where}: expected a key as a text, got {row.get('key')!r:.60}.")
        if study == "frontier" and row.get("arm", "gate") != "gate" and "correct" not in row:
            raise ResultsError(f"{where}: expected 'correct', got {', '.join(row)}.")
        for name, value in row.items():
            kind = _kind(value)
            if kind == "no finite number":
                raise ResultsError(f"{where}: expected finite numbers, got {name} = {value!r:.60}.")
            if value is not None and kinds.setdefault(name, kind) != kind:
                raise ResultsError(f"{where}: expected {name!r} as in other rows, {kinds[name]}, got {value!r:.60}.")


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "yes or no"
    if isinstance(value, (int, float)):
        try:
            return "a number" if math.isfinite(value) else "no finite number"
        except OverflowError:  # an integer beyond every float
            return "no finite number"
    return "a text" if isinstance(value, str) else "a list or an object"


class Run:
    """A study under way: finished items are kept and not measured again.

    Args:
        path: of the final file; None keeps nothing (a trial).
        study, model, settings: as in ``Results``. A run that goes on must have the same, and the same versions.

    Raises:
        ResultsError: if nothing can be written there, or if what lies there is damaged or comes from another study,
            model, setting or version.
    """

    def __init__(self, path: Path | str | None, *, study: str, model: str, settings: Mapping[str, Any]) -> None:
        self._path = None if path is None else Path(path)
        self._head = {
            "format": FORMAT,
            "study": study,
            "model": model,
            "settings": json.loads(json.dumps(dict(settings))),
            "environment": environment(),
        }
        self._rows: dict[str, list[Row]] = {}
        self._partial_is_whole = False
        if self._path is not None:
            require_writable(self._path)
            self._take_up(self._path)

    def has(self, key: str) -> bool:
        """Whether the item is finished."""
        return key in self._rows

    def rows_of(self, key: str) -> list[Row]:
        """What was measured on an item; empty if it is not finished."""
        return self._rows.get(key, [])

    def add(self, key: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep what was measured on one more item, on disk at once; each row gets the key. Numbers must be finite."""
        clean = [{"key": key, **row} for row in rows]
        entry = {"key": key, "rows": clean}
        text = json.dumps(entry, allow_nan=False)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lines = [text]
            if not self._partial_is_whole:
                before = (json.dumps({"key": name, "rows": found}) for name, found in self._rows.items())
                lines = [json.dumps(self._head), *before, text]
            with _partial(self._path).open("a" if self._partial_is_whole else "w", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
            self._partial_is_whole = True
        self._rows[key] = clean

    def results(self) -> Results:
        """What is finished so far."""
        rows = tuple(row for rows in self._rows.values() for row in rows)
        head = self._head
        return Results(head["study"], head["model"], head["settings"], head["environment"], rows)

    def finish(self) -> Results:
        """Write the final file, and forget the partial one."""
        found = self.results()
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            content = {"format": FORMAT, **asdict(found)}
            lines = ",\n".join(json.dumps(row, allow_nan=False) for row in found.rows)
            head = json.dumps({**content, "rows": []}, indent=1, ensure_ascii=False)
            whole = head.replace('"rows": []', f'"rows": [\n{lines}\n ]') + "\n"
            fresh = self._path.with_name(f"{self._path.name}.new")
            fresh.write_text(whole, encoding="utf-8")
            os.replace(fresh, self._path)
            _partial(self._path).unlink(missing_ok=True)
            self._partial_is_whole = False
        return found

    def _take_up(self, path: Path) -> None:
        partial = _partial(path)
        if partial.is_file():
            *lines, rest = partial.read_bytes().split(b"\n")
            entries = _parsed(partial, lines)
            if rest:  # a killed run left half a line
                partial.write_bytes(b"".join(line + b"\n" for line in lines))
            if entries:
                self._require_same(partial, entries[0])
                self._rows = {entry["key"]: entry["rows"] for entry in entries[1:]}
                self._partial_is_whole = True
        elif path.is_file():
            found = load(path)
            self._require_same(path, {"format": FORMAT, **asdict(found)})
            for row in found.rows:
                self._rows.setdefault(str(row.get("key")), []).append(row)

    def _require_same(self, path: Path, head: Mapping[str, Any]) -> None:
        mine, other = ({**each, "environment": _versions(each)} for each in (self._head, head))
        for name, value in mine.items():
            if other.get(name) != value:
                raise ResultsError(
                    f"Results {path}: expected {name} {_differing(value, other.get(name))}; they can't be joined. "
                    "Delete that file, or write to another."
                )


def _versions(head: Mapping[str, Any]) -> dict[str, Any]:
    return {name: head.get("environment", {}).get(name) for name in VERSIONS}


def _differing(expected: Any, got: Any) -> str:
    if isinstance(expected, dict) and isinstance(got, dict):
        names = [name for name in {**expected, **got} if expected.get(name) != got.get(name)]
        return "; ".join(f"{name} = {expected.get(name)!r}, got {got.get(name)!r}" for name in names)
    return f"{expected!r}, got {got!r}"


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.stem}.partial.jsonl")


def _parsed(path: Path, lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """The head of a partial file and its entries, each with ``key`` and ``rows``."""
    try:
        entries = [json.loads(line) for line in lines]
        for entry in entries[1:]:
            if not isinstance(entry["key"], str) or not all(isinstance(row, dict) for row in entry["rows"]):
                raise TypeError(f"key {entry['key']!r}")
        if entries and not isinstance(entries[0]["settings"], dict):
            raise TypeError("settings")
    except (ValueError, TypeError, LookupError) as error:
        raise ResultsError(f"Results {path}: a line is damaged ({error}); delete the file to begin anew.") from error
    return entries


def require_writable(path: Path) -> None:
    """Refuse a place where nothing can be written, before anything is measured; its folder is made.

    Raises:
        ResultsError: with the reason.
    """
    if path.is_dir():
        raise ResultsError(f"Output {path}: expected a file to write, got a folder; name a file in it.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ResultsError(f"Output {path}: can't be written ({error.strerror}); name another file.") from error


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
