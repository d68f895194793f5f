"""Is there one direction that carries the conclusion from domain to domain? (The study's figure 15b.)"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from editable_cache.evaluation.probes.bench import Bench, Gathered, Probe, best_roles, role_effects, streams_of
from editable_cache.evaluation.probes.labels import label
from editable_cache.evaluation.probes.onward import Edit, continued
from editable_cache.evaluation.probes.subject import Subject
from editable_cache.evaluation.results import Row

NAME = "direction"

DEPTHS = (0.2, 0.35, 0.5, 0.65, 0.8)
"""Where the residual stream is changed, as a share of the blocks."""

RANDOM = 2
"""Random directions; their mean is one measurement."""


def prepare(gathered: Gathered) -> dict[str, tuple[str, dict[int, Tensor]]]:
    """For each item a token, chosen by its effect on the other fold's items, and its direction at each depth.

    The direction is the difference of means of the two conclusions (``clause``) over all items of other domains.
    """
    if not gathered.benches:
        return {}
    layers = _depths(gathered.benches[0].situation.subject)
    anchored = {role for bench in gathered.benches for role in bench.anchored}
    roles: dict[int, str] = {}
    for fold in set(gathered.folds.values()):
        effects = role_effects(gathered, 1 - fold)
        best = best_roles({role: effect for role, effect in effects.items() if role in anchored}, 1)
        if best:
            roles[fold] = best[0]
    streams = streams_of(gathered, sorted(set(roles.values())))
    chosen: dict[str, tuple[str, dict[int, Tensor]]] = {}
    for bench in gathered.benches:
        item = bench.situation.item
        role = roles.get(gathered.folds[item.key])
        others = [other for other in gathered.benches if other.situation.item.domain != item.domain]
        found = {} if role is None else _difference(others, streams, role, layers)
        if role is not None and found:
            chosen[item.key] = (role, found)
    return chosen


def measure(bench: Bench, chosen: dict[str, tuple[str, dict[int, Tensor]]]) -> list[Row]:
    """Recovery from moving the token's stream along the direction as far as the other prompt's stands, against the
    same length along random directions, and against the whole difference.
    """
    item, pair = bench.situation.item, bench.pair
    if item.key not in chosen:
        return []
    role, directions = chosen[item.key]
    anchor = pair.base.anchor(role)
    if anchor is None or int(pair.base.anchors[anchor]) not in pair.behind.tolist():
        return []
    rng = torch.Generator().manual_seed(bench.generator(NAME).randrange(2**31))
    edits, names = [], []
    for layer, direction in directions.items():
        whole = (pair.other.stream[layer, anchor] - pair.base.stream[layer, anchor]).double()
        along = (whole @ direction) * direction
        randoms = torch.randn((RANDOM, len(whole)), generator=rng, dtype=torch.float64)
        randoms = randoms / randoms.norm(dim=-1, keepdim=True) * along.norm()
        edits += [Edit(layer, whole), Edit(layer, along), *(Edit(layer, each) for each in randoms)]
        names += [("whole", layer), ("direction", layer), *[("random", layer)] * RANDOM]
    logits = continued(bench.situation.subject, pair.base, int(pair.base.anchors[anchor]), edits)
    sums: dict[tuple[str, int], list[float]] = {}
    for name, gap in zip(names, pair.gap(logits).tolist(), strict=True):
        sums.setdefault(name, []).append(pair.recovery(gap))
    return [bench.row(NAME, arm, sum(v) / len(v), x=layer) for (arm, layer), v in sums.items()]


def _depths(subject: Subject) -> list[int]:
    return sorted({min(round(depth * subject.num_layers), subject.num_layers - 1) for depth in DEPTHS})


def _difference(
    benches: Sequence[Bench], streams: dict[str, dict[str, Tensor]], role: str, layers: Sequence[int]
) -> dict[int, Tensor]:
    """Unit directions float64 ``[hidden_size]`` by layer."""
    sides: dict[bool, list[Tensor]] = {True: [], False: []}
    for bench in benches:
        held = streams[bench.situation.item.key].get(role)
        for number, state in enumerate(bench.situation.states):
            said = label(bench.situation, state, "clause")
            if held is not None and said is not None:
                sides[said].append(held[number, list(layers)].double())
    if not sides[True] or not sides[False]:
        return {}
    difference = torch.stack(sides[True]).mean(0) - torch.stack(sides[False]).mean(0)
    return {layer: each / each.norm().clamp_min(1e-12) for layer, each in zip(layers, difference, strict=True)}


PROBE = Probe(NAME, "does one direction carry the conclusion across domains?", ("rule",), None, prepare, measure)
