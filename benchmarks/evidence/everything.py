"""All evidence, one command after the other: ``python -m evidence.everything [--quick]``, then the page.

What is finished is not measured again, so a stopped run goes on; delete a results file to measure it anew. Models that
are not in ``models`` are left out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from evidence import models

SMALL = ("small-llama", "small-qwen3", "small-gemma3", "small-hybrid")
ANY_ORDER = ("gatekeeper-any-order", "small-llama-any-order", "small-gemma3-any-order")
DECIDING = ("gatekeeper", *SMALL, "gatekeeper-no-updates", "small-llama-no-updates", *ANY_ORDER)
COMMANDS: dict[str, tuple[str, ...]] = {
    "gate": DECIDING,
    "frontier": DECIDING,
    "mechanism": ("gatekeeper", "small-llama"),
    "composing": ("smollm2", "gemma3_270m", "gatekeeper", *SMALL, *ANY_ORDER),
    "diagonal": ("gatekeeper", *SMALL[:-1], *ANY_ORDER),
    "horizon": ("gatekeeper", *SMALL),
    "multihop": ("smollm2", "gemma3_270m"),
    "rome_facts": ("smollm2",),
    "weights": ("gatekeeper",),
}
"""Each command and the models that it is run on; arms inside a transplant need cells of every token."""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a trial of each command; writes nothing")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    options = ["--threads", str(given.threads), *(["--quick"] if given.quick else [])]
    known = models.names()
    for command, wanted in COMMANDS.items():
        for name in wanted:
            if name in known:
                print(f"== {command} {name}", flush=True)
                subprocess.run([sys.executable, "-m", f"evidence.{command}", name, *options], check=True)
    if not given.quick:
        subprocess.run([sys.executable, "-m", "evidence.page"], check=True)


if __name__ == "__main__":
    main()
