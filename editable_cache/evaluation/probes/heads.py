"""Which attention heads read the notes into the decision? (The study's figure 15a and table 5.)

A head's output at the last token is replaced by what it is when the other prompt is read. Heads are ranked on the items
of other domains, and on the same item as the study does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from editable_cache.evaluation.probes.bench import DIGITS, DRAWS, Bench, Gathered, Probe, mean
from editable_cache.evaluation.results import Row

NAME = "heads"

COUNTS = (1, 3, 5, 8, 12)
"""Heads patched together, as in the study."""


def measure(bench: Bench) -> list[Row]:
    """Recovery from each head alone (``effects``, layer by layer), from the top k of this item, and from all."""
    subject = bench.situation.subject
    count = subject.num_layers * subject.num_heads
    single = _masks(bench, [torch.tensor([index]) for index in range(count)])
    effects = _recoveries(bench, single)
    order = torch.tensor(effects, dtype=torch.float64).argsort(descending=True, stable=True)
    tops = _recoveries(bench, _masks(bench, [order[:k] for k in COUNTS if k <= count]))
    everything = _recoveries(bench, _masks(bench, [order]))[0]
    rows = [bench.row(NAME, "top_same_item", value, x=k) for k, value in zip(COUNTS, tops, strict=False)]
    rows.append(bench.row(NAME, "all_heads", everything))
    item = bench.situation.item
    kept = [round(effect, DIGITS) for effect in effects]
    facts = {"probe": NAME, "task": item.task, "domain": item.domain, "pair": bench.kind, "arm": "single"}
    return [*rows, {**facts, "measure": "effects", "effects": kept, "num_heads": subject.num_heads}]


def prepare(gathered: Gathered) -> dict[str, list[int]]:
    """For each item, all heads by their mean effect on the other fold's items."""
    found: dict[int, list[list[float]]] = {}
    for row in gathered.rows:
        if row.get("probe") == NAME and "effects" in row:
            key = str(row["key"]).split("/", 1)[1]
            if key in gathered.folds:
                found.setdefault(gathered.folds[key], []).append(row["effects"])
    orders = {
        fold: torch.tensor(each, dtype=torch.float64).mean(0).argsort(descending=True, stable=True).tolist()
        for fold, each in found.items()
    }
    return {key: orders[1 - fold] for key, fold in gathered.folds.items() if 1 - fold in orders}


def validate(bench: Bench, orders: dict[str, list[int]]) -> list[Row]:
    """Recovery from the k heads that mattered most in other domains, and from k random heads."""
    order = orders.get(bench.situation.item.key)
    if order is None:
        return []
    counts, rng = [k for k in COUNTS if k <= len(order)], bench.generator(NAME)
    drawn = [torch.tensor(rng.sample(range(len(order)), k)) for k in counts for _ in range(DRAWS)]
    found = _recoveries(bench, _masks(bench, [*(torch.tensor(order[:k]) for k in counts), *drawn]))
    rows = []
    for place, k in enumerate(counts):
        random = found[len(counts) + place * DRAWS : len(counts) + (place + 1) * DRAWS]
        rows.append(bench.row(NAME, "top_of_other_domains", found[place], x=k))
        rows.append(bench.row(NAME, "random", mean(random), x=k))
    return rows


def _masks(bench: Bench, chosen: list[Tensor]) -> Tensor:
    """bool ``[num_choices, num_layers, num_heads]`` of heads given as layer * num_heads + head."""
    subject = bench.situation.subject
    masks = torch.zeros((len(chosen), subject.num_layers * subject.num_heads), dtype=torch.bool)
    for row, heads in enumerate(chosen):
        masks[row, heads] = True
    return masks.reshape(len(chosen), subject.num_layers, subject.num_heads)


def _recoveries(bench: Bench, masks: Tensor) -> list[float]:
    pair = bench.pair
    sources = bench.head_outputs(pair.other)
    gaps = pair.gap(bench.patcher(pair.base).heads(sources, masks))
    return [pair.recovery(gap) for gap in gaps.tolist()]


PROBE = Probe(NAME, "which heads read the notes into the decision?", ("field", "rule"), measure, prepare, validate)
