"""How many tokens behind the field must be renewed, and in which layers? (The study's figure 3b.)"""

from __future__ import annotations

import torch
from torch import Tensor

from editable_cache.evaluation.probes.bench import Bench, Gathered, Probe, best_roles, role_effects, slots_of
from editable_cache.evaluation.probes.pairs import Pair
from editable_cache.evaluation.results import Row

NAME = "suffix"

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

MAPPED_ROLES = 16
"""Tokens of the map of tokens and layers."""

MAPPED_ITEMS = 8
"""Items whose map is measured; the picture is their mean."""


def measure(bench: Bench) -> list[Row]:
    """Recovery against the number of patched tokens, in three orders, and against the patched layers."""
    pair, behind = bench.pair, bench.pair.behind
    orders = {"from_field": behind, "from_end": behind.flip(0), "by_effect": bench.ranked()}
    named, masks = [], []
    for arm, order in orders.items():
        for count in (count for count in COUNTS if count <= len(order)):
            named.append((arm, count))
            masks.append(pair.mask(order[:count]))
    found = bench.recoveries(pair, masks)
    rows = [bench.row(NAME, arm, value, x=count) for (arm, count), value in zip(named, found, strict=True)]
    return rows + _layers(bench, pair)


def _layers(bench: Bench, pair: Pair) -> list[Row]:
    layers = torch.arange(len(pair.base.cells))
    splits = {
        "layer": layers[:, None] == layers[None],
        "layers_up_to": layers[None] <= layers[:, None],
        "layers_from": layers[None] >= layers[:, None],
    }
    rows = []
    for arm, chosen in splits.items():
        masks = chosen[:, :, None] & pair.mask(pair.behind)[None, None]
        found = bench.recoveries(pair, [*masks])
        rows += [bench.row(NAME, arm, value, x=layer) for layer, value in enumerate(found)]
    return rows


def prepare(gathered: Gathered) -> tuple[list[str], set[str]]:
    """The roles of the map, and the keys of the items that are mapped."""
    keys = [bench.situation.item.key for bench in gathered.benches]
    return best_roles(role_effects(gathered), MAPPED_ROLES), set(keys[:: max(1, len(keys) // MAPPED_ITEMS)])


def map_cells(bench: Bench, chosen: tuple[list[str], set[str]]) -> list[Row]:
    """Recovery from patching one token at one layer, for the tokens that matter most."""
    roles, keys = chosen
    if bench.situation.item.key not in keys:
        return []
    pair, layers = bench.pair, len(bench.pair.base.cells)
    rows = []
    for role in roles:
        slots = slots_of(pair, [role])
        if not len(slots):
            continue
        masks: Tensor = torch.zeros((layers, layers, pair.base.length - 1), dtype=torch.bool)
        masks[torch.arange(layers), torch.arange(layers), int(slots[0])] = True
        found = bench.recoveries(pair, [*masks])
        rows += [
            {**bench.row(NAME, role, value, measure="cell", x=layer), "text": pair.base.tokens[int(slots[0])].text}
            for layer, value in enumerate(found)
        ]
    return rows


PROBE = Probe(
    NAME, "how many tokens behind the field carry the decision, in which layers?", ("field",), measure, prepare,
    map_cells,
)  # fmt: skip
