"""The arms of the edit frontier: what each does to a cache whose field has changed, and what it computes.

Every arm begins with the cache that has read the context with the old value and the question, and ends with one from
which the decision is read. Its cost is the number of tokens that ran through the model, the one that decides included.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from editable_cache.editable import EditableCache
from editable_cache.errors import TaskError
from editable_cache.evaluation.asking import CONTEXT, Asking, Decision
from editable_cache.evaluation.effects import deviation_order, effect_order

ERRATA = {
    "erratum": "[STATE UPDATE] {name} has just changed to {value}; this overrides any earlier value. Apply the current "
    "value.\n",
    "bare": "{name}: {value}\n",
    "tagged": "[STATE UPDATE] {name}: {value}\n",
    "confrontational": "[STATE UPDATE] Disregard your earlier conclusion, it is wrong. {name} is {value}; re-evaluate "
    "everything from the start.\n",
}
"""Wordings of the correcting line: the study's template (appendix B), and the others of its ablation (figure 3d)."""

CACHEBLEND_SHARE = 0.15


@dataclass(frozen=True)
class Ends:
    """The decisions between which recovery is measured."""

    stale: Decision
    exact: Decision


@dataclass
class Case:
    """An item prefilled with its old value, and what arms share.

    Attributes:
        asked: holds context (old value) and question.
        exact: the same with the new value, prefilled whole.
        erratum: wording of the correcting line.
        seconds: what the prefill of ``exact`` took.
    """

    asking: Asking
    asked: EditableCache
    exact: EditableCache
    erratum: str = ERRATA["erratum"]
    seconds: float = 0.0
    _orders: dict[str, Tensor] = field(default_factory=dict)
    _ends: Ends | None = None

    @classmethod
    def of(cls, asking: Asking, *, erratum: str | None = None) -> Case:
        """Prefill the item with both values."""
        item = asking.item
        asked, started = asking.ask(asking.held(item.old)), time.perf_counter()
        exact = asking.ask(asking.held(item.new))
        return cls(asking, asked, exact, erratum or ERRATA["erratum"], time.perf_counter() - started)

    def ends(self) -> Ends:
        """What is decided if nothing is done, and if everything is computed again; asked once."""
        if self._ends is None:
            self._ends = Ends(self.asking.decide(self.asked), self.asking.decide(self.exact))
        return self._ends

    def refreshed(self) -> EditableCache:
        """A fork of ``asked`` with the new value in place and everything behind it stale."""
        fork = self.asked.fork()
        fork.refresh_field(self.asking.item.field, self.asking.item.new)
        return fork

    def behind(self, cache: EditableCache) -> slice:
        """Slots behind the field, without the last token, which every arm computes."""
        return slice(cache.ledger.field(self.asking.item.field).spans[-1][1], len(cache.ledger) - 1)

    def order(self, name: str) -> Tensor:
        """Slots behind the field, those that matter most first, by ``"effect"`` or ``"deviation"``; computed once."""
        if name not in self._orders:
            refreshed = self.refreshed()
            found = effect_order if name == "effect" else deviation_order
            self._orders[name] = found(self.asking, refreshed, self.exact, self.behind(refreshed))
        return self._orders[name]


@dataclass(frozen=True)
class Edited:
    """What an arm leaves: a cache to decide from, tokens computed, and seconds, reading not included."""

    cache: EditableCache
    tokens: int
    seconds: float


Act = Callable[[Case], tuple[EditableCache, int]]


def arm(name: str) -> Callable[[Case], Edited]:
    """The arm of that name.

    ``stale``, ``in_place``, ``suffix``, ``erratum``, ``field+erratum``, ``hoist``, ``full``, ``cacheblend@15%``; with
    ``K`` tokens behind the field beside the field itself: ``selective@K`` (those of the largest causal effect, which
    needs the exact cache: the study's), ``repair@K`` (chosen by the library with the question, nothing exact needed),
    ``window@K`` (the next ones), ``random@K``; ``erratum:WORDING`` for the other wordings.

    Raises:
        TaskError: for an unknown name.
    """
    kind, _, count = name.partition("@")
    kind, colon, wording = kind.partition(":")
    if colon:
        if kind not in ("erratum", "field+erratum") or wording not in ERRATA or count:
            raise TaskError(f"Arm {name!r}: expected a wording among {sorted(ERRATA)}.")
        return _timed(lambda case: _correct(case, kind, ERRATA[wording]))
    if kind == "cacheblend" and re.fullmatch(r"([1-9]\d?|100)%", count, re.ASCII):
        return _timed(lambda case: _chosen(case, case.order("deviation"), share=int(count[:-1]) / 100))
    if kind in _COUNTED and re.fullmatch(r"[1-9]\d*", count, re.ASCII):
        return _timed(lambda case: _COUNTED[kind](case, int(count)))
    if name == "full":
        return lambda case: Edited(case.exact.fork(), len(case.exact.ledger), case.seconds)
    if name in _PLAIN:
        return _timed(_PLAIN[name])
    known = [*_PLAIN, "full", *(f"{counted}@K" for counted in _COUNTED), "cacheblend@P%", "erratum:WORDING"]
    raise TaskError(f"Unknown arm {name!r}; expected one of {', '.join(known)}.")


def chooses_tokens(name: str) -> bool:
    """Whether an arm computes some tokens again and leaves those behind them, which a recurrent state doesn't allow."""
    return name.partition("@")[0] in (*_COUNTED, "cacheblend", "in_place") or name.startswith("field+erratum")


def _timed(act: Act) -> Callable[[Case], Edited]:
    def run(case: Case) -> Edited:
        started = time.perf_counter()
        cache, tokens = act(case)
        return Edited(cache, tokens, time.perf_counter() - started)

    return run


def _stale(case: Case) -> tuple[EditableCache, int]:
    return case.asked.fork(), 1


def _in_place(case: Case) -> tuple[EditableCache, int]:
    fork = case.asked.fork()
    outcome = fork.edit(case.asking.item.field, case.asking.item.new, method="in_place")
    return fork, outcome.tokens_computed + 1


def _suffix(case: Case) -> tuple[EditableCache, int]:
    fork = case.asked.fork()
    return fork, fork.edit(case.asking.item.field, case.asking.item.new, method="suffix").tokens_computed


def _correct(case: Case, method: str, template: str) -> tuple[EditableCache, int]:
    """The line goes behind the context and before the question, which is read again."""
    fork = case.asking.unasked(case.asked)
    name, value = case.asking.item.field, case.asking.item.new
    template = template.replace("{{", "{").replace("}}", "}")  # an edit takes other braces as they are
    if method == "erratum":
        outcome = fork.edit(name, value, method="erratum", template=template)
    else:
        outcome = fork.edit(name, value, method="field+erratum", template=template)
    case.asking.ask(fork)
    return fork, outcome.tokens_computed + len(case.asking.question_ids)


def _hoist(case: Case) -> tuple[EditableCache, int]:
    """The prompt was written so that the field stands at the end: only its line and the question are read anew."""
    item, cache = case.asking.item, EditableCache(case.asking.model, tokenizer=case.asking.tokenizer)
    holder = "{" + item.field + "}"
    lines = case.asking.template.splitlines(keepends=True)
    line = next((text for text in lines if holder in text.replace("{{", "")), "")
    rest = "".join(text for text in lines if text is not line)
    cache.append(rest, name=CONTEXT, fields={})
    static = len(cache.ledger)
    cache.append(line, name="hoisted", fields={item.field: item.new})
    case.asking.ask(cache)
    return cache, len(cache.ledger) - static


def _chosen(
    case: Case, order: Tensor, *, count: int | None = None, share: float | None = None
) -> tuple[EditableCache, int]:
    """The field and the first tokens of an order are computed again."""
    fork = case.refreshed()
    field_tokens = sum(high - low for low, high in fork.ledger.field(case.asking.item.field).spans)
    wanted = round(share * len(fork.ledger)) if share is not None else count or 0
    slots = order[:wanted]
    mask = torch.zeros(len(fork.ledger), dtype=torch.bool)
    mask[slots] = True
    tokens = fork.recompute(mask).tokens_computed if len(slots) else 0
    return fork, field_tokens + tokens + 1


def _selective(case: Case, count: int) -> tuple[EditableCache, int]:
    return _chosen(case, case.order("effect"), count=count)


def _window(case: Case, count: int) -> tuple[EditableCache, int]:
    behind = case.behind(case.refreshed())
    return _chosen(case, torch.arange(behind.start, behind.stop), count=count)


def _random(case: Case, count: int) -> tuple[EditableCache, int]:
    behind = case.behind(case.refreshed())
    generator = torch.Generator().manual_seed(len(case.asking.question_ids) * 1000 + behind.start)
    return _chosen(case, behind.start + torch.randperm(behind.stop - behind.start, generator=generator), count=count)


def _repair(case: Case, count: int) -> tuple[EditableCache, int]:
    """The library's own choice for the question; the question is in the cache already, so its tokens may be chosen."""
    fork = case.refreshed()
    field_tokens = sum(high - low for low, high in fork.ledger.field(case.asking.item.field).spans)
    behind = case.behind(fork)
    span = (behind.start, behind.stop)
    budget = min(1.0, (count + 0.01) / (behind.stop - behind.start))
    outcome = fork.repair(budget, query=case.asking.question_ids, document=span)
    return fork, field_tokens + outcome.tokens_run + 1


_PLAIN: dict[str, Act] = {
    "stale": _stale,
    "in_place": _in_place,
    "suffix": _suffix,
    "erratum": lambda case: _correct(case, "erratum", case.erratum),
    "field+erratum": lambda case: _correct(case, "field+erratum", case.erratum),
    "hoist": _hoist,
}
_COUNTED: dict[str, Callable[[Case, int], tuple[EditableCache, int]]] = {
    "selective": _selective,
    "repair": _repair,
    "window": _window,
    "random": _random,
}

FRONTIER: Sequence[str] = (
    "stale",
    "in_place",
    *(f"selective@{count}" for count in (1, 2, 4, 8, 16, 32, 64)),
    "cacheblend@15%",
    "suffix",
    "erratum",
    "field+erratum",
    "hoist",
    "full",
)
"""Arms of the study's table 6 and figures 2 and 5."""
