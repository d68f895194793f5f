"""What a probe works with on one item, and how it reports what it measured."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from editable_cache.evaluation.probes.pairs import Pair, Situation
from editable_cache.evaluation.probes.patching import Patcher
from editable_cache.evaluation.probes.prefill import Prefilled
from editable_cache.evaluation.results import Row

Kind = Literal["field", "rule"]
"""What differs between the two prompts of a pair: the field's value, or the rule's words."""

COUNTS = (1, 2, 4, 8, 16, 32)
"""Numbers of positions, as in the study's table 4 and further."""

DRAWS = 5
"""Random choices of each size; their mean is one measurement."""

KEPT_PATCHERS = 2

DIGITS = 6


@dataclass(frozen=True)
class Probe:
    """One question put to every item.

    Attributes:
        name: what the command line calls it.
        question: one line.
        kinds: the pairs that it can work on.
        first: measures one item by itself.
        prepare: what the second round needs from the rows of all items' first round and from the items themselves.
        second: measures one item with that.
    """

    name: str
    question: str
    kinds: tuple[Kind, ...]
    first: Callable[[Bench], list[Row]] | None = None
    prepare: Callable[[Gathered], Any] | None = None
    second: Callable[[Bench, Any], list[Row]] | None = None


@dataclass(frozen=True)
class Gathered:
    """What a second round is prepared from.

    Attributes:
        rows: of every probe's first round on this task.
        benches: of the items, in the same order in every run.
        folds: of each item's key, 0 or 1. What is chosen on one fold is judged on the other; a domain is never split.
    """

    rows: Sequence[Row]
    benches: Sequence[Bench]
    folds: Mapping[str, int]


@dataclass(eq=False)
class Bench:
    """One item on the bench.

    Attributes:
        kind: the pair that the probes of this round look at.
        known: effects that were measured before, by pair.
    """

    situation: Situation
    kind: Kind
    known: dict[str, list[float]] = field(default_factory=dict)
    _roles: tuple[list[str], set[str]] | None = None
    _patchers: list[tuple[Prefilled, Patcher]] = field(default_factory=list)

    @property
    def pair(self) -> Pair:
        """The pair of this kind."""
        return self.situation.field_pair if self.kind == "field" else self.situation.rule_pair

    @property
    def task(self) -> str:
        """The item's task."""
        return self.situation.item.task

    @property
    def roles(self) -> list[str]:
        """Role of each slot behind what differs."""
        return self._named()[0]

    @property
    def anchored(self) -> set[str]:
        """Those of them whose residual stream is kept."""
        return self._named()[1]

    def _named(self) -> tuple[list[str], set[str]]:
        if self._roles is None:  # kept: rounds over all items need roles, not prompts
            pair = self.pair
            roles = {slot: pair.base.tokens[slot].role for slot in pair.behind.tolist()}
            anchored = {roles[slot] for slot in pair.base.anchors.tolist() if slot in roles}
            self._roles = list(roles.values()), anchored
        return self._roles

    def generator(self, purpose: str) -> random.Random:
        """Random choices that are the same in every run."""
        return random.Random(f"{self.situation.item.key} {purpose}")

    def patcher(self, base: Prefilled) -> Patcher:
        """The patcher of a prompt."""
        for prompt, patcher in self._patchers:
            if prompt is base:
                return patcher
        made = Patcher(self.situation.subject, base)
        self._patchers = [*self._patchers[1 - KEPT_PATCHERS :], (base, made)]
        return made

    def head_outputs(self, prompt: Prefilled) -> list[Tensor]:
        """What enters each layer's output projection when the last token of a prompt is read."""
        return Patcher(self.situation.subject, prompt, most_rows=1).head_outputs()

    def release(self) -> None:
        """Give back the memory of all patchers."""
        self._patchers = []

    def recoveries(self, pair: Pair, masks: Sequence[Tensor]) -> list[float]:
        """Recovery of each variant of ``pair.base`` that has the other's cells where a mask is set."""
        return [pair.recovery(gap) for gap in self.patcher(pair.base).gaps(pair, torch.stack([*masks])).tolist()]

    def effects(self) -> Tensor:
        """Recovery from patching each slot behind what differs alone, float64 ``[m]`` (the study, section 3)."""
        if self.kind not in self.known:
            pair = self.pair
            single = torch.zeros((len(pair.behind), pair.base.length - 1), dtype=torch.bool)
            single[torch.arange(len(pair.behind)), pair.behind] = True
            self.known[self.kind] = [round(value, DIGITS) for value in self.recoveries(pair, [*single])]
        return torch.tensor(self.known[self.kind], dtype=torch.float64)

    def ranked(self) -> Tensor:
        """Slots behind what differs by their effect, largest first."""
        return self.pair.behind[self.effects().argsort(descending=True, stable=True)]

    def drawn(self, count: int, purpose: str) -> list[Tensor]:
        """``DRAWS`` random choices of ``count`` slots behind what differs."""
        rng, slots = self.generator(f"{purpose} {count}"), self.pair.behind.tolist()
        return [torch.tensor(sorted(rng.sample(slots, min(count, len(slots))))) for _ in range(DRAWS)]

    def row(self, probe: str, arm: str, value: float, *, measure: str = "recovery", x: float | None = None) -> Row:
        """One measurement."""
        item = self.situation.item
        found: Row = {"probe": probe, "task": item.task, "domain": item.domain, "pair": self.kind, "arm": arm}
        found |= {"measure": measure, "value": round(float(value), DIGITS)}
        return found if x is None else {**found, "x": x}


def mean(values: Sequence[float]) -> float:
    """Mean of at least one value."""
    return sum(values) / len(values)


def role_effects(gathered: Gathered, fold: int | None = None) -> dict[str, float]:
    """Mean effect of the tokens of each role; of the items of one fold only, if given.

    Roles that fewer than half of these items have are left out.
    """
    sums: dict[str, list[float]] = {}
    benches = [b for b in gathered.benches if fold is None or gathered.folds[b.situation.item.key] == fold]
    for bench in benches:
        for role, effect in zip(bench.roles, bench.effects().tolist(), strict=True):
            sums.setdefault(role, []).append(effect)
    return {role: mean(found) for role, found in sums.items() if 2 * len(found) >= len(benches)}


def streams_of(gathered: Gathered, roles: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """For each item's key and each role, residual streams ``[num_states, num_layers + 1, hidden_size]`` of its states.

    Roles that a state lacks are left out of that item.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for bench in gathered.benches:
        prompts = [bench.situation.prompt(state) for state in bench.situation.states]
        mine = found.setdefault(bench.situation.item.key, {})
        for role in roles:
            anchors = [prompt.anchor(role) for prompt in prompts]
            if None not in anchors:
                mine[role] = torch.stack([p.stream[:, at] for p, at in zip(prompts, anchors, strict=True)])
    return found


def best_roles(effects: Mapping[str, float], count: int) -> list[str]:
    """The roles with the largest effects, largest first."""
    return sorted(effects, key=lambda role: -effects[role])[:count]


def slots_of(pair: Pair, roles: Sequence[str]) -> Tensor:
    """Slots behind what differs that have one of these roles, in the order of the roles."""
    by_role = {pair.base.tokens[slot].role: slot for slot in pair.behind.tolist()}
    return torch.tensor([by_role[role] for role in roles if role in by_role], dtype=torch.long)
