"""All probes on all items: who is included, two rounds, every finished item kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from editable_cache.errors import TaskError
from editable_cache.evaluation.gate import LEAST, require_items
from editable_cache.evaluation.metrics import LEAST_GAP
from editable_cache.evaluation.probes.bench import Bench, Gathered, Kind, Probe
from editable_cache.evaluation.probes.pairs import RULE_TASKS, Situation, flipped
from editable_cache.evaluation.probes.prefill import Prefills
from editable_cache.evaluation.probes.subject import Subject
from editable_cache.evaluation.results import Row, Run
from editable_cache.evaluation.tasks import Item, build

STUDY = "mechanism"

SWEPT = "gated"
"""The task that all probes of a turned field are put to; of the others only where the note stands is asked."""

TURNED = "exchanged"
"""Items of the swept task whose rule is turned: its two values change places."""

OTHER_TASKS = ("two_hop", "free_form", "lookup")

SMALLEST_GAP = 0.01
"""Logits between two states that a model below the gate must still tell apart; recoveries divide by them."""

LEAST_ITEMS = 2
"""Included items without which a task is not probed."""


@dataclass(frozen=True)
class Inclusion:
    """Who takes part in a task.

    Attributes:
        task: its name.
        items: asked for. eligible: of these, whose prompts have equal numbers of tokens. included: decided right in
            every state, with states at least ``LEAST_GAP`` logits apart.
        accuracy: over all states of all eligible items.
        passed: whether the accuracy reaches the gate.
        left_out: reasons, with their numbers of items.
    """

    task: str
    items: int
    eligible: int
    included: int
    accuracy: float
    passed: bool
    left_out: dict[str, int]


def items_of(task: str, count: int, *, neutral: int = 10, seed: int = 0) -> list[Item]:
    """``count`` built-in items, from as many domains as there are, labels in turn."""
    if count < 1:
        raise TaskError(f"probe: expected at least one item, got {count}.")
    found = build(SWEPT if task == TURNED else task, per_domain=4 * -(-count // 40), neutral=neutral, seed=seed)
    found = turned(found) if task == TURNED else found
    numbers = sorted(found, key=lambda item: int(item.key.rsplit("/", 1)[1]))  # one of each domain, then the next
    return numbers[:count]


def turned(items: Iterable[Item]) -> list[Item]:
    """The same items for the probes that turn a rule, those whose rule can be turned, as the task ``TURNED``."""
    return [
        replace(item, task=TURNED, key=f"{TURNED}/{item.key}")
        for item in items
        if item.mode == "direct" and flipped(item) is not None
    ]


def kinds_of(task: str) -> tuple[Kind, ...]:
    """The pairs that items of a task are probed with."""
    return ("rule",) if task in RULE_TASKS else ("field",)


def probes_of(task: str, probes: Iterable[Probe], tasks: Sequence[str]) -> list[tuple[Probe, Kind]]:
    """Which probes are put to a task: all that fit, but of the built-in side tasks only ``locality``."""
    side = task in OTHER_TASKS and SWEPT in tasks
    return [
        (probe, kind)
        for kind in kinds_of(task)
        for probe in probes
        if kind in probe.kinds and (probe.name == "locality" or not side)
    ]


def run_probes(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Item],
    run: Run,
    *,
    probes: Sequence[Probe],
    model_name: str,
    any_model: bool = False,
    progress: bool = True,
    observe: Callable[[str], None] | None = None,
) -> list[Inclusion]:
    """Put items to a model and add what was measured to ``run``; finished items are not measured again.

    Rows have ``probe``, ``task``, ``domain``, ``pair`` (what differs), ``arm``, ``measure`` and ``value``, and ``x``
    where there is a count or a layer.

    Args:
        items: of one or several tasks; direct answers only.
        any_model: probe a model below the inclusion gate, too (its items that are decided wrong, too).
        observe: called with a line about each step.

    Returns:
        Who was included, by task.

    Raises:
        TaskError: without items, or if the model passes the gate on no task; says what it reached.
        UnsupportedModelError: for a model whose cache is not keys and values of every token.
    """
    require_items(items)
    subject = Subject.of(model, tokenizer)
    tasks = list(dict.fromkeys(item.task for item in items))
    found = []
    with torch.no_grad():
        for task in tasks:
            mine = [item for item in items if item.task == task]
            prefills = Prefills()
            situations = [Situation(subject, item, prefills) for item in mine]
            _include(situations, run, progress, any_model)
            inclusion = inclusion_of(task, [row for row in run.results().rows if row.get("probe") == "inclusion"])
            found.append(inclusion)
            if observe is not None:
                observe(f"{task}: {inclusion.included} of {inclusion.items} items, accuracy {inclusion.accuracy:.2f}")
            if (inclusion.passed or any_model) and inclusion.included >= LEAST_ITEMS:
                _probe(situations, run, probes_of(task, probes, tasks), progress)
    if not any((each.passed or any_model) and each.included >= LEAST_ITEMS for each in found):
        reached = "; ".join(
            f"{each.task}: accuracy {each.accuracy:.2f}, {each.included} of {each.items} items"
            + "".join(f", {count} left out ({reason})" for reason, count in each.left_out.items())
            for each in found
        )
        advice = "" if any_model else ", or probe anyway with any_model=True (--any-model)"
        gate = "" if any_model else f"an accuracy of at least {LEAST} in full prefills and "
        raise TaskError(
            f"{model_name}: expected {gate}{LEAST_ITEMS} items decided right on some task, got {reached}. Where a "
            "model keeps notes of decisions that it does not take can't be told; take another model or other items"
            f"{advice}."
        )
    return found


def inclusion_of(task: str, rows: Sequence[Row]) -> Inclusion:
    """Sum up the rows of a task."""
    mine = [row for row in rows if row["task"] == task]
    eligible = [row for row in mine if row["states"]]
    asked = sum(row["states"] for row in eligible)
    accuracy = sum(row["right"] for row in eligible) / asked if asked else 0.0
    reasons = [row["reason"] for row in mine if row["reason"]]
    left_out = {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}
    included = sum(1 for row in mine if row["included"])
    return Inclusion(task, len(mine), len(eligible), included, accuracy, accuracy >= LEAST, left_out)


def folds(benches: Sequence[Bench]) -> dict[str, int]:
    """Halves of the domains, in turn; of the items where all are of one domain."""
    domains = sorted({bench.situation.item.domain for bench in benches})
    if len(domains) > 1:
        return {b.situation.item.key: domains.index(b.situation.item.domain) % 2 for b in benches}
    return {bench.situation.item.key: number % 2 for number, bench in enumerate(benches)}


def _include(situations: Sequence[Situation], run: Run, progress: bool, any_model: bool) -> None:
    for situation in _bar(situations, progress, "full prefills"):
        item = situation.item
        key = f"inclusion/{item.key}"
        if run.has(key):
            continue
        reason = situation.reason_to_leave_out()
        row: Row = {"probe": "inclusion", "task": item.task, "domain": item.domain, "states": 0, "right": 0}
        if reason is None:
            right = [situation.right(state) for state in situation.states]
            row |= {"states": len(right), "right": sum(right)}
            if not all(right) and not any_model:
                reason = "decided wrong"
            elif situation.distance() < (least := SMALLEST_GAP if any_model else LEAST_GAP):
                reason = f"states less than {least:g} logits apart"
        run.add(key, [{**row, "included": reason is None, "reason": reason}])


def _probe(situations: Sequence[Situation], run: Run, probes: Sequence[tuple[Probe, Kind]], progress: bool) -> None:
    rows = {row["key"]: row for row in run.results().rows if row.get("probe") == "inclusion"}
    included = [each for each in situations if rows[f"inclusion/{each.item.key}"]["included"]]
    for kind in dict.fromkeys(kind for _, kind in probes):
        benches = [_bench(situation, kind, run) for situation in included]
        mine = [probe for probe, its in probes if its == kind]
        task = benches[0].task
        for bench in _bar(benches, progress, f"{task}, each item"):
            for probe in mine:
                if probe.first is not None:
                    _keep(run, probe.name, bench, probe.first, bench)
            _keep(run, "effects", bench, _effect_rows, bench, mine)
            bench.release()
        _second(run, benches, mine, progress)


def _second(run: Run, benches: Sequence[Bench], probes: Sequence[Probe], progress: bool) -> None:
    """What needs all items: prepared once, then measured item by item."""
    rounds: list[tuple[str, Callable[..., list[Row]], Any]] = []
    for probe in probes:
        name = f"{probe.name} of all"
        if probe.second is None or probe.prepare is None or all(run.has(_key(name, bench)) for bench in benches):
            continue
        rounds.append((name, probe.second, probe.prepare(Gathered(run.results().rows, benches, folds(benches)))))
    for bench in _bar(benches, progress, f"{benches[0].task}, all items"):
        for name, measure, prepared in rounds:
            _keep(run, name, bench, measure, bench, prepared)
        bench.release()


def _keep(run: Run, name: str, bench: Bench, measure: Callable[..., list[Row]], *given: Any) -> None:
    key = _key(name, bench)
    if not run.has(key):
        run.add(key, measure(*given))


def _key(name: str, bench: Bench) -> str:
    return f"{name}/{bench.situation.item.key}"


def _bench(situation: Situation, kind: Kind, run: Run) -> Bench:
    kept = [row for row in run.results().rows if row["key"] == f"effects/{situation.item.key}"]
    return Bench(situation, kind, {row["pair"]: row["effects"] for row in kept if "effects" in row})


def _effect_rows(bench: Bench, probes: Sequence[Probe]) -> list[Row]:
    """Effects of single tokens, where some probe needed them: they are what ranks tokens in the second round."""
    if bench.kind not in bench.known and not any(probe.prepare is not None for probe in probes):
        return []
    effects = bench.effects().tolist()
    pair, item = bench.pair, bench.situation.item
    facts = {"probe": "effects", "task": item.task, "domain": item.domain, "pair": bench.kind}
    return [{**facts, "first_slot": int(pair.behind[0]), "effects": effects}]


def _bar(values: Sequence[Any], progress: bool, what: str) -> Iterable[Any]:
    return tqdm(values, desc=what, unit="item", leave=False, disable=not progress)
