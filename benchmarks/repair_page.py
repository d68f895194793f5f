"""The marked parts of `docs/repair.md` and all of `docs/repair-tables.md`, from committed JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from page_parts import machine, ms, ratio, row, short, table
from repair_tables import GEOMETRIES, MODELS, number, percent, tables_page, triple

HEADLINE = (
    "attention_shift",
    "sir",
    "sir_columns",
    "inflow_accumulated",
    "window",
    "even_columns",
    "random",
    "shallow_layers",
)
STUDY = {
    ("cells", "attention_shift"): "0.915",
    ("cells", "sir"): "0.859",
    ("cells", "inflow_accumulated"): "0.51–0.64",
    ("cells", "shallow_layers"): "-0.005",
    ("columns", "attention_shift"): "0.88–0.92",
    ("columns", "sir"): "0.734",
}
"""Recovery at 10 % in "What Must a KV-Cache Repair Know to Choose?", a model of 36 layers. Ranges and S3 are its S1
figures less the losses that it states."""

STUDY_SPEARMAN = {"0.01": "0.896", "0.05": "0.471", "0.1": "0.441"}
MARK = re.compile(r"<!-- (bench:repair-[\w-]+)(?:: waiting for figures)? -->\n.*?<!-- /\1 -->", re.S)

Results = dict[str, Any]


def rendered(docs: Path, results: Path) -> dict[Path, str]:
    """Each page on repair with the text that it should have."""
    names = {"repair": "repair", "situations": "repair_situations", "cost": "repair_cost"}
    found: Results = {
        key: json.loads(path.read_text("utf-8"))
        for key, name in names.items()
        if (path := results / f"{name}.json").is_file()
    }
    plots = {path.stem for path in (docs / "figures").glob("repair-*.svg")}
    page = docs / "repair.md"
    pages = {page: filled(page.read_text("utf-8"), found, plots)}
    if "grid" in found.get("repair", {}):
        pages[docs / "repair-tables.md"] = tables_page(found["repair"])
    return pages


def filled(text: str, results: Results, plots: Iterable[str] = ()) -> str:
    """A page with its marked parts filled; a part whose figures are missing is empty, and its mark says so."""

    def part(match: re.Match[str]) -> str:
        mark = match[1]
        new = PARTS[mark.removeprefix("bench:repair-")](results)
        if not new:
            return f"<!-- {mark}: waiting for figures -->\n<!-- /{mark} -->"
        images = [f"\n![{title}](figures/{name}.svg)\n" for name, title in PLOTS.get(mark, {}).items() if name in plots]
        return f"<!-- {mark} -->\n{new}{''.join(images)}<!-- /{mark} -->"

    return MARK.sub(part, text)


def headline(results: Results) -> str:
    """Winners of each tier and baselines in S1 and S3."""
    grid = results.get("repair", {}).get("grid", {})
    parts = []
    for model, found in grid.items():
        budgets = [budget for budget in found["budgets"] if budget < 1]
        for geometry in ("cells", "columns"):
            rows = {each["signal"]: each for each in found["rows"] if each["geometry"] == geometry}
            best = _best(rows.values(), found["budgets"].index(0.1))
            names = dict.fromkeys((*(best[tier] for tier in sorted(best, reverse=True)), *HEADLINE))
            lines = []
            for name in (name for name in names if name in rows):
                title = f"{name}, best of tier {rows[name]['tier']}" if name in best.values() else name
                cells = [triple(each) for each in rows[name]["l2"][: len(budgets)]]
                lines.append(row([title, str(rows[name]["tier"]), *cells, STUDY.get((geometry, name), "")]))
            head = ["", "tier", *map(percent, budgets), "the study at 10 %"]
            parts.append(f"**{MODELS[model]}, {GEOMETRIES[geometry]}**\n\n" + table(head, lines))
    worst = ", ".join(
        f"{MODELS[model]} {short(found['worst_at_full']) if found['worst_at_full'] else 0}"
        for model, found in grid.items()
    )
    last = (
        "\n*Best of tier*: the highest mean at 10 % on these very documents, which flatters it. Largest difference "
        f"from 1 at 100 %, any row of any document:\n{worst}. All signals, geometries and budgets: "
        "[repair-tables.md](repair-tables.md).\n"
    )
    return "\n".join(parts) + last if parts else ""


def deployable(results: Results) -> str:
    """Recovery by real recomputation."""
    parts = []
    for model, found in results.get("repair", {}).get("deployable", {}).items():
        at, lines = found["budgets"].index(0.1), []
        instructions = next(iter(found["selectors"].values()))["by_instruction"]
        for name, each in _ordered(found["selectors"], at):
            ways = [triple(each[way][measure][at]) for way, measure in (("patch", "l2"), ("recompute", "kl"))]
            kinds = " / ".join(number((each["by_instruction"].get(kind) or {at: None})[at]) for kind in instructions)
            cells = [*map(triple, each["recompute"]["l2"]), *ways, triple(each["recompute"]["agreement"][at]), kinds]
            lines.append(row([name, str(each["tier"]), *cells, f"{each['tokens'][at]:,.0f}"]))
        head = ["", "tier", *map(percent, found["budgets"]), "patched, 10 %", "KL, 10 %", "same top token, 10 %"]
        whole, start = found["everything"], found["start"]
        worst = [short(whole[way]) if whole[way] else "0" for way in ("recompute", "patch") if way in whole]
        parts.append(
            f"**{MODELS[model]}**: {found['cases']} cases of {found['documents']} documents. No repair: KL "
            f"{short(start['kl'][0])} nats, same top token {number(start['agreement'][0])}.\nThe whole document: off "
            f"1 by at most {' (recomputed), '.join(worst)} (patched).\n\n"
            + table([*head, f"10 %: {' / '.join(instructions)}", "tokens, 10 %"], lines)
        )
    return "\n".join(parts)


def paired(results: Results) -> str:
    """Differences of selectors at equal cost."""
    parts = []
    for model, found in results.get("repair", {}).get("deployable", {}).items():
        opponents = [name for name in ("sir", "cacheblend", "kv_deviation", "window") if name in found["selectors"]]
        shown = [budget for budget in (0.05, 0.1, 0.2) if budget in found["budgets"]]
        places = [found["budgets"].index(budget) for budget in shown]
        lines = [
            row([name, *(difference(each["minus"].get(other), at) for other in opponents for at in places)])
            for name, each in _ordered(found["selectors"], found["budgets"].index(0.1))
        ]
        head = [f"- {other}, {percent(budget)}" for other in opponents for budget in shown]
        parts.append(f"**{MODELS[model]}**\n\n" + table(["", *head], lines))
    return "\n".join(parts)


def transfer(results: Results) -> str:
    """Masks chosen with another request or none."""
    parts = []
    for model, found in results.get("repair", {}).get("transfer", {}).items():
        places = range(len(found["budgets"]))
        lines = [
            row([name, *map(triple, each["recovery"]), *(difference(each["minus_matched"], at) for at in places)])
            for name, each in found["ways"].items()
        ]
        budgets = [percent(budget) for budget in found["budgets"]]
        head = ["mask chosen with", *budgets, *(f"- matched, {budget}" for budget in budgets)]
        parts.append(f"**{MODELS[model]}**, {found['documents']} documents\n\n" + table(head, lines))
    return "\n".join(parts)


def resumed(results: Results) -> str:
    """Columns resumed at a layer from what was stored there, at equal cost."""
    parts = []
    for model, found in results.get("repair", {}).get("resumed", {}).items():
        rows = {(each["signal"], each["from_layer"], each["budget"]): each for each in found["rows"]}
        budgets = list(dict.fromkeys(each["budget"] for each in found["rows"]))
        starts = list(dict.fromkeys((each["signal"], each["from_layer"]) for each in found["rows"]))
        lines = [
            row(
                [
                    signal,
                    str(layer),
                    *(
                        f"{number(each['l2'])} ({each['tokens']:,.0f})"
                        for each in (rows[signal, layer, b] for b in budgets)
                    ),
                ]
            )
            for signal, layer in starts
        ]
        head = ["", "from layer", *(f"{percent(budget)} (tokens)" for budget in budgets)]
        parts.append(f"**{MODELS[model]}**, {found['documents']} calibration documents\n\n" + table(head, lines))
    return "\n".join(parts)


def oracle(results: Results) -> str:
    """Searches, and signals at as many cells."""
    parts = []
    for model, found in results.get("repair", {}).get("oracle", {}).items():
        lines = []
        for name in (name for name in ("columns", "cells") if name in found):
            each = found[name]
            cells = [f"{each['cells']:,}", str(each["evaluations"]), f"{each['seconds']:.0f}"]
            signals = ", ".join(f"{signal} {value:.2f}" for signal, value in each["signals"].items())
            lines.append(row([name, *cells, number(1 - each["distance"] / each["start"]), signals]))
        head = ["greedy search over", "cells", "evaluations", "seconds", "recovery", "signals at as many cells"]
        parts.append(f"**{MODELS[model]}**\n\n" + table(head, lines))
        if "calibration" in found:
            searches = found["calibration"]
            rows = [
                row([str(steps[0]["most"]), *(f"{s['distance']:.4g} ({s['evaluations']:,})" for s in steps)])
                for steps in zip(*searches.values(), strict=True)
            ]
            parts.append(table(["actions", *(f"{name}: distance (evaluations)" for name in searches)], rows))
        if "single" in found:
            single = found["single"]
            strongest = max(single["spearman"], key=lambda name: abs(single["spearman"][name]))
            cells = [f"{single['cells']:,}", short(single["mean_absolute_utility"]), f"{100 * single['harmful']:.1f} %"]
            last = f"{strongest} {single['spearman'][strongest]:.2f}"
            head = ["random single cells", "mean size of their effect", "harmful", "strongest rank correlation"]
            parts.append(
                table(head, [row([*cells, last]), row(["the study: 22,176", "3.5e-4 of 1.0e-2", "44.9 %", ""])])
            )
    return "\n".join(parts)


def local(results: Results) -> str:
    """Local recovery against recovery at the output."""
    lines = []
    for model, found in results.get("repair", {}).get("grid", {}).items():
        for budget, each in found["local_and_end"].items():
            rows, cases = each["rows"], each["cases"]
            shares = [f"{100 * part['apart']:.1f} %" for part in (rows, cases)]
            cells = [number(rows["spearman"]), number(cases["spearman"]), STUDY_SPEARMAN[budget], *shares]
            counts = f"{rows['n']:,} / {cases['n']:,}"
            lines.append(row([MODELS[model], percent(float(budget)), *cells, counts]))
    head = ["", "budget", "rank correlation, means", "single cases", "the study", "local > 0 > output, means"]
    return table([*head, "single cases", "n"], lines) if lines else ""


def situations(results: Results) -> str:
    """Stale fields and seams."""
    parts = []
    for model, kinds in results.get("situations", {}).get("results", {}).items():
        for kind, questions in kinds.items():
            arms = dict.fromkeys(arm for question in questions.values() for arm in question["arms"])
            lines = []
            for arm in arms:
                each = {name: question["arms"].get(arm, {}) for name, question in questions.items()}
                known = next(found for found in each.values() if found)
                cells = [triple(found.get("recovery")) for found in each.values()]
                chances = [triple(found.get("right_preferred")) for found in each.values()]
                lines.append(
                    row(
                        [
                            arm,
                            f"{known['tokens']:,.0f}",
                            f"{known['time_over_suffix']:.2f}",
                            *cells,
                            " ".join(filter(None, chances)),
                        ]
                    )
                )
            head = [kind, "tokens", "time / suffix", *(f"recovery: {name}" for name in questions)]
            parts.append(f"**{MODELS[model]}, {kind}**\n\n" + table([*head, "right value against old"], lines))
    return "\n".join(parts)


def cost(results: Results) -> str:
    """Time and memory of the steps."""
    found = results.get("cost", {})
    if not found:
        return ""
    models = found["results"]
    steps = list(next(iter(models.values()))["processor_time"])
    lines = []
    for step in steps:
        cells = []
        for each in models.values():
            share = each["over_plain_prefill"].get(step)
            cells += [ms(each["processor_time"][step]), ratio(share) if share else "1"]
            cells.append(f"{each['peak_bytes'][step] / 2**20:,.0f}")
        lines.append(row([step.replace("_", " "), *cells]))
    head = [f"{MODELS[model]}: {what}" for model in models for what in ("ms", "/ plain prefill", "peak, MiB")]
    sizes = {
        model: [f"{what} {each[f'{what}_bytes'] / 2**20:.1f} MiB" for what in ("trace", "document")]
        for model, each in models.items()
    }
    traces = "; ".join(f"{MODELS[model]}: {', '.join(each)}" for model, each in sizes.items())
    settings = f"{found['tokens']:,} tokens, {percent(found['budget'])} of the cells"
    return table(["", *head], lines) + f"\n{settings}. {traces}.\n{machine(found['environment'])}.\n"


PARTS: dict[str, Callable[[Results], str]] = {
    each.__name__: each for each in (headline, deployable, paired, resumed, transfer, oracle, local, situations, cost)
}
PLOTS = {
    "bench:repair-headline": {
        "repair-budgets": "Recovery against budget, by geometry and model",
        "repair-masks-smollm2": "Cells that S_IR chooses in each geometry, SmolLM2-135M",
        "repair-masks-gemma3_270m": "Cells that S_IR chooses in each geometry, Gemma 3 270M",
    },
    "bench:repair-deployable": {"repair-deployable": "Recovery by recomputation against budget, by selector"},
    "bench:repair-local": {"repair-blocks": "Recovery of hidden states along the blocks"},
    "bench:repair-cost": {"repair-cost": "Recovery at 10 % against cost, by tier"},
}


def difference(series: list[list[float] | None] | None, at: int) -> str:
    """A difference with its interval, bold where that leaves out 0."""
    values = series[at] if series else None
    return f"**{triple(values)}**" if values and (values[1] > 0 or values[2] < 0) else triple(values)


def _best(rows: Iterable[dict[str, Any]], at: int) -> dict[int, str]:
    """The signal with the highest mean of each tier."""
    found: dict[int, dict[str, Any]] = {}
    for each in rows:
        if each["l2"][at] and (each["tier"] not in found or each["l2"][at] > found[each["tier"]]["l2"][at]):
            found[each["tier"]] = each
    return {tier: each["signal"] for tier, each in found.items()}


def _ordered(selectors: dict[str, Any], at: int) -> list[tuple[str, Any]]:
    return sorted(selectors.items(), key=lambda each: -(each[1]["recompute"]["l2"][at] or [-1e9])[0])
