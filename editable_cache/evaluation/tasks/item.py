"""What is asked: a context with one mutable field, a question, and the right answer for each value of the field."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Mode = Literal["direct", "cot"]
"""Answer at once, or after a short chain of thought."""

REASONING = "Reasoning:"
"""How a chain of thought begins."""


@dataclass(frozen=True)
class Call:
    """One tool call: the name decides, the arguments come from the context."""

    name: str
    arguments: tuple[tuple[str, str], ...] = ()

    def line(self) -> str:
        """``name(key="value")``, as the prompt's tools are written."""
        return f"{self.name}({', '.join(f'{key}={json.dumps(value)}' for key, value in self.arguments)})"

    def as_json(self) -> str:
        """A function call as JSON: ``{"name": ..., "arguments": {...}}``."""
        return json.dumps({"name": self.name, "arguments": dict(self.arguments)})


@dataclass(frozen=True)
class Section:
    """A named piece of the context. ``{{`` and ``}}`` stand for braces; one section holds ``{field}``."""

    name: str
    text: str


@dataclass(frozen=True)
class Item:
    """One decision whose right answer turns with the value of one field.

    Attributes:
        key: unique and stable; results are kept under it.
        task, domain: what kind of question, and the cluster it belongs to.
        mode: whether a chain of thought comes first.
        sections: the context in order. Exactly one holds the placeholder of the field.
        field: name of the field, which is the placeholder's too.
        old, new: its value when the context was read, and after the change.
        question: what is asked at the end, behind everything that can be cached.
        prefix: how the answer begins whatever it is; the token behind it decides.
        answers: by value, what follows the prefix when the answer is right.
        reasoning: by value, what a right chain of thought says. Nothing is judged by it.
    """

    key: str
    task: str
    domain: str
    mode: Mode
    sections: tuple[Section, ...]
    field: str
    old: str
    new: str
    question: str
    prefix: str
    answers: Mapping[str, str]
    reasoning: Mapping[str, str]

    def template(self) -> str:
        """The context with the placeholder, as ``EditableCache.append(..., fields=)`` takes it."""
        return "".join(section.text for section in self.sections)

    def context(self, value: str) -> str:
        """The context with a value in place."""
        return filled(self.template(), self.field, value)

    def completion(self, value: str) -> str:
        """What a model should write behind the question; in direct mode behind question and prefix."""
        if self.mode == "direct":
            return self.answers[value]
        return f"{REASONING} {self.reasoning[value]}\n{self.prefix}{self.answers[value]}"


def filled(template: str, field: str, value: str) -> str:
    """A template with the value in place and its doubled braces single."""
    stands_for = {"{{": "{", "}}": "}", "{" + field + "}": value}
    return re.sub("|".join(map(re.escape, stands_for)), lambda found: stands_for[found[0]], template)


def answered(item: Item, text: str) -> str | None:
    """What the model decided: the value whose answer its text gives, or None.

    A tool call must parse, with the right arguments; a chain of thought may stand before it. In direct mode ``text``
    begins behind the prefix.
    """
    if item.mode == "cot":
        _, found, text = text.rpartition(item.prefix)
        if not found:
            return None
    given = text.strip().split("\n")[0].strip()
    for value, answer in item.answers.items():
        if _same(item.prefix + answer, item.prefix + " " * (not item.prefix.endswith('"')) + given):
            return value
    return None


def _same(expected: str, given: str) -> bool:
    if expected.startswith("{"):
        try:
            return bool(json.loads(expected) == json.JSONDecoder().raw_decode(given)[0])
        except ValueError:
            return False
    return re.sub(r"\s+", "", expected) == re.sub(r"\s+", "", given)
