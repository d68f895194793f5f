"""What the commands of the instrument have in common."""

from __future__ import annotations

import argparse


def parser(doc: str | None, quick: str) -> argparse.ArgumentParser:
    """Model, ``--quick`` (with what it leaves out) and ``--threads``."""
    found = argparse.ArgumentParser(description=doc)
    found.add_argument("model", choices=("smollm2", "gemma3_270m"))
    found.add_argument("--quick", action="store_true", help=quick)
    found.add_argument("--threads", type=int, default=2)
    return found
