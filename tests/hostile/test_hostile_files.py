"""Thousands of spoiled folders: each loads into something whole, or a library error says why not; nothing else happens.

The slow test runs in processes with little memory, so that a large allocation fails it, as a crash or a hang do.
"""

from __future__ import annotations

import collections
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_bases import BASES, base
from hostile_check import check
from hostile_files import spoil
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

WORKER = Path(__file__).with_name("hostile_worker.py")
QUICK, SLOW = 17, 250
HEADROOM = 512
"""MiB that a process may take once everything is imported."""


@pytest.mark.parametrize("name", BASES)
def test_some_spoiled_folders(name: str) -> None:
    good, reached = base(name), collections.Counter[str]()

    @settings(max_examples=QUICK, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def run(data: st.DataObject) -> None:
        reached[check(good, spoil(data.draw, good.files))] += 1

    run()
    assert sum(reached.values()) >= QUICK
    assert reached["refused"] > 0


@pytest.mark.parametrize("name", BASES)
def test_a_good_folder_passes(name: str) -> None:
    """Else everything above could be refused for one wrong reason."""
    assert check(base(name), base(name).files) == ("loaded" if name.endswith("cache") else "spliced")


@pytest.mark.slow
@pytest.mark.parametrize("name", BASES)
def test_many_spoiled_folders(name: str) -> None:
    command = [sys.executable, str(WORKER), name, str(SLOW), str(HEADROOM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    total, *reached = done.stdout.split()
    assert int(total) >= SLOW
    counts = {how: int(count) for how, count in (each.split("=") for each in reached)}
    assert counts["refused"] > 0
    assert counts["loaded"] + counts["spliced"] > 0, "no example got past the checks of loading"
