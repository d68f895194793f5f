"""What a repair costs: `python -m repair.cost [--quick]` writes `results/repair_cost.json`.

Time and memory of tracing, choosing and computing 10 % of the cells of 2,048 tokens, against a plain prefill of those
tokens, in one process. Seconds are processor time of one thread: what the work costs, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections.abc import Callable
from typing import Any

import timing
import torch
from compose import _peak_memory
from torch import Tensor
from tqdm import tqdm

from editable_cache import EditableCache
from editable_cache.repair import Tier1View, mask_of, scores
from editable_cache.repair.collect import probe
from editable_cache.repair.patch import recompute_without
from repair.cases import QUERIES, TEST, Case, Setup, build, setup

MODELS = ("smollm2", "gemma3_270m")
TOKENS, BUDGET = 2048, 0.1


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="256 tokens, few rounds, no file")
    quick = arguments.parse_args().quick
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    found = {}
    for name in tqdm(MODELS, unit="model"):
        found[name] = one_model(setup(name), 256 if quick else TOKENS, 3 if quick else 5)
        print(f"\n{name}", *(f"  {key}: {value}" for key, value in found[name].items()), sep="\n")
    if not quick:
        print(timing.write("repair_cost", {"tokens": TOKENS, "budget": BUDGET, "results": found}))


def one_model(chosen: Setup, tokens: int, rounds: int) -> dict[str, Any]:
    """Verified first, then timed, then weighed."""
    case = build(chosen, TEST[0], "reviewer", tokens)
    query = chosen.query(QUERIES[0])
    start, stop = case.document
    assert stop - start == tokens, (start, stop)
    error = gap_of(repaired(case, 1.0), case)
    control = gap_of(case.contaminated, case)
    assert error < 1e-4 < 1e-2 < control, (error, control)
    variants, fresh = _variants(chosen, case, query)
    seconds = timing.paired(
        timing.with_progress(variants, chosen.name), rounds=rounds, prepare=fresh, clock=time.process_time
    )
    result: dict[str, Any] = {
        "query_tokens": len(query),
        "error_of_full_repair": float(f"{error:.3g}"),
        "error_of_no_repair": float(f"{control:.3g}"),
        "processor_time": {name: timing.milliseconds(seconds[name]) for name in variants},
        "over_plain_prefill": {
            name: timing.ratios(seconds[name], seconds["plain_prefill"]) for name in variants if name != "plain_prefill"
        },
    }
    result["peak_bytes"] = {}
    for name, run in variants.items():
        fresh()
        gc.collect()
        result["peak_bytes"][name] = int(_peak_memory(run, 1))
    trace = [value for value in vars(case.trace).values() if isinstance(value, Tensor)]
    cells = [tensor for layer in case.contaminated.editable_layers for tensor in layer.view().values()]
    result["trace_bytes"] = sum(value.nbytes for value in trace)
    result["document_bytes"] = sum(tensor[..., start:stop, :].nbytes for tensor in cells)
    return result


def repaired(case: Case, budget: float) -> EditableCache:
    """A repaired fork of a case's cache."""
    cache = case.contaminated.fork()
    cache.repair(budget, contamination=case.contamination)
    return cache


def gap_of(cache: EditableCache, case: Case) -> float:
    """Largest relative difference of the document's keys or values, of any layer, to the clean cells."""
    worst, span = 0.0, slice(*case.document)
    for mine, clean in zip(cache.editable_layers, case.clean.editable_layers, strict=True):
        for name, theirs in clean.view().items():
            wanted = theirs[..., span, :]
            worst = max(worst, float((mine.view()[name][..., span, :] - wanted).norm() / wanted.norm()))
    return worst


def _variants(chosen: Setup, case: Case, query: Tensor) -> tuple[dict[str, Callable[[], Any]], Callable[[], None]]:
    """What is timed, and what gives each of them caches of its own.

    A fork shares its cells until they are written, so what repairs also pays for a copy of all of them.
    """
    ids = case.contaminated.ledger.ids[0, slice(*case.document)]
    base = EditableCache(chosen.model, tokenizer=chosen.tokenizer)
    base.append(case.contaminated.ledger.ids[0, : case.document[0]])
    reading = probe(case.contaminated, query, case.document)
    mask = mask_of(scores("sir", Tier1View(case.trace, reading)), BUDGET, "columns")
    state: dict[str, EditableCache] = {}

    def fresh() -> None:
        state.clear()
        gc.collect()
        state["base"], state["cache"] = base.fork(), case.contaminated.fork()

    def traced() -> None:
        with state["base"].tracing(case.contamination):
            state["base"].append(ids)

    span = {"contamination": case.contamination}
    return {
        "plain_prefill": lambda: state["base"].append(ids),
        "traced_prefill": traced,
        "probe": lambda: probe(state["cache"], query, case.document),
        "scores_and_mask": lambda: mask_of(scores("sir", Tier1View(case.trace, reading)), BUDGET, "columns"),
        "recompute": lambda: recompute_without(state["cache"], mask, case.document, case.contamination),
        "repair_with_query": lambda: state["cache"].repair(BUDGET, query=query, **span),
        "repair_without_query": lambda: state["cache"].repair(BUDGET, **span),
    }, fresh


if __name__ == "__main__":
    main()
