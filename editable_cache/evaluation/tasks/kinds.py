"""How an item of each task is built from a domain and a wording."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from editable_cache.evaluation.tasks.domains import Domain
from editable_cache.evaluation.tasks.item import Call, Item, Mode, Section
from editable_cache.evaluation.tasks.phrases import Phrases


@dataclass(frozen=True)
class Draw:
    """What an item is made from. ``neutral``: how many rules that decide nothing; ``swap``: which value leads to which
    call; ``far``: the binding rule comes last.
    """

    rng: random.Random
    domain: Domain
    phrases: Phrases
    mode: Mode
    neutral: int
    swap: bool
    old: str
    new: str
    far: bool = False

    def pick(self, wordings: tuple[str, ...]) -> str:
        """One of several wordings."""
        return self.rng.choice(wordings)

    def calls(self) -> dict[str, Call]:
        """The right call under each value, in the order in which the rule names them."""
        first, second = sorted((self.old, self.new), key=self.domain.values.index)
        order = self.domain.actions[::-1] if self.swap else self.domain.actions
        return dict(zip((first, second), order, strict=True))

    def words(self) -> dict[str, str]:
        """What the braces of the wordings stand for."""
        (v1, a1), (v2, a2) = self.calls().items()
        return {"field": self.domain.field, "v1": v1, "v2": v2, "a1": a1.line(), "a2": a2.line()}


def gated(draw: Draw) -> Item:
    """The study's decision: a rule of the policy says which call the field's value leads to."""
    return _decision(draw, "gated", [_head(draw)], draw.pick(draw.phrases.rules).format(**draw.words()))


def trigger(draw: Draw) -> Item:
    """The rule names one value, and another call for any other: turning that one word turns the answer."""
    words, calls = draw.words(), draw.calls()
    rule = draw.pick(draw.phrases.trigger_rules)
    if draw.rng.random() < 0.5:
        (v1, a1), (v2, a2) = reversed(calls.items())
        words = {**words, "v1": v1, "v2": v2, "a1": a1.line(), "a2": a2.line()}
    item = _decision(draw, "trigger", [_head(draw)], rule.format(**words))
    reasoning = {
        value: f"The {draw.domain.field} is {value}. The rule names {words['v1']}, so {calls[value].name}."
        for value in item.answers
    }
    return replace(item, reasoning=reasoning)


def two_hop(draw: Draw) -> Item:
    """The value names a group, and the group leads to the call."""
    groups = draw.rng.choice(draw.phrases.groups)
    named = dict(zip(("g1", "g2"), draw.rng.sample(groups, 2), strict=True))
    words = {**draw.words(), **named}
    calls = draw.calls()
    rule = draw.pick(draw.phrases.two_hop_classes).format(**words) + draw.pick(draw.phrases.two_hop_rules).format(
        **words
    )
    item = _decision(draw, "two_hop", [_head(draw)], rule)
    of_value = dict(zip(calls, named.values(), strict=True))
    reasoning = {
        value: f"The {draw.domain.field} is {value}. That is {of_value[value]}. So {call.name}."
        for value, call in calls.items()
    }
    return replace(item, reasoning=reasoning)


def free_form(draw: Draw) -> Item:
    """Field and rule in conversational sentences."""
    note = draw.pick(draw.phrases.notes).format(field=draw.domain.field, value="{" + draw.domain.field + "}")
    head = Section("session", draw.pick(draw.phrases.opening).format(role=draw.domain.role) + note + _others(draw))
    return _decision(draw, "free_form", [head], draw.pick(draw.phrases.spoken_rules).format(**draw.words()))


def tool_call(draw: Draw) -> Item:
    """The gated decision answered by a JSON function call."""
    item = gated(draw)
    calls = draw.calls()
    answers = {value: calls[value].as_json().removeprefix('{"name": "') for value in item.answers}
    question = draw.pick(draw.phrases.task) + draw.phrases.json_format.format() + _ending(draw)
    return replace(item, task="tool_call", question=question, prefix='{"name": "', answers=answers)


def lookup(draw: Draw) -> Item:
    """What is the value? The answer is a copy of the field."""
    item = gated(draw)
    question = draw.pick(draw.phrases.lookup).format(field=draw.domain.field) + _ending(draw)
    answers = {value: f" {value}" for value in (draw.old, draw.new)}
    reasoning = {value: f"The {draw.domain.field} is {value}." for value in (draw.old, draw.new)}
    return replace(item, task="lookup", question=question, prefix="answer:", answers=answers, reasoning=reasoning)


def cross_reference(draw: Draw) -> Item:
    """A memory in which one line names the setting that governs, and another line gives that setting's value."""
    words, phrases = draw.words(), draw.phrases
    rival = f"{draw.domain.context[0][0]}_mode"
    other = draw.rng.choice((draw.old, draw.new))
    entries = [
        phrases.entry.format(key=draw.domain.field, value="{" + draw.domain.field + "}"),
        phrases.entry.format(key=rival, value=other),
    ]
    draw.rng.shuffle(entries)
    opening = draw.pick(phrases.opening).format(role=draw.domain.role) + _others(draw)
    definition = draw.pick(phrases.memory) + draw.pick(phrases.definition).format(**words)
    sections = [Section("session", opening), Section("definition", definition), Section("settings", "".join(entries))]
    item = _decision(draw, "cross_reference", sections, draw.pick(phrases.memory_rules).format(**words))
    reasoning = {
        value: f"The governing setting is {draw.domain.field}. The {draw.domain.field} is {value}. So {call.name}."
        for value, call in draw.calls().items()
    }
    return replace(item, reasoning=reasoning)


KINDS: dict[str, Callable[[Draw], Item]] = {
    "gated": gated,
    "trigger": trigger,
    "two_hop": two_hop,
    "free_form": free_form,
    "tool_call": tool_call,
    "lookup": lookup,
    "cross_reference": cross_reference,
}
"""The tasks by name."""


def _decision(draw: Draw, task: str, head: list[Section], rule: str) -> Item:
    phrases, calls = draw.phrases, draw.calls()
    rules = [f"R{number}. {text}\n" for number, text in enumerate(_neutral(draw), start=1)]
    at = draw.rng.randint(0, min(1, len(rules)))
    rules.insert(len(rules) if draw.far else at, rule)
    tools = [*(call.line() for call in draw.domain.actions), *draw.domain.tools]
    draw.rng.shuffle(tools)
    listed = draw.pick(phrases.tools) + "".join(f"- {tool}\n" for tool in tools)
    sections = (
        *head,
        Section("policy", _plain(draw.pick(phrases.policy) + "".join(rules))),
        Section("tools", _plain(listed)),
        Section("conversation", _plain(draw.pick(phrases.conversation).format(request=draw.domain.request))),
    )
    return Item(
        key="",
        task=task,
        domain=draw.domain.name,
        mode=draw.mode,
        sections=sections,
        field=draw.domain.field,
        old=draw.old,
        new=draw.new,
        question=draw.pick(phrases.task) + phrases.line_format + _ending(draw),
        prefix="tool_call:",
        answers={value: f" {call.line()}" for value, call in calls.items()},
        reasoning={
            value: f"The {draw.domain.field} is {value}. The rule for {value} is {call.name}."
            for value, call in calls.items()
        },
    )


def _head(draw: Draw) -> Section:
    entries = [draw.phrases.entry.format(key=draw.domain.field, value="{" + draw.domain.field + "}")]
    opening = draw.pick(draw.phrases.opening).format(role=draw.domain.role)
    return Section("session", opening + entries[0] + _others(draw))


def _others(draw: Draw) -> str:
    return "".join(draw.phrases.entry.format(key=key, value=value) for key, value in draw.domain.context)


def _neutral(draw: Draw) -> list[str]:
    return draw.rng.sample(draw.phrases.neutral, min(draw.neutral, len(draw.phrases.neutral)))


def _ending(draw: Draw) -> str:
    return draw.phrases.direct if draw.mode == "direct" else draw.phrases.cot


def _plain(text: str) -> str:
    """Text in which no brace is a placeholder."""
    return text.replace("{", "{{").replace("}", "}}")
