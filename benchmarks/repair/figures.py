"""Plots of the committed JSON: `python -m repair.figures [--results FOLDER] [--out FOLDER]` writes
`docs/figures/repair-*.svg`. Needs matplotlib (`pip install 'editable-cache[bench]'`).
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import timing
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from repair.masks import unpacked

OUT = Path(__file__).parents[2] / "docs" / "figures"
TITLES = {"smollm2": "SmolLM2-135M", "gemma3_270m": "Gemma 3 270M"}
LAYERS = {"smollm2": 30, "gemma3_270m": 18}
GEOMETRY_TITLES = {
    "cells": "S1, free cells",
    "prefixes": "S2, layer prefixes",
    "columns": "S3, whole tokens",
    "suffixes": "S4, upper layers",
}
SHOWN = ("attention_shift", "sir", "sir_columns", "inflow_accumulated", "window", "random")
ERRORBAR = {"fmt": "none", "lw": 0.8, "alpha": 0.6}

# Okabe & Ito 2008: told apart by colour-blind readers too.
BLACK, ORANGE, SKY, GREEN, YELLOW = "#000000", "#E69F00", "#56B4E9", "#009E73", "#B8A800"
BLUE, RED, PINK, GREY = "#0072B2", "#D55E00", "#CC79A7", "#888888"
STYLES: dict[str, tuple[str, str]] = {
    "attention_shift": (RED, "s"),
    "sir": (BLUE, "D"),
    "inflow_accumulated": (GREEN, "^"),
    "random": (GREY, "x"),
    "window": (PINK, "v"),
    "cacheblend": (ORANGE, "s"),
    "kv_deviation": (YELLOW, "p"),
    "readout": (SKY, "o"),
    "sir_columns": (BLACK, "*"),
    "column_ranks": (BLACK, "h"),
    "near_and_read": (GREEN, "o"),
    "boundary": (GREY, "+"),
    "even_columns": (GREY, "1"),
    "shallow_layers": (BLACK, "P"),
}
SPARE = ((GREEN, "<"), (BLUE, ">"), (PINK, "d"), (SKY, "8"))
TIER_LINES, TIER_COLOURS = {0: ":", 1: "-", 2: "--"}, {0: GREEN, 1: BLUE, 2: RED}

mpl.rcParams.update(
    {
        "svg.hashsalt": "editable-cache",
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": "#E6E6E6",
        "axes.axisbelow": True,
        "xtick.bottom": False,
        "ytick.left": False,
        "legend.frameon": False,
        "figure.facecolor": "white",
    }
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=timing.RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    results = {
        name: json.loads(path.read_text("utf-8")) if (path := arguments.results / f"{name}.json").is_file() else {}
        for name in ("repair", "repair_cost", "repair_masks")
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, figure in figures(results).items():
        path = arguments.out / f"repair-{name}.svg"
        path.write_text(svg(figure), encoding="utf-8")
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")


def svg(figure: Figure) -> str:
    """The plot as text, the same for the same figures, with hundredths of a point and no blanks at ends of lines."""
    found = io.StringIO()
    figure.savefig(found, format="svg", bbox_inches="tight", metadata={"Date": None})
    return re.sub(r"[ \t]+$", "", re.sub(r"(\d\.\d\d)\d+", r"\1", found.getvalue()), flags=re.M)


def figures(results: dict[str, dict[str, Any]]) -> dict[str, Figure]:
    """Each plot whose figures are there; the others are named."""
    found, repair = {}, results["repair"]
    grid, deployable = repair.get("grid"), repair.get("deployable")
    cost = results["repair_cost"].get("results")
    if grid:
        found["budgets"] = by_geometry(grid)
        found["blocks"] = by_block(grid)
    if deployable:
        found["deployable"] = by_selector(deployable)
    if deployable and cost:
        found["cost"] = by_cost(deployable, cost)
    for model, case in results["repair_masks"].get("models", {}).items():
        found[f"masks-{model}"] = masks(case, TITLES[model])
    for name in {"budgets", "blocks", "deployable", "cost"} - set(found):
        print(f"{name}: left out, its figures are missing")
    return found


def by_geometry(grid: dict[str, Any]) -> Figure:
    """Recovery against budget, a row of panels per model and one panel per geometry."""
    figure, axes = _panels(len(grid), len(GEOMETRY_TITLES))
    for panels, (model, part) in zip(axes, grid.items(), strict=True):
        for axis, (geometry, title) in zip(panels, GEOMETRY_TITLES.items(), strict=True):
            for row in part["rows"]:
                if row["signal"] in SHOWN and row["geometry"] == geometry:
                    _curve(axis, row["l2"], row["signal"], row["tier"], band=True)
            _budget_axis(axis, part["budgets"], f"{TITLES[model]}: {title}")
        panels[0].set_ylabel("recovery of logits")
    return _with_legend(figure, axes)


def by_selector(deployable: dict[str, Any]) -> Figure:
    """Recovery by real recomputation against budget, one panel per model; bands for two of the selectors."""
    figure, axes = _panels(1, len(deployable), width=4.6, height=3.6)
    for axis, (model, part) in zip(axes[0], deployable.items(), strict=True):
        for number, (name, found) in enumerate(part["selectors"].items()):
            band = name in ("sir", "cacheblend")
            _curve(axis, found["recompute"]["l2"], name, found["tier"], band=band, spare=number)
        _budget_axis(axis, part["budgets"], TITLES[model])
    axes[0][0].set_ylabel("recovery of logits, recomputed")
    return _with_legend(figure, axes)


def by_cost(deployable: dict[str, Any], cost: dict[str, Any]) -> Figure:
    """Recovery at 10 % against what choosing and computing cost, one panel per model."""
    models = [model for model in deployable if model in cost]
    figure, axes = _panels(1, len(models), width=4.6, height=3.6)
    for axis, model in zip(axes[0], models, strict=True):
        selectors, at = deployable[model]["selectors"], deployable[model]["budgets"].index(0.1)
        points = []
        for name, found in selectors.items():
            triple = found["recompute"]["l2"][at]
            if triple:
                points.append(
                    (share_of_prefill(cost[model], name, found["tier"], LAYERS[model]), triple, name, found["tier"])
                )
        for cluster in _clusters(sorted(points)):
            mine = sorted(cluster, key=lambda point: point[1][0])
            right = max(point[0] for point in mine) + 0.04
            for (x, (mean, low, high), name, tier), place in zip(mine, _spread(p[1][0] for p in mine), strict=True):
                colour = TIER_COLOURS.get(tier, BLACK)
                axis.errorbar(x, mean, [[mean - low], [high - mean]], color=colour, **ERRORBAR)
                axis.plot(x, mean, "o", color=colour, markersize=4)
                axis.plot([x, right], [mean, place], color=colour, lw=0.4, alpha=0.6)
                axis.text(right, place, name, color=colour, fontsize=8, va="center")
        axis.set_xlim(0, max(point[0] for point in points) + 0.45)
        axis.set_xlabel("processor time of one thread, share of a plain prefill")
        axis.set_title(f"{TITLES[model]}: 10 % of the cells", fontsize=9)
        for tier, colour in TIER_COLOURS.items():
            axis.plot([], [], "o", color=colour, label=f"tier {tier}", markersize=4)
    axes[0][0].set_ylabel("recovery of logits, recomputed")
    return _with_legend(figure, axes)


def share_of_prefill(cost: dict[str, Any], name: str, tier: int, layers: int) -> float:
    """Cost of one selector at 10 %, from the measured parts: what it reads, scores and mask, recomputation.

    Tier 2 pays for the clean prefill that it is handed, but CacheBlend for the two layers only that it looks at.
    """
    part = {step: values["median"] for step, values in cost["over_plain_prefill"].items()}
    paid: float = part["recompute"]
    if name in ("window", "boundary", "even_columns", "random", "shallow_layers", "deep_layers"):
        return paid
    paid += part["scores_and_mask"]
    if name == "cacheblend":
        return paid + 2 / layers
    if name.endswith("_deviation"):
        return paid + 1
    if name not in ("near_and_read", "readout", "probe_attention", "attention_shift"):
        paid += max(part["traced_prefill"] - 1, 0)
    return paid + {0: 0, 1: part["probe"], 2: 1 + 2 * part["probe"]}[tier]


def by_block(grid: dict[str, Any]) -> Figure:
    """Hidden-state recovery behind each block at 10 % (solid) and 1 % (dotted) of the cells."""
    shown = ("cells", "columns")
    figure, axes = _panels(len(grid), len(shown), width=4.6)
    for panels, (model, part) in zip(axes, grid.items(), strict=True):
        for axis, geometry in zip(panels, shown, strict=True):
            for row in part["hidden"]:
                if row["geometry"] == geometry and row["budget"] in (0.01, 0.1) and None not in row["recovery"]:
                    colour, _ = STYLES[row["signal"]]
                    large = row["budget"] == 0.1
                    label = row["signal"] if large else None
                    axis.plot(row["recovery"], color=colour, ls="-" if large else ":", lw=1.3, label=label)
            axis.set_title(f"{TITLES[model]}: {GEOMETRY_TITLES[geometry]}", fontsize=9)
            axis.set_ylim(-0.3, 1.03)
        panels[0].set_ylabel("recovery of hidden states")
    for axis in axes[-1]:
        axis.set_xlabel("block (solid 10 %, dotted 1 % of the cells)")
    return _with_legend(figure, axes)


def masks(case: dict[str, Any], title: str, bins: int = 400) -> Figure:
    """Chosen cells in each geometry; a pixel is the chosen share of some neighbouring tokens in one layer."""
    figure, axes = _panels(len(case["masks"]), 1, width=9, height=1.5)
    layers, tokens = case["shape"]
    edges = [tokens * at // min(bins, tokens) for at in range(min(bins, tokens) + 1)]
    for axis, (geometry, text) in zip((row[0] for row in axes), case["masks"].items(), strict=True):
        mask = unpacked(text, case["shape"])
        placed = {"extent": (0, tokens, 0, layers), "interpolation": "none"}
        share = [[sum(row[a:b]) / (b - a) for a, b in itertools.pairwise(edges)] for row in mask]
        axis.imshow(share, cmap="Greys", vmin=0, vmax=0.7, aspect="auto", origin="lower", **placed)
        axis.grid(False)
        cells = sum(map(sum, mask))
        axis.set_title(f"{title}: {GEOMETRY_TITLES[geometry]}, {cells:,} cells", fontsize=9, loc="left")
        axis.set_ylabel("layer")
    axes[-1][0].set_xlabel("token of the document")
    return figure


def _panels(
    rows: int, columns: int, width: float = 2.9, height: float = 2.6
) -> tuple[Figure, Sequence[Sequence[Axes]]]:
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, sharey="row")


def _curve(axis: Axes, triples: list[Any], name: str, tier: int, *, band: bool, spare: int = 0) -> None:
    known = [(at, *triple) for at, triple in enumerate(triples) if triple]
    colour, marker = STYLES.get(name, SPARE[spare % len(SPARE)])
    at, mean, low, high = zip(*known, strict=True)
    axis.plot(at, mean, color=colour, marker=marker, ls=TIER_LINES[tier], lw=1.3, ms=4, label=f"{name} (tier {tier})")
    if band:
        axis.fill_between(at, low, high, color=colour, alpha=0.12, lw=0)


def _budget_axis(axis: Axes, budgets: list[float], title: str) -> None:
    axis.set_xticks(range(len(budgets)), [f"{100 * budget:g}" for budget in budgets])
    axis.set_xlabel("% of the cells")
    axis.set_title(title, fontsize=9)
    axis.set_ylim(max(axis.get_ylim()[0], -0.6), 1.03)
    axis.axhline(0, color=GREY, lw=0.6)


def _clusters(points: list[Any], gap: float = 0.4) -> list[list[Any]]:
    """Points, sorted from left to right, in groups that are too near to each other for labels in between."""
    found: list[list[Any]] = []
    for point in points:
        if found and point[0] - found[-1][-1][0] < gap:
            found[-1].append(point)
        else:
            found.append([point])
    return found


def _spread(heights: Iterable[float], gap: float = 0.035) -> list[float]:
    """Heights of labels for rising points, far enough from each other to be read."""
    found: list[float] = []
    for height in heights:
        found.append(height if not found else max(height, found[-1] + gap))
    return found


def _with_legend(figure: Figure, axes: Sequence[Sequence[Axes]]) -> Figure:
    known: dict[str, Any] = {}
    for row in axes:
        for axis in row:
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                known.setdefault(label, handle)
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=min(5, len(known)), fontsize=8)
    return figure


if __name__ == "__main__":
    main()
