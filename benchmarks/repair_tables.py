"""All of `docs/repair-tables.md`, and how a recovery is written."""

from __future__ import annotations

from typing import Any

from page_parts import row, table

MODELS = {"smollm2": "SmolLM2-135M-Instruct", "gemma3_270m": "Gemma 3 270M"}
GEOMETRIES = {
    "cells": "S1, free cells",
    "prefixes": "S2, layer prefixes",
    "columns": "S3, whole tokens",
    "suffixes": "S4, the layers above the lowest third",
}


def tables_page(result: dict[str, Any]) -> str:
    """Every signal, geometry and budget."""
    lines = [
        "# Repair: every signal, geometry and budget",
        "",
        "Generated from `benchmarks/results/repair.json` by `benchmarks/pages.py`. Cells patched from the clean cache;",
        f"mean recovery over documents (95 % interval, bootstrap over documents, {result['settings']['resamples']:,} "
        "resamples), best at 10 % first.",
        "The second table of each geometry has the mean recovery of the KL divergence. See [repair.md](repair.md).",
    ]
    for model, found in result["grid"].items():
        head = ["signal", "tier", *map(percent, found["budgets"])]
        at = found["budgets"].index(0.1)
        starts = ", ".join(f"{name} {mean:.4g}" for name, (mean, _, _) in found["start"].items())
        lines += [
            "",
            f"## {MODELS[model]}",
            "",
            f"{found['documents']} documents. Mean distances without repair: {starts}.",
        ]
        for geometry, title in GEOMETRIES.items():
            rows = [each for each in found["rows"] if each["geometry"] == geometry]
            rows.sort(key=lambda each: (each["tier"], -(each["l2"][at] or [-1e9])[0], each["signal"]))
            for measure, heading, written in (("l2", title, triple), ("kl", f"{title}: KL", number)):
                cells = [row([each["signal"], str(each["tier"]), *map(written, each[measure])]) for each in rows]
                lines += ["", f"### {heading}", "", table(head, cells).rstrip()]
    return "\n".join(lines) + "\n"


def triple(values: list[float] | None) -> str:
    """Mean with its interval; nothing where there is none."""
    if values is None:
        return ""
    mean, low, high = map(number, values)
    return f"{mean} ({low} to {high})" if "-" in low else f"{mean} ({low}–{high})"


def number(value: float | None) -> str:
    """Two digits, and no negative zero."""
    return "" if value is None else f"{round(value, 2) + 0.0:.2f}"


def percent(budget: float) -> str:
    return f"{100 * budget:g} %"
