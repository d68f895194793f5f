"""A long trajectory: the field changes every turn, and one cache evolves (the study's appendix G and figure 23).

Every turn brings a correcting line, a short exchange, and a question that is asked on a fork, so that it leaves nothing
behind. Two ways are measured. ``append_only``: nothing but the lines is added, and the cache is then by construction
what a prefill of its ids gives. ``field+erratum``: the field is refreshed in place as well, and everything behind it
stays as it was computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from editable_cache.editable import EditableCache
from editable_cache.errors import LedgerError, TaskError
from editable_cache.evaluation.arms import ERRATA
from editable_cache.evaluation.asking import Asking, Decision
from editable_cache.evaluation.gate import require_items
from editable_cache.evaluation.results import Row, Run
from editable_cache.evaluation.statistics import Interval, bootstrap
from editable_cache.evaluation.studies.compose import compared
from editable_cache.evaluation.tasks import Item

TURNS = 28
EXCHANGE = "user: Is there any news?\nassistant: I am looking into it.\n"
APPEND_ONLY, REFRESHED = "append_only", "field+erratum"


def run_horizon(
    model: nn.Module,
    tokenizer: Any,
    items: Sequence[Item],
    run: Run,
    *,
    turns: int = TURNS,
    exchange: str = EXCHANGE,
    erratum: str | None = None,
    model_name: str = "the model",
) -> None:
    """Let each item's field change ``turns`` times; for each turn a row of ``field+erratum`` and of ``append_only``.

    A row has ``arm``, ``turn`` from 1, ``domain``, ``length`` of the cache and, against a prefill of the same ids,
    ``agrees``, ``correct`` by the value of that turn, ``full_correct``, ``cosine``, ``kl``, ``top``, ``gap``,
    ``full_gap``. ``append_only`` is compared with one forward of all its ids, and also has ``error``, the largest
    difference of logits, and ``control``, the same if the field had another value in the beginning, which must be
    large. ``field+erratum`` is compared with a prefill of the ids as they stand after the refresh, which for the value
    of the beginning is ``append_only`` and for the other a cache like it.

    Args:
        exchange: what is said between two changes.
        erratum: wording of the correcting line, with ``{name}`` and ``{value}``.

    Raises:
        TaskError: for no item, fewer than three turns, or items with a chain of thought.
    """
    require_items(items)
    if turns < 3:
        raise TaskError(f"horizon: expected at least 3 turns, got {turns}.")
    for item in tqdm(items, desc=f"{model_name}, horizon", unit="item"):
        if run.has(item.key):
            continue
        if item.mode != "direct":
            raise TaskError(f"Item {item.key}: expected mode 'direct', whose decision has logits, got {item.mode!r}.")
        with torch.no_grad():
            rows = _trajectory(Asking(model, tokenizer, item), turns, exchange, erratum or ERRATA["erratum"])
        run.add(item.key, rows)


def _trajectory(asking: Asking, turns: int, exchange: str, template: str) -> list[Row]:
    item = asking.item
    appended, other, refreshed = asking.held(item.old), asking.held(item.new), asking.held(item.old)
    prefills = {item.old: appended, item.new: other}
    rows = []
    for number in range(1, turns + 1):
        value = item.new if number % 2 else item.old
        appended.edit(item.field, value, method="erratum", template=template)
        refreshed.edit(item.field, value, method="field+erratum", template=template)
        line = refreshed.ledger.segments[-1]
        other.append(refreshed.token_ids[0, line.start : line.stop])
        for cache in (appended, other, refreshed):
            cache.append(exchange)
        if not torch.equal(refreshed.token_ids, prefills[value].token_ids):
            raise LedgerError(f"Item {item.key}, turn {number}: expected the same ids in both caches, got others.")
        asked = {name: asking.ask(cache.fork()) for name, cache in (("mine", refreshed), *prefills.items())}
        found = {name: asking.decide(cache) for name, cache in asked.items()}
        shared: Row = {"turn": number, "task": item.task, "domain": item.domain, "length": len(refreshed.ledger)}
        mine = shared | {"arm": REFRESHED} | compared(found[value], found["mine"], value)
        once = _once(asking, asked[item.old])
        plain = shared | {"arm": APPEND_ONLY} | compared(once, found[item.old], value)
        plain |= {"error": _largest(once, found[item.old]), "control": _largest(once, found[item.new])}
        rows += [mine, plain]
    return rows


def _once(asking: Asking, cache: EditableCache) -> Decision:
    """What is decided behind one forward of all ids of ``cache``."""
    fresh = EditableCache(asking.model, tokenizer=asking.tokenizer)
    fresh.append(cache.token_ids[0])
    return asking.decide(fresh)


def _largest(first: Decision, second: Decision) -> float:
    """Of the differences of their logits."""
    assert first.logits is not None
    assert second.logits is not None
    return float((first.logits - second.logits).abs().max())


def trend(rows: Sequence[Row], measure: str) -> dict[str, Interval]:
    """How a measure goes with the turns: least-squares ``slope`` for each turn, mean of the ``first`` and of the
    ``last`` third of the turns, and their ``change``, each of one trajectory at a time, intervals drawn by domains.

    Args:
        rows: of ``run_horizon``; those without the measure are left out.

    Raises:
        TaskError: if none has it.
    """
    held = [row for row in rows if row.get(measure) is not None]
    paths: dict[str, list[Row]] = {}
    for row in held:
        paths.setdefault(row["key"], []).append(row)
    found: dict[str, list[float]] = {"slope": [], "first": [], "last": [], "change": []}
    for path in paths.values():
        turns = np.asarray([row["turn"] for row in path], dtype=np.float64)
        values = np.asarray([float(row[measure]) for row in path])
        order = turns.argsort()
        turns, values = turns[order], values[order]
        third = max(1, len(values) // 3)
        first, last = float(values[:third].mean()), float(values[-third:].mean())
        centred = turns - turns.mean()
        slope = float((centred * values).sum() / (centred**2).sum()) if len(values) > 1 else 0.0
        for name, value in (("slope", slope), ("first", first), ("last", last), ("change", last - first)):
            found[name].append(value)
    clusters = [path[0]["domain"] for path in paths.values()]
    if not paths:
        raise TaskError(f"trend: expected rows with {measure!r}, got none.")
    return {name: bootstrap(values, clusters) for name, values in found.items()}
