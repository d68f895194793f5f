"""The command line in tests: in this process, or as the installed program."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from editable_cache.cli.main import app

PAGE = (Path(__file__).parents[1] / "docs" / "cli.md").read_text(encoding="utf-8")
PROGRAM = Path(sys.executable).parent / "editable-cache"
TEXT = "Refund policy: the customer asked for the refund.\nIf the order is pending the agent must not refund it.\n"


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    """Run the application in this process."""
    return CliRunner().invoke(app, list(arguments), input=stdin, catch_exceptions=False)


def answer(*arguments: str, code: int = 0) -> dict[str, Any]:
    """The JSON object that a command prints, which must be all of its stdout."""
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def program(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run the installed entry point."""
    return subprocess.run(
        [str(PROGRAM), *arguments], capture_output=True, text=True, encoding="utf-8", check=False, **more
    )


def json_keys(command: str) -> set[str]:
    """The keys of a command's JSON object by docs/cli.md."""
    section = PAGE.split(f"\n## {command}\n")[1].split("\n## ")[0]
    return set(re.findall(r"`(\w+)`", section.split("JSON keys: ")[1].split("\n\n")[0]))
