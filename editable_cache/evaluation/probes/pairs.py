"""Pairs of prompts that differ in a few tokens and in their right answer: what every probe patches between."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from editable_cache.errors import TaskError
from editable_cache.evaluation.asking import Asking
from editable_cache.evaluation.probes.prefill import Prefilled, Prefills, prefilled
from editable_cache.evaluation.probes.subject import Subject
from editable_cache.evaluation.probes.tokens import answer_name
from editable_cache.evaluation.tasks import Item

State = Literal["old", "new", "flipped old", "flipped new"]
"""A prompt of an item: which value stands in the field, and whether the rule's values are the other way round."""

RULE_TASKS = ("trigger", "exchanged")
"""Tasks whose rule is turned: one value in it becomes the other, or its two values change places."""


@dataclass(frozen=True, eq=False)
class Pair:
    """Two prefills of equal length with different answers.

    Attributes:
        base, other: what is patched, and where cells are taken from.
        base_id, other_id: first token of the right answer under each.
        changed: int64 ``[c]``, slots of what differs, ascending; elsewhere both have the same ids.
    """

    base: Prefilled
    other: Prefilled
    base_id: int
    other_id: int
    changed: Tensor

    @property
    def behind(self) -> Tensor:
        """Slots behind the first of what differs, without that itself and the last token: where notes may stand.

        int64 ``[m]``.
        """
        found = torch.arange(int(self.changed[0]) + 1, self.base.length - 1)
        return found[~torch.isin(found, self.changed)]

    def gap(self, logits: Tensor) -> Tensor:
        """Logit of the other prompt's answer minus that of the base's, float64 ``[...]`` of ``[..., vocab]``."""
        return (logits[..., self.other_id] - logits[..., self.base_id]).double()

    @property
    def ends(self) -> tuple[float, float]:
        """Gap of the base and of the other prompt."""
        return float(self.gap(self.base.logits)), float(self.gap(self.other.logits))

    def recovery(self, gap: float) -> float:
        """Share of the way from base to other (the study's decision recovery), however close they are."""
        base, other = self.ends
        return (gap - base) / (other - base)

    def mask(self, slots: Tensor) -> Tensor:
        """bool ``[n - 1]``, set at ``slots``."""
        found = torch.zeros(self.base.length - 1, dtype=torch.bool)
        found[slots] = True
        return found


class Situation:
    """One item and its prompts, read when they are asked for.

    Args:
        prefills: where prompts are kept.
    """

    def __init__(self, subject: Subject, item: Item, prefills: Prefills) -> None:
        self.subject, self.item, self._prefills = subject, item, prefills
        self.flipped_item = flipped(item) if item.task in RULE_TASKS else None

    @property
    def states(self) -> tuple[State, ...]:
        """The prompts that there are: two, or four if the rule is turned, too."""
        return ("old", "new") if self.flipped_item is None else ("old", "new", "flipped old", "flipped new")

    def prompt(self, state: State) -> Prefilled:
        """The prompt in that state."""
        item, value = self._said(state)
        return self._prefills.get((self.item.key, state), lambda: prefilled(self.subject, item, value))

    def answer_id(self, state: State) -> int:
        """First token of the right answer in that state."""
        item, value = self._said(state)
        asking = Asking(self.subject.model, self.subject.tokenizer, item)
        return asking.old_id if value == item.old else asking.new_id

    def right(self, state: State) -> bool:
        """Whether the model prefers the right answer of the two."""
        mine, ids = self.answer_id(state), {self.answer_id("old"), self.answer_id("new")}
        (theirs,) = ids - {mine}
        logits = self.prompt(state).logits
        return bool(logits[mine] > logits[theirs])

    def pair(self, base: State, other: State) -> Pair:
        """Two prompts with different answers and equal numbers of tokens."""
        first, second = self.prompt(base), self.prompt(other)
        changed = (first.ids != second.ids).nonzero()[:, 0]
        if self._said(base)[0] is self._said(other)[0]:  # the field's value differs: all of its tokens count
            changed = torch.arange(*first.field)
        return Pair(first, second, self.answer_id(base), self.answer_id(other), changed)

    @property
    def field_pair(self) -> Pair:
        """Old value against new value."""
        return self.pair("old", "new")

    @property
    def rule_pair(self) -> Pair:
        """The rule turned, the field the same."""
        return self.pair("old", "flipped old")

    def reason_to_leave_out(self) -> str | None:
        """Why this item can't be used, or None."""
        if self.item.mode != "direct":
            return "answers behind a chain of thought"
        if self.item.task in RULE_TASKS and self.flipped_item is None:
            return "no rule that can be turned"
        try:
            Asking(self.subject.model, self.subject.tokenizer, self.item)
        except TaskError:
            return "answers that begin alike"
        prompts = [self.prompt(state) for state in self.states]
        if len({prompt.length for prompt in prompts}) > 1 or len({prompt.field for prompt in prompts}) > 1:
            return "values of different numbers of tokens"
        return None

    def distance(self) -> float:
        """Logits between the two ends of a pair; of the closer one where there are two."""
        pairs = [self.field_pair] + ([self.rule_pair] if self.flipped_item is not None else [])
        return min(abs(second - first) for first, second in (pair.ends for pair in pairs))

    def _said(self, state: State) -> tuple[Item, str]:
        item = self.item
        if state.startswith("flipped"):
            assert self.flipped_item is not None
            item = self.flipped_item
        return item, item.old if state.endswith("old") else item.new


def flipped(item: Item) -> Item | None:
    """The item with its rule turned, so that its answers change places; the field is left as it is.

    A rule that names one of the two values names the other one instead; in a rule that names each once they change
    places. None for any other rule. The rule is the line that names both answers; a lookup, whose answers are the
    values themselves, has none.
    """
    names = [answer_name(answer) for answer in item.answers.values()]
    if set(names) & {item.old, item.new}:
        return None
    word = re.compile(rf"(?<!\w)({re.escape(item.old)}|{re.escape(item.new)})(?!\w)")
    places = [
        (number, match)
        for number, section in enumerate(item.sections)
        for match in word.finditer(section.text)
        if all(name in _line_of(section.text, match) for name in names)
    ]
    found = [match[0] for _, match in places]
    if not found or len(set(found)) != len(found) or len({number for number, _ in places}) > 1:
        return None
    number = places[0][0]
    text = item.sections[number].text
    for _, match in reversed(places):
        other = item.new if match[0] == item.old else item.old
        text = text[: match.start()] + other + text[match.end() :]
    turned = replace(item.sections[number], text=text)
    sections = (*item.sections[:number], turned, *item.sections[number + 1 :])
    answers = {item.old: item.answers[item.new], item.new: item.answers[item.old]}
    return replace(item, sections=sections, answers=answers)


def _line_of(text: str, match: re.Match[str]) -> str:
    start, stop = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
    return text[start : stop if stop >= 0 else len(text)]
