"""Does attention or the MLP write the note? (The study's figure 15c and table 5.)"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from editable_cache.evaluation.probes.bench import Bench, Probe
from editable_cache.evaluation.probes.onward import continued_heads
from editable_cache.evaluation.probes.pairs import Pair
from editable_cache.evaluation.results import Row

NAME = "writing"

HEADS = (1, 3, 5, 8, 12)
"""Heads patched together, as for reading."""


def measure(bench: Bench) -> list[Row]:
    """Share of attention in how the residual stream of the item's top aggregator differs between the two prompts.

    The rule's words differ and the aggregator's own token does not, so the difference of its stream behind layer l is
    exactly the sum of what the attentions and MLPs of layers 0 to l added. The share is that of the attentions along
    this difference; 1 and below 0 are possible where the two work against each other. ``x`` is the layer, and the row
    without one is the share at the layer whose cell of this token has the largest effect.
    """
    pair = bench.pair
    subject = bench.situation.subject
    if not subject.writers:
        return []
    anchor = top_anchor(bench)
    stream = (pair.other.stream[:, anchor] - pair.base.stream[:, anchor]).double()
    attention = (pair.other.attention[:, anchor] - pair.base.attention[:, anchor]).double().cumsum(0)
    norms = stream[1:].square().sum(-1)
    shares = (attention * stream[1:]).sum(-1) / norms.clamp_min(torch.finfo(torch.float64).tiny)
    rows = [
        bench.row(NAME, "attention", float(share), measure="share", x=layer)
        for layer, (share, norm) in enumerate(zip(shares, norms, strict=True))
        if norm > 0
    ]
    layer = _layer_of_effect(bench, pair, int(pair.base.anchors[anchor]))
    rows.append(bench.row(NAME, "attention_below_top_cell", float(shares[max(layer - 1, 0)]), measure="share"))
    rows.append(bench.row(NAME, "top_cell", layer / subject.num_layers, measure="depth"))
    return rows + _write_heads(bench, pair, anchor, stream[max(layer, 1)])


def _write_heads(bench: Bench, pair: Pair, anchor: int, written: Tensor) -> list[Row]:
    """Recovery from the k heads at the aggregator that add most along what was written there, and from k random ones.

    Their outputs are those of the other prompt, and everything behind the aggregator is read anew.
    """
    subject = bench.situation.subject
    change = (pair.other.heads[:, anchor] - pair.base.heads[:, anchor]).double()
    added = []
    for layer, projection in enumerate(subject.projections):
        each = torch.zeros((subject.num_heads, subject.num_heads, subject.head_dim), dtype=torch.float64)
        each[torch.arange(subject.num_heads), torch.arange(subject.num_heads)] = change[layer].unflatten(
            0, (subject.num_heads, subject.head_dim)
        )
        rows = torch.cat((each.flatten(1), torch.zeros_like(each.flatten(1)[:1])))
        out = _through(projection, rows)
        added.append((out[:-1] - out[-1:]) @ written)
    order = torch.cat(added).argsort(descending=True, stable=True)
    counts = [count for count in HEADS if count <= len(order)]
    rng = bench.generator(NAME)
    chosen = [order[:count] for count in counts]
    chosen += [torch.tensor(rng.sample(range(len(order)), count)) for count in counts]
    masks = torch.zeros((len(chosen), len(order)), dtype=torch.bool)
    for row, heads in enumerate(chosen):
        masks[row, heads] = True
    masks = masks.reshape(len(chosen), subject.num_layers, subject.num_heads)
    slot = int(pair.base.anchors[anchor])
    gaps = pair.gap(continued_heads(subject, pair.base, slot, pair.other.heads[:, anchor], masks)).tolist()
    named = [("write_top", count) for count in counts] + [("write_random", count) for count in counts]
    return [bench.row(NAME, arm, pair.recovery(gap), x=k) for (arm, k), gap in zip(named, gaps, strict=True)]


def _through(projection: nn.Module, rows: Tensor) -> Tensor:
    """``rows [n, num_heads * head_dim]`` through an output projection, float64."""
    weight = next(projection.parameters())
    with torch.no_grad():
        found: Tensor = projection(rows.to(weight)).double().cpu()
    return found


def top_anchor(bench: Bench) -> int:
    """Which anchor behind what differs has the largest effect on this item."""
    pair = bench.pair
    effects = dict(zip(pair.behind.tolist(), bench.effects().tolist(), strict=True))
    slots = pair.base.anchors.tolist()
    return max((index for index, slot in enumerate(slots) if slot in effects), key=lambda index: effects[slots[index]])


def _layer_of_effect(bench: Bench, pair: Pair, slot: int) -> int:
    """The layer at which this token's cell alone recovers most."""
    layers = len(pair.base.cells)
    masks = torch.zeros((layers, layers, pair.base.length - 1), dtype=torch.bool)
    masks[torch.arange(layers), torch.arange(layers), slot] = True
    return int(torch.tensor(bench.recoveries(pair, [*masks])).argmax())


PROBE = Probe(NAME, "does attention write the note, or the MLP?", ("rule",), measure)
