"""Runs examples in a process of its own with little memory: python hostile_worker.py BASE EXAMPLES HEADROOM_MIB."""

from __future__ import annotations

import collections
import resource
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch  # noqa: E402
from hostile_bases import base  # noqa: E402
from hostile_check import check  # noqa: E402
from hostile_files import spoil  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402


def main(name: str, examples: int, headroom: int) -> None:
    torch.set_num_threads(1)
    good = base(name)
    check(good, good.files)  # everything is imported and measured before memory is counted
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + headroom * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    reached: collections.Counter[str] = collections.Counter()

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        files = spoil(data.draw, good.files)
        reached[check(good, files)] += 1

    run()
    print(sum(reached.values()), *(f"{how}={reached[how]}" for how in ("refused", "loaded", "spliced")))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
