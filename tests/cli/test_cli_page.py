"""docs/cli.md says what the program does: its commands and options exist, and its lists of JSON keys are whole."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_support import PAGE, TEXT, answer, json_keys

from editable_cache.cli.main import app

LINES = [line for line in PAGE.splitlines() if line.startswith(("editable-cache ", "cat policy.txt | editable-cache "))]
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def wrong_options(line: str) -> list[str]:
    """Options of a command line that the program does not have."""
    name, *rest = shlex.split(line.split("editable-cache ", 1)[1])
    known = {option for each in COMMANDS[name].params for option in (*each.opts, *each.secondary_opts)}
    return [word for word in rest if re.match("--?[a-z]", word) and word not in known]


@pytest.mark.parametrize("line", LINES)
def test_examples_have_options_that_exist(line: str) -> None:
    assert wrong_options(line) == []


def test_every_command_has_its_section_and_a_wrong_option_is_seen() -> None:
    assert {line.split("editable-cache ")[1].split()[0] for line in LINES} == set(COMMANDS)
    assert wrong_options("editable-cache push a b --licence mit") == ["--licence"]


def test_lists_of_keys_are_whole(models: Callable[[str], str], skill: str, tmp_path: Path) -> None:
    model = models("llama")
    (tmp_path / "text").write_text(TEXT)
    assert set(answer("check", model)) == json_keys("check")
    made = answer("precompile", model, str(tmp_path / "text"), "-o", str(tmp_path / "out"))
    assert set(made) == json_keys("precompile")
    assert set(answer("diff", skill, skill)) == json_keys("diff")
    assert set(answer("verify", skill, "--model", model)) == json_keys("verify")
    inspected = answer("inspect", skill)
    assert set(inspected) == json_keys("inspect")
    section = PAGE.split("Each of `builds` has ")[1].split("\n\n")[0]
    section = re.sub(r"\([^)]*\)", "", section)  # keys of an inner object
    assert set(inspected["builds"][0]) == set(re.findall(r"`(\w+)`", section))
