"""From finished items to `results/repair.json`: `python -m repair.summary [--partial FOLDER] [--out FILE]`.

Cases of a document are averaged first; intervals are over documents. What has no finished items is left out and named.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import timing
import torch

from editable_cache.repair import list_signals, ranks
from repair.cases import CALIBRATION, DOCUMENT_TOKENS, INSTRUCTIONS, QUERIES, TEST
from repair.grid import BUDGETS
from repair.judge import ANSWER_TOKENS
from repair.progress import PARTIAL, Items, finished
from repair.stats import RESAMPLES, interval

MODELS = ("smollm2", "gemma3_270m")
HIDDEN_SIGNALS = ("sir", "attention_shift", "inflow_accumulated", "shallow_layers")
HIDDEN_GEOMETRIES = ("cells", "columns")
SOME_BUDGETS = (0.01, 0.05, 0.1)
OPPONENTS = ("sir", "cacheblend", "kv_deviation", "window")
LINE = 1000
"""Longest line of the JSON file that is not broken up."""

Triple = list[float] | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partial", type=Path, default=PARTIAL, help="folder of the finished items")
    parser.add_argument("--out", type=Path, default=timing.RESULTS / "repair.json")
    arguments = parser.parse_args()
    found = {**summary(arguments.partial), "environment": timing.environment()}
    arguments.out.write_text(laid_out(found) + "\n", encoding="utf-8")
    print(f"{arguments.out.name}: {arguments.out.stat().st_size / 1024:.0f} KiB")


def summary(folder: Path) -> dict[str, Any]:
    """Everything but the environment."""
    found: dict[str, Any] = {"settings": settings()}
    parts = {"grid": grid, "deployable": deployable, "transfer": transfer, "oracle": oracle, "resumed": resumed}
    for name, part in parts.items():
        models = {}
        for model in MODELS:
            items = finished(folder / f"{name}_{model}.jsonl")
            if items:
                models[model] = part(items)
                _tell_missing(f"{name}, {model}", models[model])
            else:
                print(f"{name}, {model}: nothing finished, left out")
        if models:
            found[name] = models
    return found


def settings() -> dict[str, Any]:
    """What the runs had in common."""
    return {
        "documents": {"calibration": CALIBRATION, "test": TEST},
        "document_tokens": DOCUMENT_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "instructions": INSTRUCTIONS,
        "queries": QUERIES,
        "resamples": RESAMPLES,
    }


def resumed(items: Items) -> dict[str, Any]:
    """Means over documents by signal, first layer and budget, keys ``(document,)``."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in (row for value in items.values() for row in value["rows"]):
        found.setdefault((row["signal"], row["from_layer"], row["budget"]), []).append(row)
    rows = [
        {
            "signal": signal,
            "from_layer": layer,
            "budget": budget,
            **{name: _mean([each[name] for each in mine]) for name in ("tokens", "l2", "kl")},
        }
        for (signal, layer, budget), mine in found.items()
    ]
    return {"documents": len(items), "rows": rows}


def grid(items: Items) -> dict[str, Any]:
    """Rows by signal and geometry, keys ``(document, signal)``."""
    by_signal = _grouped(items, 1)
    first = {key[0]: value["start"] for key, value in items.items()}
    rows, hidden = [], []
    tiers = {name: next(iter(each.values()))["tier"] for name, each in by_signal.items()}
    for name in sorted(by_signal, key=lambda name: (tiers[name], name)):
        mine = [value["rows"] for value in by_signal[name].values()]
        for geometry in mine[0]:
            parts = [each[geometry] for each in mine]
            row: dict[str, Any] = {"signal": name, "tier": tiers[name], "geometry": geometry, "documents": len(parts)}
            row["l2"] = [_triple([part["l2"][at] for part in parts]) for at in range(len(BUDGETS))]
            for measure in ("kl", "agreement", "local"):
                row[measure] = [_mean([part[measure][at] for part in parts]) for at in range(len(BUDGETS))]
            rows.append(row)
            if name in HIDDEN_SIGNALS and geometry in HIDDEN_GEOMETRIES:
                for budget in SOME_BUDGETS:
                    blocks = zip(*(part["hidden"][BUDGETS.index(budget)] for part in parts), strict=True)
                    recovery = [_mean(block) for block in blocks]
                    hidden.append({"signal": name, "geometry": geometry, "budget": budget, "recovery": recovery})
    cases = [part for value in items.values() for part in value["rows"].values()]
    whole = [part["l2"][BUDGETS.index(1.0)] for part in cases]
    return {
        "documents": len(first),
        "budgets": BUDGETS,
        "start": {name: _triple([start[name] for start in first.values()]) for name in next(iter(first.values()))},
        "worst_at_full": float(f"{max(abs(1 - value) for value in whole):.3g}"),
        "rows": rows,
        "hidden": hidden,
        "local_and_end": {
            str(budget): {
                "rows": _dissociation([(row["local"][at], (row["l2"][at] or [None])[0]) for row in rows]),
                "cases": _dissociation([(part["local"][at], part["l2"][at]) for part in cases]),
            }
            for budget in SOME_BUDGETS
            for at in (BUDGETS.index(budget),)
        },
    }


def deployable(items: Items) -> dict[str, Any]:
    """Selectors by real recomputation and by patch, keys ``(document, instruction, selector)``."""
    by_name = _grouped(items, 2)
    everything = by_name.pop("everything", {})
    budgets = _budgets(value for cases in by_name.values() for value in cases.values())
    tiers = {found.name: found.tier for found in list_signals()}
    start = {key[:2]: value["start"] for key, value in items.items()}
    selectors = {}
    for name, cases in by_name.items():
        found: dict[str, Any] = {"tier": tiers.get(name), "cases": len(cases)}
        found["tokens"] = [
            _mean([value["budgets"][budget]["tokens"] for value in cases.values()]) for budget in budgets
        ]
        for way in ("recompute", "patch"):
            found[way] = {
                measure: [_triple(_by_document(_each(cases, budget, way, measure)).values()) for budget in budgets]
                for measure in ("l2", "kl", "agreement")
            }
        found["minus"] = {
            other: [
                paired(*(_each(each, budget, "recompute", "l2") for each in (cases, by_name[other])))
                for budget in budgets
            ]
            for other in OPPONENTS
            if other in by_name and other != name
        }
        found["by_instruction"] = {
            instruction: [
                _mean([value["budgets"][budget]["recompute"]["l2"] for value in mine.values()]) for budget in budgets
            ]
            for instruction, mine in _grouped(cases, 1).items()
        }
        selectors[name] = found
    return {
        "documents": len({key[0] for key in start}),
        "budgets": [float(budget) for budget in budgets],
        "cases": len(start),
        "start": {
            measure: _triple(_by_document({key: each[measure] for key, each in start.items()}).values())
            for measure in ("kl", "l2", "cosine", "agreement")
        },
        "everything": {
            "cases": len(everything),
            **{
                way: float(f"{max(abs(1 - value) for value in _each(everything, '1.0', way, 'l2').values()):.3g}")
                for way in ("recompute", "patch")
                if everything
            },
        },
        "selectors": selectors,
    }


def transfer(items: Items) -> dict[str, Any]:
    """Masks chosen with another request, or with none, keys ``(document,)``."""
    ways: dict[str, list[dict[tuple[Any, ...], float]]] = {}
    budgets = _budgets(items.values())
    for at, budget in enumerate(budgets):
        for key, value in items.items():
            found = value["budgets"][budget]
            asked = [found[f"query {number}"] for number in range(len(QUERIES))]
            same = [row[number] for number, row in enumerate(asked)]
            other = [each for number, row in enumerate(asked) for k, each in enumerate(row) if k != number]
            free = {name: row for name, row in found.items() if not name.startswith("query ")}
            for name, row in {"matched": same, "mismatched": other, **free}.items():
                ways.setdefault(name, [{} for _ in budgets])[at][key] = statistics.mean(row)
    return {
        "documents": len(items),
        "budgets": [float(budget) for budget in budgets],
        "ways": {
            name: {
                "recovery": [_triple(each.values()) for each in found],
                "minus_matched": [paired(*both) for both in zip(found, ways["matched"], strict=True)],
            }
            for name, found in ways.items()
        },
    }


def oracle(items: Items) -> dict[str, Any]:
    """As it was kept, keys ``(part,)``."""
    return {key[0]: value for key, value in items.items()}


def paired(ours: Mapping[tuple[Any, ...], float], theirs: Mapping[tuple[Any, ...], float]) -> Triple:
    """Mean difference over the documents of the cases that both have, with its interval."""
    both = {key: ours[key] - theirs[key] for key in ours if key in theirs}
    return _triple(_by_document(both).values())


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Rank correlation, ties with their average rank; 0 where one side is constant."""
    a, b = (ranks(torch.tensor([pair[at] for pair in pairs], dtype=torch.float64)).double() for at in (0, 1))
    a, b = a - a.mean(), b - b.mean()
    norm = float(a.norm() * b.norm())
    return float(a @ b) / norm if norm > 0 else 0.0


def laid_out(value: Any, indent: int = 0) -> str:
    """JSON in which only what is longer than a line is broken up."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if not isinstance(value, (dict, list)) or not value or (len(text) <= LINE and indent > 0):
        return text
    inner, outer = " " * (indent + 1), " " * indent
    if isinstance(value, dict):
        lines = [f"{json.dumps(str(key))}: {laid_out(each, indent + 1)}" for key, each in value.items()]
        return "{\n" + ",\n".join(inner + line for line in lines) + f"\n{outer}}}"
    return "[\n" + ",\n".join(inner + laid_out(each, indent + 1) for each in value) + f"\n{outer}]"


def _dissociation(pairs: Sequence[tuple[float | None, float | None]]) -> dict[str, Any]:
    known = [(pair[0], pair[1]) for each in pairs if (pair := _known(each))]
    apart = sum(local > 0 > end for local, end in known)
    return {"n": len(known), "spearman": round(spearman(known), 4), "apart": round(apart / max(len(known), 1), 4)}


def _grouped(items: Items, place: int) -> dict[Any, Items]:
    found: dict[Any, Items] = {}
    for key, value in items.items():
        found.setdefault(key[place], {})[key[:place] + key[place + 1 :]] = value
    return found


def _each(cases: Items, budget: str, way: str, measure: str) -> dict[tuple[Any, ...], float]:
    return {key: value["budgets"][budget][way][measure] for key, value in cases.items()}


def _budgets(values: Iterable[dict[str, Any]]) -> list[str]:
    return sorted({budget for value in values for budget in value["budgets"]}, key=float)


def _by_document(cases: Mapping[tuple[Any, ...], float]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for key, value in cases.items():
        found.setdefault(key[0], []).append(value)
    return {document: statistics.mean(values) for document, values in found.items()}


def _triple(values: Iterable[float | None]) -> Triple:
    """Mean and interval; None if there is no value, or one that is no number."""
    known = _known(values)
    return [round(value, 4) for value in interval(known)] if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return round(statistics.mean(known), 4) if known else None


def _known(values: Iterable[float | None]) -> list[float]:
    found = list(values)
    kept = [value for value in found if value is not None and math.isfinite(value)]
    return kept if len(kept) == len(found) else []


def _tell_missing(title: str, part: dict[str, Any]) -> None:
    rows = {row["signal"]: row for row in part.get("rows", ()) if "geometry" in row} | part.get("selectors", {})
    count = "cases" if "selectors" in part else "documents"
    for name, row in rows.items():
        if row[count] < part[count]:
            print(f"{title}: {name} has {row[count]} of {part[count]} {count}")
    if part.get("documents", len(TEST)) < len(TEST) and not title.startswith("resumed"):
        print(f"{title}: {part['documents']} of {len(TEST)} documents")


if __name__ == "__main__":
    main()
