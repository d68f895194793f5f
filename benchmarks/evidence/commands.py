"""What the commands of the evidence have in common."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from editable_cache.evaluation.results import Run
from editable_cache.evaluation.tasks import Item
from evidence import models

RESULTS = Path(__file__).parents[1] / "results" / "evidence"


def parser(doc: str | None, quick: str) -> argparse.ArgumentParser:
    """Model, ``--quick`` (with what it leaves out) and ``--threads``."""
    found = argparse.ArgumentParser(description=doc)
    found.add_argument("model", choices=models.names())
    found.add_argument("--quick", action="store_true", help=f"{quick}; writes no file")
    found.add_argument("--threads", type=int, default=2)
    return found


def begin(threads: int) -> None:
    """Threads as asked, no gradients, no remarks on known effects of the edits that are measured."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")


def run_of(study: str, model: str, settings: Mapping[str, Any], quick: bool) -> Run:
    """The run that ends in ``results/evidence/STUDY-MODEL.json``; of a quick one nothing is kept."""
    path = None if quick else RESULTS / f"{study}-{model}.json"
    return Run(path, study=study, model=model, settings=settings)


def in_turn(items: Sequence[Item], count: int) -> list[Item]:
    """At most so many items, the first of each domain, then the second: with a larger count the same and more."""
    return sorted(items, key=lambda item: int(item.key.rsplit("/", 1)[1]))[:count]
