"""What a search finds that measures each step, and what single cells are worth: `python -m repair.oracle MODEL`.

One test document. `columns` and `cells` spend the same budget of cells, 8 actions of as many cells each: 32 candidate
token columns, and 32 groups of single cells, both from the top of two signals. `calibration` compares greedy, beam and
exhaustive search over 10 columns at 2 and 4 actions. `single` measures 150 random cells one by one.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from editable_cache.repair import (
    SearchResult,
    Tier2View,
    beam_search,
    exhaustive_search,
    greedy_search,
    list_signals,
    mask_of,
    ranks,
    scores,
)
from editable_cache.repair.patch import patch_from
from repair.cases import QUERIES, TEST, Case, Setup, build, setup
from repair.commands import parser
from repair.grid import prepare
from repair.judge import Judge
from repair.progress import Kept

CANDIDATES, ACTIONS, SINGLE, FEW = 32, 8, 150, 10
PROPOSERS = ("sir", "attention_shift")
COMPARED = ("sir", "attention_shift", "kv_deviation", "inflow_accumulated", "random")


def main() -> None:
    options = parser(__doc__, "8 candidates, 2 actions, nothing kept")
    arguments = options.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    run(setup(arguments.model), arguments.quick)


def run(chosen: Setup, quick: bool) -> None:
    kept = Kept(None if quick else f"oracle_{chosen.name}")
    case = build(chosen, TEST[0], "reviewer")
    judge, view = prepare(chosen, case, QUERIES[0])
    trial = Trial(case, judge, view, *((8, 2) if quick else (CANDIDATES, ACTIONS)))
    parts = {"columns": trial.columns, "cells": trial.cells, "calibration": trial.calibration, "single": trial.single}
    for name, part in parts.items():
        if not kept.has(name):
            kept.add((name,), part())
            if quick:
                print(name, kept.items()[name,])


class Trial:
    """Searches in one case; the distance is that of the centred logits."""

    def __init__(self, case: Case, judge: Judge, view: Tier2View, candidates: int, actions: int) -> None:
        self._case, self._judge, self._view = case, judge, view
        self._count, self._actions = candidates, actions
        self._layers, self._tokens = case.trace.shape

    def columns(self) -> dict[str, Any]:
        """Greedy search over token columns, and signals at the same number of cells."""
        found = self._greedy(self._column_masks(self._count))
        return {**found, "signals": self._signals("columns", found["cells"])}

    def cells(self) -> dict[str, Any]:
        """The same with groups of single cells, each as many as a column holds."""
        order = self._proposed(self._view.prefill.shape).view(-1).sort(descending=True).indices
        masks = []
        for part in order[: self._count * self._layers].view(self._count, self._layers):
            mask = torch.zeros(self._layers * self._tokens, dtype=torch.bool)
            mask[part] = True
            masks.append(mask.view(self._layers, self._tokens))
        found = self._greedy(masks)
        return {**found, "signals": self._signals("cells", found["cells"])}

    def calibration(self) -> dict[str, Any]:
        """Three searches over the same few columns, by number of actions."""
        masks = self._column_masks(min(FEW, self._count))
        searches = {"greedy": greedy_search, "beam": beam_search, "exhaustive": exhaustive_search}
        budget = 4 * self._layers
        return {
            name: [
                {"most": most, **_plain(search(self._distance, masks, budget, max_actions=most))}
                for most in tqdm((2, 4), desc=name)
            ]
            for name, search in searches.items()
        }

    def single(self) -> dict[str, Any]:
        """Exact utility of random single cells, and each signal's rank correlation with it."""
        total = self._layers * self._tokens
        drawn = torch.randperm(total, generator=torch.Generator().manual_seed(0))[: min(SINGLE, 10 * self._count)]
        utility = []
        start = self._distance(torch.zeros(self._layers, self._tokens, dtype=torch.bool))
        for cell in tqdm(drawn.tolist(), desc="single cells"):
            mask = torch.zeros(total, dtype=torch.bool)
            mask[cell] = True
            utility.append(1 - self._distance(mask.view(self._layers, self._tokens)) / start)
        exact = torch.tensor(utility)
        own = ranks(exact) - ranks(exact).mean()
        correlations = {}
        for signal in list_signals():
            theirs = ranks(scores(signal.name, self._view).reshape(-1)[drawn])
            theirs = theirs - theirs.mean()
            norm = own.norm() * theirs.norm()
            correlations[signal.name] = round(float(own @ theirs / norm), 4) if norm > 0 else 0.0
        return {
            "cells": len(utility),
            "mean_absolute_utility": float(exact.abs().mean()),
            "harmful": float((exact < 0).double().mean()),
            "spearman": correlations,
        }

    def _proposed(self, shape: tuple[int, int]) -> Tensor:
        return torch.stack([ranks(scores(name, self._view)) for name in PROPOSERS]).amax(0).view(shape)

    def _column_masks(self, count: int) -> list[Tensor]:
        by_signal = [scores(name, self._view).sum(0).sort(descending=True).indices.tolist() for name in PROPOSERS]
        mixed = list(dict.fromkeys(token for pair in zip(*by_signal, strict=True) for token in pair))[:count]
        masks = []
        for token in mixed:
            mask = torch.zeros(self._layers, self._tokens, dtype=torch.bool)
            mask[:, token] = True
            masks.append(mask)
        return masks

    def _greedy(self, masks: list[Tensor]) -> dict[str, Any]:
        budget = self._actions * self._layers
        with tqdm(desc="greedy", unit="forward", leave=False) as bar:

            def evaluate(mask: Tensor) -> float:
                bar.update()
                return self._distance(mask)

            return _plain(greedy_search(evaluate, masks, budget)) | {"start": self._judge.start["l2"]}

    def _distance(self, mask: Tensor) -> float:
        return self._judge.start["l2"] * (1 - self._recovery(mask)["l2"])

    def _recovery(self, mask: Tensor) -> dict[str, Any]:
        repaired = self._judge.contaminated_cache.fork()
        if bool(mask.any()):
            patch_from(repaired, self._judge.clean_cache, mask, self._case.document_without)
        else:
            mask = torch.ones_like(mask)
        return self._judge.score(repaired, mask)

    def _signals(self, geometry: Any, cells: int) -> dict[str, float]:
        share = cells / (self._layers * self._tokens)
        return {
            name: round(self._recovery(mask_of(scores(name, self._view), share, geometry))["l2"], 5)
            for name in COMPARED
        }


def _plain(found: SearchResult) -> dict[str, Any]:
    return {
        "distance": found.distance,
        "cells": int(found.mask.sum()),
        "actions": list(found.actions),
        "evaluations": found.num_evaluations,
        "seconds": round(found.seconds, 1),
    }


if __name__ == "__main__":
    main()
