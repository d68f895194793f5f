"""Columns from a layer up, resumed from a stored residual stream: `python -m repair.resumed MODEL [--quick]`.

A try at a geometry that is cheaper than whole columns. The residual stream that entered layer l of the contaminated
prefill is taken as it stands, and only the layers above run again: (L - l) / L of the cost of a column, so the same
cost buys more tokens. Layer 0 is the whole column. On two calibration documents; all rows of a budget cost the same.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from editable_cache.repair import Tier1View, mask_of, scores
from editable_cache.repair.collect import probe
from editable_cache.repair.patch import recompute_without
from repair.cases import CALIBRATION, INSTRUCTIONS, QUERIES, Case, Setup, build, setup
from repair.commands import parser
from repair.judge import Judge
from repair.progress import Kept

BUDGETS = (0.05, 0.1, 0.2)
PARTS = (0, 1 / 6, 1 / 3, 1 / 2, 2 / 3)
"""Where the model is resumed, as a share of its layers."""

SIGNALS = ("sir_columns", "inflow_accumulated")


def main() -> None:
    options = parser(__doc__, "one document, one signal, one budget, nothing kept")
    arguments = options.parse_args()
    warnings.simplefilter("ignore")
    os.environ["TQDM_DISABLE"] = "1"
    torch.set_num_threads(arguments.threads)
    run(setup(arguments.model), arguments.quick)


def run(chosen: Setup, quick: bool) -> None:
    kept = Kept(None if quick else f"resumed_{chosen.name}")
    for number, document in enumerate(tqdm(CALIBRATION[:1] if quick else CALIBRATION[:2], disable=False)):
        if kept.has(document):
            continue
        case = build(chosen, document, list(INSTRUCTIONS)[number % len(INSTRUCTIONS)])
        query = chosen.query(QUERIES[number])
        judge = Judge(chosen, case, query)
        view = Tier1View(case.trace, probe(case.contaminated, query, case.document))
        stream = residual_streams(chosen.model, case)
        rows = []
        for signal in SIGNALS[:1] if quick else SIGNALS:
            for part in PARTS:
                for budget in BUDGETS[1:2] if quick else BUDGETS:
                    rows.append(resumed(chosen.model, case, judge, scores(signal, view), part, budget, stream))
                    rows[-1]["signal"] = signal
        kept.add((document,), {"rows": rows})
        if quick:
            print(*rows, sep="\n")


def resumed(
    model: Any, case: Case, judge: Judge, scored: Tensor, part: float, budget: float, stream: list[Tensor]
) -> dict[str, Any]:
    """Recovery after a recomputation that begins at a layer."""
    layers = scored.shape[0]
    lowest = round(part * layers)
    mask = mask_of(scored, budget, "suffixes", from_layer=lowest)
    computed = case.contaminated.fork()
    with entering(model, lowest, stream[lowest][mask.any(0)] if lowest else None):
        recompute_without(computed, mask, case.document, case.contamination)
    found = judge.score(case.without(computed), mask)
    return {
        "from_layer": lowest,
        "budget": budget,
        "tokens": int(mask.any(0).sum()),
        "l2": round(found["l2"], 5),
        "kl": round(found["kl"], 5),
    }


@contextmanager
def entering(model: Any, layer_idx: int, stream: Tensor | None) -> Iterator[None]:
    """The chosen tokens enter a layer with what was stored, in the order in which they run."""
    if stream is None:
        yield
        return
    taken = 0

    def replace(_layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        nonlocal taken
        given = args[0] if args else kwargs["hidden_states"]
        taken += given.shape[1]
        rows = stream[taken - given.shape[1] : taken][None]
        return ((rows, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": rows})

    handle = model.get_decoder().layers[layer_idx].register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    if taken != len(stream):
        raise RuntimeError(f"Expected {len(stream)} tokens to enter layer {layer_idx}, got {taken}.")


def residual_streams(model: Any, case: Case) -> list[Tensor]:
    """What entered each layer for the document's tokens in the contaminated prefill: ``[num_tokens, hidden_size]``."""
    ids = case.contaminated.token_ids.reshape(1, -1)
    with torch.no_grad():
        found = model(input_ids=ids, output_hidden_states=True, logits_to_keep=1, use_cache=False).hidden_states
    return [state[0, case.document[0] : case.document[1]].clone() for state in found]


if __name__ == "__main__":
    main()
