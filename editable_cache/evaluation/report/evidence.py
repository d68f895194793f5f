"""Results of several studies and models, read together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from editable_cache.errors import ResultsError
from editable_cache.evaluation.results import VERSIONS, Results, Row, load

TIMES = ("seconds", "cpu_seconds", "reading")
PLACES = ("x", "seam", "rotated", "chunks", "turn")
"""Numbers in a row that say what was measured."""

VARIANTS = ("dtype", "adapter", "revision")
"""Settings that make another model of the same name."""


@dataclass(frozen=True)
class Evidence:
    """All results of a report, by study and model.

    Attributes:
        results: in order of study and model. Two of one study and model differ in their settings.
    """

    results: tuple[Results, ...]

    def of(self, study: str) -> list[Results]:
        """The results of one study, one for each model: rows measured with several settings are joined.

        A row that two of them have but for its times counts once.
        """
        by_model: dict[str, list[Results]] = {}
        for found in self.results:
            if found.study == study:
                by_model.setdefault(found.model, []).append(found)
        return [_joined(some) for some in by_model.values()]

    @property
    def studies(self) -> list[str]:
        """Names of all studies."""
        return list(dict.fromkeys(found.study for found in self.results))

    @property
    def models(self) -> list[str]:
        """Names of all models."""
        return list(dict.fromkeys(found.model for found in self.results))


def gather(paths: Sequence[Path | str]) -> Evidence:
    """Read results files, and every ``*.json`` of folders.

    Raises:
        ResultsError: if there is nothing, if one can't be read, or if two say different things about the same.
    """
    files = list(dict.fromkeys(file for path in paths for file in _files(Path(path))))
    if not files:
        raise ResultsError(f"Report: expected results (*.json), got none in {', '.join(map(str, paths)) or 'nothing'}.")
    held: dict[tuple[str, str], list[tuple[Path, Results]]] = {}
    for file in files:
        found = load(file)
        if not found.rows:
            raise ResultsError(f"Results {file}: expected at least one row, got none; measure again.")
        others = held.setdefault((found.study, found.model), [])
        twin = next((path for path, other in others if other.settings == found.settings), None)
        if twin is not None:
            raise ResultsError(
                f"Results {file}: {found.study} on {found.model} with the same settings is in {twin} already; "
                "expected each once. Leave one out."
            )
        others.append((file, found))
    ordered = (found for key in sorted(held) for found in _told_apart(held[key]))
    return Evidence(tuple(ordered))


def _told_apart(held: Sequence[tuple[Path, Results]]) -> list[Results]:
    """Results of one study and model: where adapter or number type differ they are of different models.

    Raises:
        ResultsError: if they are of different versions of a library.
    """
    for package in VERSIONS:
        versions = {found.environment.get(package): path for path, found in held}
        if len(versions) > 1:
            raise ResultsError(
                f"Results {', '.join(map(str, versions.values()))}: expected one version of {package}, got "
                f"{', '.join(map(str, versions))}; leave one out, or measure again."
            )
    names = [name for name in VARIANTS if len({str(found.settings.get(name)) for _, found in held}) > 1]
    if not names:
        _require_agreement(held)
        return [found for _, found in held]
    return [
        replace(found, model=f"{found.model} ({', '.join(str(found.settings.get(name)) for name in names)})")
        for _, found in held
    ]


def _joined(results: Sequence[Results]) -> Results:
    if len(results) == 1:
        return results[0]
    rows = {_measured(row): row for found in results for row in found.rows}
    return replace(results[0], rows=tuple(rows.values()))


def _measured(row: Row) -> str:
    """A row but for its times."""
    return json.dumps({name: value for name, value in row.items() if name not in TIMES}, sort_keys=True)


def _asked(row: Row) -> str:
    """What was measured: the words of a row, and the numbers that are no outcome."""
    asked = {name: value for name, value in row.items() if isinstance(value, str) or name in PLACES}
    return json.dumps(asked, sort_keys=True)


def _require_agreement(held: Sequence[tuple[Path, Results]]) -> None:
    """Two files may say the same about the same, and each what the other does not say."""
    said: dict[str, tuple[Path, list[str]]] = {}
    for path, found in held:
        mine: dict[str, list[str]] = {}
        for row in found.rows:
            mine.setdefault(_asked(row), []).append(_measured(row))
        for asked, outcomes in mine.items():
            other, before = said.setdefault(asked, (path, sorted(outcomes)))
            if before != sorted(outcomes):
                raise ResultsError(
                    f"Results {other}, {path}: expected the same of what both measured, got other numbers for "
                    f"{asked:.200}; leave one out."
                )


def _files(path: Path) -> Iterable[Path]:
    if path.is_dir():
        return sorted(path.glob("*.json"))
    if not path.is_file():
        raise ResultsError(f"Results {path}: expected a file or a folder, found nothing there.")
    return [path]
