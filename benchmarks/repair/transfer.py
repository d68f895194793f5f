"""Selection without the request: `python -m repair.transfer MODEL [--quick]`.

A mask of columns is chosen with one query, with a bank of generic probes, with the document's own last tokens, or with
no query at all; it is computed for real and judged on each of four requests. Matched is the mask chosen with the very
request that it is judged on.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from editable_cache.repair import ProbeTrace, Tier0View, Tier1View, mask_of, pooled, scores
from editable_cache.repair.collect import probe
from editable_cache.repair.patch import recompute_without
from repair.cases import INSTRUCTIONS, QUERIES, TEST, Case, Setup, build, setup
from repair.commands import parser
from repair.judge import Judge
from repair.progress import Kept

BUDGETS = (0.05, 0.1)
BANK = (
    "Summarize the text.",
    "What are the main points, and who is involved?",
    "List the facts, names and numbers that the text gives.",
    "What follows from it?",
)
"""Generic probes; none of them is a request that is judged."""

OWN_TOKENS = 32


def main() -> None:
    options = parser(__doc__, "one document, one budget, nothing kept")
    options.add_argument("--documents", type=int, default=len(TEST), help="how many, from the first on")
    arguments = options.parse_args()
    warnings.simplefilter("ignore")
    os.environ["TQDM_DISABLE"] = "1"
    torch.set_num_threads(arguments.threads)
    run(setup(arguments.model), arguments.documents, arguments.quick)


def run(chosen: Setup, documents: int, quick: bool) -> None:
    kept = Kept(None if quick else f"transfer_{chosen.name}")
    for number, document in enumerate(tqdm(TEST[: 1 if quick else documents], unit="document", disable=False)):
        if kept.has(document):
            continue
        instruction = list(INSTRUCTIONS)[number % len(INSTRUCTIONS)]
        case = build(chosen, document, instruction)
        judges = [Judge(chosen, case, chosen.query(query)) for query in QUERIES]
        found: dict[str, Any] = {"instruction": instruction, "budgets": {}}
        for budget in BUDGETS[1:] if quick else BUDGETS:
            found["budgets"][str(budget)] = {
                name: judged(case, judges, mask_of(scored, budget, "columns"))
                for name, scored in selections(chosen, case).items()
            }
        kept.add((document,), found)
        if quick:
            print(found)


def selections(chosen: Setup, case: Case) -> dict[str, Tensor]:
    """Scores by name: one for each request, and those that know none."""

    def read(text: str) -> ProbeTrace:
        return probe(case.contaminated, chosen.query(text), case.document)

    def chosen_by(reading: ProbeTrace) -> Tensor:
        return scores("sir_columns", Tier1View(case.trace, reading))

    bank = [read(text) for text in BANK]
    own = case.contaminated.token_ids.reshape(-1)[case.document[1] - OWN_TOKENS : case.document[1]]
    return {
        **{f"query {number}": chosen_by(read(query)) for number, query in enumerate(QUERIES)},
        "bank, mean": chosen_by(pooled(bank)),
        "bank, no trace": scores("near_and_read", Tier1View(case.trace, pooled(bank))),
        "bank, max": chosen_by(pooled(bank, "max")),
        "one generic probe": chosen_by(bank[0]),
        "own last tokens": chosen_by(probe(case.contaminated, own, case.document)),
        **{name: scores(name, Tier0View(case.trace)) for name in ("inflow_accumulated", "written_and_read", "window")},
    }


def judged(case: Case, judges: list[Judge], mask: Tensor) -> list[float]:
    """Recovery by recomputation on each request."""
    computed = case.contaminated.fork()
    recompute_without(computed, mask, case.document, case.contamination)
    rest = case.without(computed)
    return [round(judge.score(rest, mask)["l2"], 5) for judge in judges]


if __name__ == "__main__":
    main()
