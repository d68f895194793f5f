"""Is it a few tokens that carry the decision? (The study's table 4, right.)

The study ranks positions on the item that they are then patched in, which finds the best of that item by construction.
Here they are also ranked by their role on the items of other domains.
"""

from __future__ import annotations

from editable_cache.evaluation.probes.bench import (
    COUNTS,
    Bench,
    Gathered,
    Probe,
    best_roles,
    mean,
    role_effects,
    slots_of,
)
from editable_cache.evaluation.results import Row

NAME = "specificity"

RANKED_ROLES = 12
"""Roles whose mean effects are reported."""


def measure(bench: Bench) -> list[Row]:
    """Recovery from the top k positions of this item, and from k random ones."""
    pair, order = bench.pair, bench.ranked()
    rows = []
    for count in (count for count in COUNTS if count <= len(order)):
        drawn = [pair.mask(slots) for slots in bench.drawn(count, NAME)]
        top, *random = bench.recoveries(pair, [pair.mask(order[:count]), *drawn])
        rows += [bench.row(NAME, "top", top, x=count), bench.row(NAME, "random", mean(random), x=count)]
    return rows


def prepare(gathered: Gathered) -> dict[str, list[str]]:
    """For each item, all roles by their mean effect in the other fold's domains; and the best of all under ``""``."""
    ranked = {fold: best_roles(role_effects(gathered, fold), 10**6) for fold in set(gathered.folds.values())}
    orders = {key: ranked[1 - fold] for key, fold in gathered.folds.items() if 1 - fold in ranked}
    return {**orders, "": best_roles(role_effects(gathered), RANKED_ROLES)}


def validate(bench: Bench, orders: dict[str, list[str]]) -> list[Row]:
    """Recovery from the k positions whose roles had the largest effects in other domains; effects of the best roles."""
    pair = bench.pair
    effects = dict(zip(pair.behind.tolist(), bench.effects().tolist(), strict=True))
    rows = []
    for role in orders[""]:
        for slot in slots_of(pair, [role]).tolist():
            row = bench.row(NAME, role, effects[slot], measure="effect")
            rows.append({**row, "text": pair.base.tokens[slot].text})
    if bench.situation.item.key in orders:
        slots = slots_of(pair, orders[bench.situation.item.key])
        counts = [count for count in COUNTS if count <= len(slots)]
        found = bench.recoveries(pair, [pair.mask(slots[:count]) for count in counts])
        rows += [bench.row(NAME, "top_of_other_domains", value, x=k) for k, value in zip(counts, found, strict=True)]
    return rows


PROBE = Probe(NAME, "do a few tokens carry it, against as many random ones?", ("field", "rule"), measure, prepare,
              validate)  # fmt: skip
