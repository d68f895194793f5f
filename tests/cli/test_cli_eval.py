"""``editable-cache eval``: an answer, or a message that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_support import answer, json_keys, run

from editable_cache.evaluation.results import load
from editable_cache.evaluation.tasks import build, read_items, write_items

Models = Callable[[str], str]


@pytest.fixture
def items(tmp_path: Path) -> str:
    """A task file of two items whose answers the tiny tokenizer tells apart by their first token."""
    path = tmp_path / "items.json"
    found = build("gated", per_domain=1, neutral=0)[:2]
    write_items(path, [replace(item, answers={item.old: " refund", item.new: " escalate"}) for item in found])
    return str(path)


def evaluated(models: Models, items: str, *more: str, code: int = 0) -> dict[str, Any]:
    return answer("eval", models("llama"), "--tasks", items, "--arms", "stale,suffix", *more, code=code)


def test_arms_are_measured_and_kept(models: Models, items: str, tmp_path: Path) -> None:
    out = tmp_path / "edits.json"
    found = evaluated(models, items, "--any-model", "-o", str(out))
    assert set(found) == json_keys("eval")
    assert [row["arm"] for row in found["arms"]] == ["stale", "suffix"]
    assert found["gate"]["items"] == 2
    rows = load(out).rows
    assert len([row for row in rows if row["arm"] == "suffix"]) == 2
    assert all(row["cosine"] > 0.99999 for row in rows if row["arm"] == "suffix")
    assert evaluated(models, items, "--any-model", "-o", str(out))["arms"] == found["arms"]  # nothing measured again
    shown = run("eval", models("llama"), "--tasks", items, "--arms", "stale,suffix", "--any-model", "-o", str(out))
    assert "suffix" in shown.stdout
    assert "full prefills decide right" in shown.stdout


def test_a_model_below_the_gate_is_refused(models: Models, items: str) -> None:
    found = evaluated(models, items, code=2)
    assert "at least 0.8" in found["error"]
    assert "--any-model" in found["error"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--arms", "stale,magic"), "Unknown arm 'magic'"),
        (("--arms", " , "), "expected at least one arm"),
        (("--task", "poetry"), "expected a task among"),
        (("--mode", "poem"), "expected direct or cot"),
        (("--mode", "cot", "--arms", "stale,selective@2"), "expected items in direct mode"),
        (("--items", "0"), "at least one item"),
        (("--tasks", "no-such-file.json"), "can't be read"),
    ],
)
def test_bad_requests_are_told_before_a_model_is_loaded(options: tuple[str, ...], message: str) -> None:
    found = answer("eval", "no-such-model-anywhere", *options, code=2)
    assert message in found["error"]


def test_options_of_built_in_items_are_not_ignored(models: Models, items: str) -> None:
    for options in (("--task", "lookup"), ("--items", "1"), ("--neutral", "0"), ("--far",), ("--seed", "1")):
        found = answer("eval", "no-such-model-anywhere", "--tasks", items, *options, code=2)
        assert f"{options[0]}: these choose built-in items" in found["error"]
    found = answer("eval", "no-such-model-anywhere", "--tasks", items, "--mode", "cot", code=2)
    assert "items.json: expected an item in the mode cot" in found["error"]


@pytest.mark.parametrize(("out", "message"), [(".", "got a folder"), ("text/edits.json", "can't be written")])
def test_an_output_that_can_not_be_written_is_told_first(items: str, tmp_path: Path, out: str, message: str) -> None:
    (tmp_path / "text").write_text("a file")
    found = answer("eval", "no-such-model-anywhere", "--tasks", items, "-o", str(tmp_path / out), code=2)
    assert message in found["error"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["items.json", "text"]


def test_a_task_file_that_was_changed_is_not_joined(models: Models, items: str, tmp_path: Path) -> None:
    out = str(tmp_path / "edits.json")
    evaluated(models, items, "--any-model", "-o", out)
    given = read_items(items)
    write_items(items, given.items, erratum="Now {value}.\n")
    assert "digest" in evaluated(models, items, "--any-model", "-o", out, code=2)["error"]
    write_items(items, [replace(item, question=f"{item.question} ") for item in given.items])
    assert "digest" in evaluated(models, items, "--any-model", "-o", out, code=2)["error"]
    write_items(items, given.items)
    evaluated(models, items, "--any-model", "-o", out)


def test_a_file_of_both_modes_is_asked_in_one_or_with_arms_that_both_have(models: Models, tmp_path: Path) -> None:
    path = str(tmp_path / "both.json")
    found = [build("gated", per_domain=1, neutral=0, mode=mode)[0] for mode in ("direct", "cot")]
    write_items(path, [replace(item, answers={item.old: " refund", item.new: " escalate"}) for item in found])
    asked = ("eval", models("llama"), "--tasks", path, "--any-model")
    assert "leave out these arms" in answer(*asked, "--arms", "stale,selective@2", code=2)["error"]
    shown = answer(*asked, "--arms", "stale,selective@2", "--mode", "direct")
    assert [(row["arm"], row["n"]) for row in shown["arms"]] == [("stale", 1), ("selective@2", 1)]
    arms = {row["arm"]: row["n"] for row in answer(*asked)["arms"]}
    assert arms["hoist"] == 2
    assert not any(name.startswith("selective") for name in arms)


def test_results_of_other_settings_are_not_joined(models: Models, items: str, tmp_path: Path) -> None:
    out = str(tmp_path / "edits.json")
    evaluated(models, items, "--any-model", "-o", out)
    found = answer("eval", models("llama"), "--tasks", items, "--arms", "full", "--any-model", "-o", out, code=2)
    assert "can't be joined" in found["error"]
    assert "arms = ['full']" in found["error"]
