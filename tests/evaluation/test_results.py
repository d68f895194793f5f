"""Results: a stopped run loses nothing, and what does not belong together is not joined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import editable_cache
from editable_cache.errors import ResultsError
from editable_cache.evaluation.results import VERSIONS, Run, load

SETTINGS = {"items": ["a", "b"], "seed": 0}


def run_at(path: Path, **changes: Any) -> Run:
    return Run(path, **{"study": "frontier", "model": "m", "settings": SETTINGS, **changes})


def test_a_finished_run_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    run = run_at(path)
    run.add("a", [{"arm": "stale", "correct": False}, {"arm": "full", "correct": True}])
    assert not path.exists()
    run.finish()
    found = load(path)
    assert (found.study, found.model, dict(found.settings)) == ("frontier", "m", SETTINGS)
    assert found.rows == ({"key": "a", "arm": "stale", "correct": False}, {"key": "a", "arm": "full", "correct": True})
    assert found.where(arm="full") == [found.rows[1]]
    assert found.environment["editable_cache"] == editable_cache.__version__
    assert [entry.name for entry in tmp_path.iterdir()] == ["r.json"]
    assert run_at(path).has("a")  # measured already


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    run_at(path).add("a", [{"x": 1}])
    again = run_at(path)
    assert again.has("a")
    assert not again.has("b")
    again.add("b", [{"x": 2}])
    assert [row["x"] for row in again.finish().rows] == [1, 2]


def test_a_finished_run_that_is_extended_and_killed_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    first = run_at(path)
    first.add("a", [{"x": 1}])
    first.finish()
    run_at(path).add("b", [{"x": 2}])
    again = run_at(path)
    assert [row["x"] for row in again.results().rows] == [1, 2]
    again.add("c", [{"x": 3}])
    assert [row["x"] for row in again.finish().rows] == [1, 2, 3]
    assert [row["x"] for row in load(path).rows] == [1, 2, 3]


def test_half_a_line_of_a_killed_run_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    run = run_at(path)
    run.add("a", [{"x": 1}])
    run.add("b", [{"x": 2}])
    partial = tmp_path / "r.partial.jsonl"
    partial.write_bytes(partial.read_bytes()[:-9])
    again = run_at(path)
    assert again.has("a")
    assert not again.has("b")
    again.add("b", [{"x": 3}])
    assert [row["x"] for row in run_at(path).results().rows] == [1, 3]


@pytest.mark.parametrize(
    "lines",
    [b"5", b"{}", b"[]", b'{"settings": {}}\n5', b'{"settings": {}}\n{"key": "a", "rows": 5}', b"\xff\xfe"],
)
def test_a_damaged_partial_file_is_named(tmp_path: Path, lines: bytes) -> None:
    (tmp_path / "r.partial.jsonl").write_bytes(lines + b"\n")
    with pytest.raises(ResultsError, match=r"r\.partial\.jsonl: a line is damaged .* delete the file"):
        run_at(tmp_path / "r.json")
    assert (tmp_path / "r.partial.jsonl").read_bytes() == lines + b"\n"


def test_a_killed_first_line_is_as_if_nothing_was_there(tmp_path: Path) -> None:
    (tmp_path / "r.partial.jsonl").write_text('{"format": 1, "stu', "utf-8")
    run = run_at(tmp_path / "r.json")
    run.add("a", [{"x": 1}])
    assert run_at(tmp_path / "r.json").has("a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {**SETTINGS, "seed": 1}}, "seed = 1, got 0"),
        ({"model": "other"}, "expected model 'other'"),
        ({"study": "probes"}, "expected study"),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_are_not_joined(tmp_path: Path, changes: dict[str, Any], message: str, finished: bool) -> None:
    path = tmp_path / "r.json"
    run = run_at(path)
    run.add("a", [{"x": 1}])
    if finished:
        run.finish()
    with pytest.raises(ResultsError, match=message):
        run_at(path, **changes)


@pytest.mark.parametrize("package", VERSIONS)
def test_another_version_is_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    path = tmp_path / "r.json"
    run_at(path).add("a", [{"x": 1}])
    monkeypatch.setattr(f"editable_cache.evaluation.results.{package}.__version__", "9.9")
    with pytest.raises(ResultsError, match=rf"environment {package} = '9\.9', got"):
        run_at(path)


def test_numbers_must_be_finite(tmp_path: Path) -> None:
    run = run_at(tmp_path / "r.json")
    with pytest.raises(ValueError, match="not JSON compliant"):
        run.add("a", [{"x": float("nan")}])
    assert not run.has("a")
    assert not (tmp_path / "r.partial.jsonl").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected JSON"),
        ("[]", "expected format 1, got list"),
        ('{"format": 0}', "measure again"),
        ('{"format": 1}', "expected 'study'"),
    ],
)
def test_damaged_results_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(content, "utf-8")
    with pytest.raises(ResultsError, match=message):
        load(path)


def test_missing_and_strange_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="can't be read"):
        load(tmp_path / "none.json")
    path = tmp_path / "r.json"
    run = run_at(path)
    run.add("a", [{"x": 1}])
    run.finish()
    content = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**content, "rows": [1]}), "utf-8")
    with pytest.raises(ResultsError, match="row 0: expected an object"):
        load(path)


def test_a_trial_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run(None, study="s", model="m", settings={})
    run.add("a", [{"x": 1}])
    assert run.finish().rows == ({"key": "a", "x": 1},)
    assert list(tmp_path.iterdir()) == []
