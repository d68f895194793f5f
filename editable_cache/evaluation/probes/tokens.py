"""What a token of a prompt is for: a name that means the same in all items of a task."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from editable_cache.evaluation.tasks import Item

LINES_FROM_END = 8
"""Lines at the end of a prompt that are counted from there; those before are counted from the rule."""

WORDS_SHOWN = 16
"""Characters of a token that are shown."""


RULE_PARTS = ("to_first", "first", "to_second", "second", "after")
"""Parts of the rule's line: what leads to the answer that it names first, that answer, and so on."""


@dataclass(frozen=True)
class Token:
    """One token.

    Attributes:
        text: decoded alone.
        role: the line it stands in and its place from that line's end, for example ``"rule+2:-1"``. Lines are
            ``field`` (the one with the mutable value), ``rule+1`` and the like around the rule, and ``end-0`` and the
            like for the last lines of the prompt. The rule (the first line behind the field that names both answers)
            is told by its parts: ``first:+0`` is the first token of the answer that it names first, ``to_first:-1`` the
            token before that, then ``to_second``, ``second`` and ``after``.
        closes: whether it is the last token of its line: a delimiter.
    """

    text: str
    role: str
    closes: bool

    def shown(self) -> str:
        """Text and role for a plot's axis."""
        text = self.text.replace("\n", "⏎")
        return f"{text[:WORDS_SHOWN]!r} {self.role}"


def tokens_of(tokenizer: PreTrainedTokenizerBase, ids: list[int], item: Item, field_slot: int) -> list[Token]:
    """The tokens of a prompt with their roles.

    Args:
        ids: of context and question.
        field_slot: slot of the field's first token.
    """
    texts = [str(tokenizer.decode([token])) for token in ids]
    lines: list[list[int]] = [[]]
    for slot, text in enumerate(texts):
        lines[-1].append(slot)
        if "\n" in text and slot + 1 < len(texts):
            lines.append([])
    field_line = next(number for number, slots in enumerate(lines) if field_slot in slots)
    names = [answer_name(answer) for answer in item.answers.values()]
    whole = ["".join(texts[slot] for slot in slots) for slots in lines]
    rule_line = next(
        (n for n in range(field_line + 1, len(lines)) if all(name in whole[n] for name in names)), field_line
    )
    found = []
    for number, slots in enumerate(lines):
        label = _label(number, field_line, rule_line, len(lines))
        roles = [f"{label}:{place - len(slots)}" for place in range(len(slots))]
        if number == rule_line != field_line:
            roles = _rule_roles([texts[slot] for slot in slots], item)
        for place, slot in enumerate(slots):
            found.append(Token(texts[slot], roles[place], place == len(slots) - 1))
    return found


def _rule_roles(texts: list[str], item: Item) -> list[str]:
    """Roles of the tokens of the rule's line."""
    line = "".join(texts)
    starts = [sum(map(len, texts[:place])) for place in range(len(texts) + 1)]
    spans = []
    for answer in item.answers.values():
        text = answer.strip() if answer.strip() in line else answer_name(answer)
        at = line.find(text)
        first = next(place for place in range(len(texts)) if starts[place + 1] > at)
        stop = next(place for place in range(first, len(texts)) if starts[place + 1] >= at + len(text)) + 1
        spans.append((first, stop))
    (first, to_second), (second, after) = sorted(spans)
    borders = [0, first, to_second, max(second, to_second), max(after, to_second), len(texts)]
    roles = []
    for part, (start, stop) in zip(RULE_PARTS, itertools.pairwise(borders), strict=True):
        from_start = part in ("first", "second")
        roles += [f"{part}:+{at - start}" if from_start else f"{part}:{at - stop}" for at in range(start, stop)]
    return roles


def answer_name(answer: str) -> str:
    """A call's name, or the value that is asked for."""
    return answer.strip().strip('"').split("(")[0].split('"')[0]


def _label(number: int, field_line: int, rule_line: int, count: int) -> str:
    if number >= count - LINES_FROM_END and number > rule_line:
        return f"end-{count - 1 - number}"
    if number < field_line:
        return f"field-{field_line - number}"
    if number == field_line:
        return "field"
    if number == rule_line:
        return "rule"
    return f"rule{number - rule_line:+d}"
