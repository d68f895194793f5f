"""The installed program: it starts fast, and every command runs from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_support import PROGRAM, TEXT, program, run

import editable_cache

ROOT = Path(__file__).parents[2]
COMMANDS = ("check", "precompile", "inspect", "diff", "push", "pull", "verify")
HEAVY = {"torch", "transformers", "huggingface_hub", "safetensors", "peft", "numpy"}


def test_help_and_version_load_nothing_heavy() -> None:
    code = (
        "import sys, json\n"
        "from typer.testing import CliRunner\n"
        "from editable_cache.cli.main import app\n"
        "for arguments in (['--help'], ['verify', '--help'], ['--version'], ['push']):\n"
        "    CliRunner().invoke(app, arguments)\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert {"typer", "rich", "editable_cache"} <= loaded
    assert not loaded & HEAVY


def test_the_program_says_what_it_can() -> None:
    shown = program("--help")
    assert shown.returncode == 0
    assert all(f" {name} " in shown.stdout for name in COMMANDS)
    assert program("--version").stdout == f"editable-cache {editable_cache.__version__}\n"
    assert program().returncode == program("nonsense").returncode == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command(name: str) -> None:
    shown = run(name, "--help").stdout
    assert f"editable-cache {name} " in " ".join(shown.split())  # an example
    assert "Exit code 0" in " ".join(shown.split())
    assert "--json" in shown


def test_precompile_inspect_verify_and_diff_as_a_script(models: Callable[[str], str], tmp_path: Path) -> None:
    """examples/publish.sh: it stops at the first command that fails."""
    (tmp_path / "policy.txt").write_text(TEXT)
    environment = {**os.environ, "PATH": f"{PROGRAM.parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    script, arguments = ROOT / "examples" / "publish.sh", (models("llama"), str(tmp_path / "policy.txt"), str(tmp_path))
    done = subprocess.run(
        ["sh", str(script), *arguments], capture_output=True, text=True, encoding="utf-8", check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "fits the model: yes" in done.stdout
    assert "policy: ok: " in done.stdout
    assert "cells: keys differ by up to " in done.stdout
    assert (tmp_path / "policy" / "manifest.json").is_file()
    broken = (arguments[0], str(tmp_path / "none"), arguments[2])
    stopped = subprocess.run(["sh", str(script), *broken], capture_output=True, text=True, check=False, env=environment)
    assert stopped.returncode == 2
    assert stopped.stdout == ""
    assert "No such file" in stopped.stderr


def test_check_prints_one_object_and_nothing_else(models: Callable[[str], str]) -> None:
    done = program("check", models("llama"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True
    assert "Traceback" not in done.stderr
