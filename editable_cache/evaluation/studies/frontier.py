"""The edit frontier: what each arm recovers, and what it computes (the study's table 6, figures 2 and 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from editable_cache.errors import TaskError
from editable_cache.evaluation.arms import FRONTIER, Case, arm
from editable_cache.evaluation.asking import Asking
from editable_cache.evaluation.gate import Gate, add_gate, gate_of, measure_gate, require_gate, require_items
from editable_cache.evaluation.metrics import cosine, divergence, p_correct, recovery
from editable_cache.evaluation.results import Row, Run
from editable_cache.evaluation.tasks import Item


def run_frontier(
    model: nn.Module,
    tokenizer: Any,
    items: Sequence[Item],
    run: Run,
    *,
    arms: Sequence[str] = FRONTIER,
    erratum: str | None = None,
    any_model: bool = False,
    model_name: str = "the model",
    label: str = "",
) -> Gate:
    """Put every item through every arm; one row each, kept as soon as an item is finished.

    A row has ``arm``, ``task``, ``domain``, ``mode``; ``correct`` (the new value's answer), ``agrees`` (the same answer
    as a full prefill), ``tokens`` that ran through the model, ``share`` of the whole prompt, ``seconds`` (of the first
    arm that takes an order of tokens the ranking too, which later ones share); in direct mode ``gap`` in logits,
    ``p_correct`` among the two answers, ``recovery`` (null where the ends do not differ), ``cosine`` and ``kl`` against
    the full prefill; with a chain of thought ``generated`` tokens.

    Args:
        erratum: wording of the correcting line, with ``{name}`` and ``{value}``.
        label: kept in each row as ``set``; the same item may be measured under several.
        any_model: measure a model below the inclusion gate too.

    Raises:
        TaskError: for no item, an unknown arm, arms that rank tokens by their effect for items with a chain of
            thought, or a model below the gate.
    """
    require_items(items)
    require_direct(items, arms)
    acts = {name: arm(name) for name in arms}
    if not any_model:
        require_gate(measure_gate(model, tokenizer, items, run, erratum=erratum), model_name)
    for item in tqdm(items, desc=f"{model_name}, frontier", unit="item"):
        key = f"{label}/{item.key}" if label else item.key
        if run.has(key) and run.has(f"gate/{item.key}"):
            continue
        with torch.no_grad():
            case = Case.of(Asking(model, tokenizer, item), erratum=erratum)
            add_gate(run, case)
            run.add(key, [{"set": label, **_row(case, name, act)} for name, act in acts.items()])
    return gate_of(run, items)


def usual_arms(items: Sequence[Item]) -> list[str]:
    """The arms of the frontier that can be put to all of these items."""
    return [name for name in FRONTIER if not (_ranks(name) and any(item.mode == "cot" for item in items))]


def require_direct(items: Sequence[Item], arms: Sequence[str]) -> None:
    """Refuse arms that rank tokens by their effect on the deciding token, where an item has none before its chain.

    Raises:
        TaskError: with the arms and an item.
    """
    ranked, chained = [*filter(_ranks, arms)], [item.key for item in items if item.mode == "cot"]
    if ranked and chained:
        raise TaskError(
            f"Arms {', '.join(ranked)}: expected items in direct mode, whose deciding token ranks the others, got "
            f"{len(chained)} with a chain of thought, such as {chained[0]}; leave out these arms or these items "
            "(--mode direct)."
        )


def _ranks(name: str) -> bool:
    return name.startswith("selective@")


def _row(case: Case, name: str, act: Any) -> Row:
    asking, item = case.asking, case.asking.item
    edited, ends = act(case), case.ends()
    found = asking.decide(edited.cache)
    row: Row = {
        "arm": name,
        "task": item.task,
        "domain": item.domain,
        "mode": item.mode,
        "correct": found.value == item.new,
        "agrees": found.value == ends.exact.value,
        "tokens": edited.tokens,
        "share": round(edited.tokens / len(case.exact.ledger), 5),
        "seconds": round(edited.seconds, 4),
    }
    if found.gap is None or found.logits is None:
        return row | {"generated": found.tokens}
    assert ends.stale.gap is not None
    assert ends.exact.gap is not None
    assert ends.exact.logits is not None
    share = recovery(found.gap, ends.stale.gap, ends.exact.gap)
    return row | {
        "gap": round(found.gap, 4),
        "p_correct": round(p_correct(found.gap), 5),
        "recovery": None if share is None else round(share, 5),
        "cosine": round(cosine(ends.exact.logits, found.logits), 6),
        "kl": round(divergence(ends.exact.logits, found.logits), 6),
    }
