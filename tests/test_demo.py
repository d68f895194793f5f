"""The demo runs from the first line to the last, on a tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


def run(*options: str) -> str:
    command = [sys.executable, str(DEMO), "--threads", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def test_demo_tells_its_story_on_a_tiny_model() -> None:
    told = run("--model", "tiny", "--quick")
    for part in range(1, 7):
        assert f" {part}. " in told
    assert "read back bit for bit" in " ".join(told.split())
    for arm in ("stale", "in_place", "erratum", "field+erratum", "selective", "suffix", "hoist", "full"):
        rows = [line for line in told.splitlines() if line.startswith(f"│ {arm} ")]
        assert len(rows) == 2, arm  # numbers, answer
    assert cosine_to_own_text(told, "full") > 0.99999
    assert "ok: live cells" in told
    assert "the answer is right" in " ".join(told.split())


def cosine_to_own_text(told: str, arm: str) -> float:
    row = next(line for line in told.splitlines() if line.startswith(f"│ {arm} "))
    return float(row.split("│")[2])


@pytest.mark.slow
def test_demo_on_a_real_model(smollm2: object) -> None:
    told = run("--quick")
    assert "times sooner" in told
    assert all(cosine_to_own_text(told, arm) > 0.99 for arm in ("stale", "in_place", "suffix", "full"))
