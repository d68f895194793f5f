"""The inclusion gate: only a model that takes the decisions by itself can tell what an edit does to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from tqdm import tqdm

from editable_cache.errors import TaskError
from editable_cache.evaluation.arms import Case
from editable_cache.evaluation.asking import Asking
from editable_cache.evaluation.results import Run
from editable_cache.evaluation.tasks import Item

LEAST = 0.8
"""Accuracy of a full prefill that a model needs (the study's inclusion gate, appendix H)."""


@dataclass(frozen=True)
class Gate:
    """Accuracies of plain full prefills.

    Attributes:
        old, new: with the old and with the new value in place.
        update: with the old value in place and a plain line behind the context that says the new one.
        n: items.
    """

    old: float
    new: float
    update: float
    n: int

    @property
    def passed(self) -> bool:
        """Whether the model decides by the field."""
        return min(self.old, self.new) >= LEAST

    @property
    def understands_updates(self) -> bool:
        """Whether a later line overrides the field in a plain prefill."""
        return self.update >= LEAST


def measure_gate(
    model: nn.Module, tokenizer: Any, items: Sequence[Item], run: Run, *, erratum: str | None = None
) -> Gate:
    """Ask every item three times, without any edit; kept in ``run`` under ``gate/KEY``."""
    require_items(items)
    for item in tqdm(items, desc="inclusion gate", unit="item", leave=False):
        if not run.has(f"gate/{item.key}"):
            add_gate(run, Case.of(Asking(model, tokenizer, item), erratum=erratum))
    return gate_of(run, items)


def add_gate(run: Run, case: Case) -> None:
    """The gate's row of one item, unless it is there."""
    asking, item = case.asking, case.asking.item
    if run.has(f"gate/{item.key}"):
        return
    told = asking.unasked(case.asked)
    told.append(case.erratum.format(name=item.field, value=item.new))
    ends = case.ends()
    run.add(
        f"gate/{item.key}",
        [
            {
                "arm": "gate",
                "task": item.task,
                "domain": item.domain,
                "mode": item.mode,
                "old": ends.stale.value == item.old,
                "new": ends.exact.value == item.new,
                "update": asking.decide(asking.ask(told)).value == item.new,
            }
        ],
    )


def gate_of(run: Run, items: Sequence[Item]) -> Gate:
    """Accuracies over these items, which must have their rows."""
    keys = {f"gate/{item.key}" for item in items}
    rows = [row for row in run.results().rows if row["key"] in keys]
    old, new, update = (sum(row[name] for row in rows) / len(rows) for name in ("old", "new", "update"))
    return Gate(old, new, update, len(rows))


def require_gate(gate: Gate, model: str) -> None:
    """Refuse a model below the gate.

    Raises:
        TaskError: with what it reached.
    """
    if not gate.passed:
        raise TaskError(
            f"{model}: expected an accuracy of at least {LEAST} in full prefills (old and new value), got "
            f"{gate.old:.2f} and {gate.new:.2f} on {gate.n} items. What edits do to decisions that a model does "
            "not take can't be told; take another model or other items, or measure anyway with any_model=True "
            "(--any-model)."
        )


def require_items(items: Sequence[Item]) -> None:
    """Refuse an empty list, and items of one key.

    Raises:
        TaskError: if there is none, or one is there twice.
    """
    if not items:
        raise TaskError("Expected at least one item, got none.")
    keys = [item.key for item in items]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise TaskError(f"Expected items whose keys differ, got {twice!r} twice.")
