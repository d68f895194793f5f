"""The edit frontier: what each arm recovers, and what it computes (the study's table 6, figures 2 and 5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from editable_cache.editable import EditableCache
from editable_cache.errors import ResultsError, TaskError
from editable_cache.evaluation.arms import FRONTIER, Case, arm, chooses_tokens
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
        TaskError: for no item or one that is there twice, no arm, an unknown one, arms that these items or this model
            don't allow (``require_possible``), or a model below the gate.
        ResultsError: if ``run`` holds an item, but not all of these arms.
    """
    require_items(items)
    _require_arms(arms)
    require_possible(arms, items, model)
    acts = {name: arm(name) for name in arms}
    if not any_model:
        require_gate(measure_gate(model, tokenizer, items, run, erratum=erratum), model_name)
    for item in tqdm(items, desc=f"{model_name}, frontier", unit="item"):
        key = f"{label}/{item.key}" if label else item.key
        if run.has(key) and run.has(f"gate/{item.key}"):
            _require_measured(run, key, arms)
            continue
        with torch.no_grad():
            case = Case.of(Asking(model, tokenizer, item), erratum=erratum)
            add_gate(run, case)
            run.add(key, [{"set": label, **_row(case, name, act)} for name, act in acts.items()])
    return gate_of(run, items)


def _require_arms(arms: Sequence[str]) -> None:
    if not arms or len(set(arms)) != len(arms):
        raise TaskError(f"Arms: expected at least one, and each once, got {', '.join(arms) or 'none'}.")


def _require_measured(run: Run, key: str, arms: Sequence[str]) -> None:
    held = [row.get("arm") for row in run.rows_of(key)]
    if sorted(map(str, held)) != sorted(arms):
        raise ResultsError(
            f"Results hold {key} with the arms {', '.join(map(str, held))}, expected {', '.join(arms)}; write to "
            "another file, or ask for the same arms."
        )


def possible(arms: Sequence[str], items: Sequence[Item], model: nn.Module | None = None) -> list[str]:
    """Those of the arms that can be put to all of these items and to the model: see ``require_possible``."""
    left_out = {name for some, _ in _impossible(arms, items, model) for name in some}
    return [name for name in arms if name not in left_out]


def require_possible(arms: Sequence[str], items: Sequence[Item], model: nn.Module | None = None) -> None:
    """Refuse arms that rank tokens by their effect on the deciding token, where an item has none before its chain, and
    arms that compute some tokens and leave those behind them, where a model's layers hold a recurrent state: an edit
    there computes everything from the field on, as ``suffix`` does.

    Raises:
        TaskError: with the arms, why, and what to do.
    """
    for some, why in _impossible(arms, items, model):
        raise TaskError(f"Arms {', '.join(some)}: {why}")


def _impossible(arms: Sequence[str], items: Sequence[Item], model: nn.Module | None) -> Iterator[tuple[list[str], str]]:
    ranked = [name for name in arms if name.startswith("selective@")]
    chained = [item.key for item in items if item.mode == "cot"]
    if ranked and chained:
        yield (
            ranked,
            "expected items in direct mode, whose deciding token ranks the others, got "
            f"{len(chained)} with a chain of thought, such as {chained[0]}; leave out these arms or these items "
            "(--mode direct).",
        )
    states = [] if model is None else EditableCache(model).state_layers
    choosing = [*filter(chooses_tokens, arms)]
    if choosing and states:
        yield (
            choosing,
            f"expected a model whose layers all keep cells per token, got {len(states)} layers with a recurrent state, "
            "which stands for all tokens, so that an edit computes all behind it (suffix); leave out these arms.",
        )


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
