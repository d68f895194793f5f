"""Every signal, geometry and budget, patched from the clean cache: `python -m repair.grid MODEL [--quick]`.

One case per test document; instructions and queries take turns. What is finished is kept, so a stopped run goes on.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from editable_cache.repair import Tier2View, list_signals, mask_of, scores
from editable_cache.repair.collect import compare, probe
from editable_cache.repair.geometry import Geometry
from editable_cache.repair.patch import patch_from
from repair.cases import INSTRUCTIONS, QUERIES, TEST, Case, Setup, build, setup
from repair.commands import parser
from repair.judge import Judge
from repair.progress import Kept

BUDGETS = (0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 1.0)
GEOMETRIES: tuple[Geometry, ...] = ("cells", "prefixes", "columns", "suffixes")
MEASURES = ("l2", "kl", "agreement", "local")


def main() -> None:
    options = parser(__doc__, "one document, three signals, nothing kept")
    options.add_argument("--documents", type=int, default=len(TEST), help="how many, from the first on")
    arguments = options.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    run(setup(arguments.model), arguments.documents, quick=arguments.quick)


def run(chosen: Setup, documents: int, *, quick: bool) -> None:
    kept = Kept(None if quick else f"grid_{chosen.name}")
    names = ["sir", "window", "attention_shift"] if quick else [found.name for found in list_signals()]
    for number, document in enumerate(TEST[: 1 if quick else documents]):
        instruction, query = list(INSTRUCTIONS)[number % len(INSTRUCTIONS)], QUERIES[number % len(QUERIES)]
        missing = [name for name in names if not kept.has(document, name)]
        if not missing:
            continue
        case = build(chosen, document, instruction)
        judge, view = prepare(chosen, case, query)
        for name in tqdm(missing, desc=f"{chosen.name} {number + 1}/{len(TEST)}", unit="signal"):
            found = sweep(case, judge, view, name)
            kept.add((document, name), {"instruction": instruction, "query": query, "start": judge.start, **found})
            if quick:
                print(name, {key: value["l2"] for key, value in found["rows"].items()})


def prepare(chosen: Setup, case: Case, query: str) -> tuple[Judge, Tier2View]:
    """The judge of a case and a query, and all that signals may read of it."""
    ids = chosen.query(query)
    reading = probe(case.contaminated, ids, case.document)
    clean = compare(case.contaminated, case.clean, ids, case.document)
    return Judge(chosen, case, ids), Tier2View(case.trace, reading, clean)


def sweep(case: Case, judge: Judge, view: Tier2View, name: str) -> dict[str, Any]:
    """Recoveries of one signal: for each geometry and measure a list over the budgets (None: not to be spent)."""
    found, rows = scores(name, view), dict[str, Any]()
    masks = {
        (geometry, budget): mask_of(found, budget, geometry, from_layer=lowest(geometry, budget, found.shape[0]))
        for geometry in GEOMETRIES
        for budget in BUDGETS
    }
    distinct = {mask.numpy().tobytes(): mask for mask in masks.values()}
    known = dict(zip(distinct, scored(case, judge, list(distinct.values())), strict=True))
    for geometry in GEOMETRIES:
        series = [known[masks[geometry, budget].numpy().tobytes()] for budget in BUDGETS]
        rows[geometry] = {measure: [each[measure] for each in series] for measure in (*MEASURES, "hidden")}
    return {"tier": next(each.tier for each in list_signals() if each.name == name), "rows": rows}


def lowest(geometry: Geometry, budget: float, layers: int) -> int:
    """From which layer up suffixes are taken: the upper two thirds, but for the full budget."""
    return layers // 3 if geometry == "suffixes" and budget < 0.5 else 0


def scored(case: Case, judge: Judge, masks: list[Tensor]) -> list[dict[str, Any]]:
    """Recoveries after a patch of each mask."""
    found = []
    for mask in masks:
        cache = judge.contaminated_cache.fork()
        patch_from(cache, judge.clean_cache, mask, case.document_without)
        found.append(judge.score(cache, mask))
    return found


if __name__ == "__main__":
    main()
