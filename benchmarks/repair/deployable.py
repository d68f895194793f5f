"""Real recomputation of what each selector chooses: `python -m repair.deployable MODEL [--quick]`.

Every test document behind one instruction, with ``--rounds`` behind the others too. The chosen tokens run through the
model with the instruction hidden from them, and see all other tokens as they stand: what a server can do. The cost is
the share of the document's (token, layer) pairs that run. Beside it the same masks patched from the clean cache.
CacheBlend's criterion and the other signals of tier 2 are handed the clean cells for nothing.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from editable_cache.repair import mask_of, scores
from editable_cache.repair.patch import patch_from, recompute_without
from repair.cases import INSTRUCTIONS, QUERIES, TEST, Case, Setup, build, setup
from repair.commands import parser
from repair.grid import prepare
from repair.judge import Judge
from repair.progress import Kept

BUDGETS = (0.01, 0.02, 0.05, 0.1, 0.2)
SIGNALS = (
    "sir_columns",
    "column_ranks",
    "near_and_read",
    "sir",
    "cacheblend",
    "kv_deviation",
    "attention_shift",
    "inflow_accumulated",
    "readout",
    "window",
    "boundary",
    "even_columns",
    "random",
)


def main() -> None:
    options = parser(__doc__, "one case, two signals, nothing kept")
    options.add_argument("--signals", nargs="*", default=SIGNALS)
    options.add_argument("--rounds", type=int, default=1, help="instructions for each document, 1 to 3")
    arguments = options.parse_args()
    warnings.simplefilter("ignore")
    os.environ["TQDM_DISABLE"] = "1"  # of the library's own forwards; the bar of the cases stays
    torch.set_num_threads(arguments.threads)
    names = arguments.signals[:2] if arguments.quick else arguments.signals
    run(setup(arguments.model), names, arguments.rounds, arguments.quick)


def run(chosen: Setup, names: Sequence[str], rounds: int, quick: bool) -> None:
    kept = Kept(None if quick else f"deployable_{chosen.name}")
    turns = [(turn, number) for turn in range(rounds) for number in range(len(TEST))]
    for turn, number in tqdm(turns[:1] if quick else turns, unit="case", disable=False):
        document, instruction = TEST[number], list(INSTRUCTIONS)[(number + turn) % len(INSTRUCTIONS)]
        missing = [name for name in (*names, "everything") if not kept.has(document, instruction, name)]
        if not missing:
            continue
        case = build(chosen, document, instruction)
        query = QUERIES[(number + turn) % len(QUERIES)]
        judge, view = prepare(chosen, case, query)
        for name in missing:
            whole = torch.ones(case.trace.shape, dtype=torch.bool)
            masks = (
                {1.0: whole}
                if name == "everything"
                else {budget: mask_of(scores(name, view), budget, "columns") for budget in BUDGETS}
            )
            found = {str(budget): both(case, judge, mask) for budget, mask in masks.items()}
            kept.add((document, instruction, name), {"query": query, "start": judge.start, "budgets": found})
            if quick:
                print(name, {budget: (each["recompute"]["l2"], each["patch"]["l2"]) for budget, each in found.items()})


def both(case: Case, judge: Judge, mask: Tensor) -> dict[str, Any]:
    """Recoveries of one mask by recomputation and by patch, with the tokens and seconds of the recomputation."""
    started = time.perf_counter()
    computed = case.contaminated.fork()
    outcome = recompute_without(computed, mask, case.document, case.contamination)
    seconds = time.perf_counter() - started
    patched = judge.contaminated_cache.fork()
    patch_from(patched, judge.clean_cache, mask, case.document_without)
    return {
        "recompute": judge.score(case.without(computed), mask),
        "patch": judge.score(patched, mask),
        "tokens": outcome.tokens_computed,
        "seconds": round(seconds, 3),
    }


if __name__ == "__main__":
    main()
