"""Paired timing: variants take turns in one process, so that noise of the machine meets all of them alike."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
from tqdm import tqdm

from editable_cache.evaluation import results

RESULTS = Path(__file__).parent / "results"


def paired(
    variants: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    prepare: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each variant in each round; every variant runs once unmeasured first.

    ``prepare`` runs, unmeasured, before each measured call; ``clock`` tells wall or processor time.
    """
    for run in variants.values():
        prepare()
        run()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            prepare()
            started = clock()
            run()
            seconds[name].append(clock() - started)
    return seconds


def with_progress(variants: Mapping[str, Callable[[], Any]], title: str) -> dict[str, Callable[[], Any]]:
    """The same variants under one bar that counts their runs."""
    bar = tqdm(desc=title, unit="run", leave=False)

    def counted(run: Callable[[], Any]) -> Callable[[], Any]:
        def go() -> Any:
            value = run()
            bar.update()
            return value

        return go

    return {name: counted(run) for name, run in variants.items()}


def ratios(slow: list[float], fast: list[float]) -> dict[str, float]:
    """Median and quartiles of ``slow / fast``, round by round."""
    values = sorted(a / b for a, b in zip(slow, fast, strict=True))
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {"median": round(median, 3), "q1": round(low, 3), "q3": round(high, 3), "rounds": len(values)}


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """Median and quartiles in milliseconds."""
    low, median, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (seconds[0],) * 3
    return {"median_ms": round(median * 1e3, 2), "q1_ms": round(low * 1e3, 2), "q3_ms": round(high * 1e3, 2)}


def environment() -> dict[str, Any]:
    """Versions and machine."""
    return {**results.environment(), "safetensors": safetensors.__version__}


def write(name: str, content: Mapping[str, Any]) -> Path:
    """Write a result as JSON beside the benchmarks."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**content, "environment": environment()}, indent=1) + "\n", encoding="utf-8")
    return path
