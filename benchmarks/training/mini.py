"""A gated decision in some 110 words, for models trained from random weights, and the tokenizer of those words.

Which two calls a field's values lead to is drawn anew for every text; one assignment in five never occurs in training,
and all judged items are of those. Plain text only: no example was ever made with an edited or spliced cache. Texts
hold later lines that update a field, in other wordings than the one that judges.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from editable_cache.evaluation.tasks import KINDS, Call, Domain, Draw, Item, Mode, Phrases

FIELDS: dict[str, tuple[str, str]] = {
    "plan": ("gold", "basic"),
    "door": ("open", "shut"),
    "weather": ("storm", "calm"),
    "stock": ("full", "gone"),
    "alarm": ("loud", "mute"),
    "seal": ("whole", "broken"),
    "lane": ("left", "right"),
    "light": ("green", "red"),
    "grade": ("high", "low"),
    "visit": ("first", "second"),
}
"""The domains: a field and its two values."""
CALLS = ("approve", "deny", "hold", "send", "wait", "ship", "stop", "check", "pack", "store", "print", "ring")
VERDICTS = ("yes", "no")
CLAUSES = (
    "if {field} is {value} then {call}",
    "must: {field} {value} needs {call}",
    "{field} decides. {value}: {call}",
)
MODES: tuple[Mode, ...] = ("direct", "cot")
KEPT = 5
"""One assignment in so many is kept for judging."""

ROLES = ("desk agent.", "shop agent.", "yard agent.", "night agent.")
REQUESTS = ("please do order {x}.", "what about order {x}?", "order {x} waits.", "can you help with order {x}?")
UNITS = ("box", "paper", "lamp", "key", "table", "letter", "phone", "cup")
NEUTRAL = ("keep the {x} clean.", "close the {x} at night.", "never sell a {x}.", "write down each {x}.")

PHRASES = Phrases(
    opening=("{role}\nSESSION\n", "{role}\nDATA\n"),
    entry="{key}: {value}\n",
    policy=("\nRULES\n", "\nPOLICY\n"),
    rules=(
        "rule for {field}. {v1} means {a1}, {v2} means {a2}.\n",
        "rule: if {field} is {v2} then {a2}, if {v1} then {a1}.\n",
        "must: {field} {v1} needs {a1}. {field} {v2} needs {a2}.\n",
        "the {field} decides. {v2}: {a2}; {v1}: {a1}.\n",
    ),
    trigger_rules=(),
    two_hop_classes=(),
    two_hop_rules=(),
    groups=(),
    notes=(),
    spoken_rules=(),
    memory=(),
    definition=(),
    memory_rules=(),
    neutral=tuple(text.format(x=unit) for text in NEUTRAL for unit in UNITS),
    tools=("\nCALLS\n", "\nTOOLS\n"),
    conversation=("\nuser: {request}\n", "\nguest: {request}\n"),
    task=("\nTASK: name the call. ", "\nNOW: which call? "),
    line_format="",
    json_format="",
    lookup=("\nTASK: name the {field}. ", "\nNOW: which {field}? "),
    direct="answer.\n",
    cot="think.\n",
)
UPDATES = (
    "update: {field} is {value}.\n",
    "[NOTE] {field} was changed, now {value}.\n",
    "{field} is now {value}. This replaces the old {field}.\n",
    "new {field}: {value}. This replaces every old value.\n",
    "[CHANGE] the value of {field} is {value}.\n",
    "later: {field} {value}. the earlier {field} was old.\n",
    "UPDATE of {field}: {value}. every earlier value is void.\n",
    "\n[UPDATE] the {field} of this order was changed. it is {value} now.\n",
)
"""Wordings of an update in training."""
ERRATUM = "\n[UPDATE] {name} is now {value}. This replaces every earlier value of {name}.\n"
"""The judged wording, which is also the default of ``EditableCache.erratum``; no training text has it."""

SPLIT = r"tool_call:|Reasoning:|answer:|\n|\(\)|[A-Za-z_]+|[^\sA-Za-z_]"
PAD, END, UNKNOWN = "<pad>", "<end>", "<unknown>"

Text = list[tuple[str, bool]]
"""Pieces, each with whether it is to be learnt."""


def kept_apart(field: str, first: str, second: str) -> bool:
    """Whether the assignment of two calls to a field's values is for judging only."""
    return zlib.crc32(f"{field} {first} {second}".encode()) % KEPT == 0


def domain(rng: random.Random, field: str, *, judged: bool) -> Domain:
    """Field, two values, two calls and what stands around them; both assignments of the calls are of one kind."""
    first, second = assignment(rng, field, judged=judged)
    keys = rng.sample([key for key in FIELDS if key != field], 2)
    other = rng.choice([call for call in CALLS if call not in (first, second)])
    return Domain(
        name=field,
        role=rng.choice(ROLES),
        field=field,
        values=FIELDS[field],
        actions=(Call(first), Call(second)),
        request=rng.choice(REQUESTS).format(x=rng.randint(10, 99)),
        context=tuple((key, rng.choice(FIELDS[key])) for key in keys),
        tools=(f"{other}()",),
    )


def assignment(rng: random.Random, field: str, *, judged: bool) -> tuple[str, str]:
    """Two calls, that of the first value first."""
    while True:
        first, second = rng.sample(CALLS, 2)
        if kept_apart(field, first, second) == judged == kept_apart(field, second, first):
            return first, second


def item_of(rng: random.Random, chosen: Domain, mode: Mode, *, kind: str, neutral: int, swap: bool, back: bool) -> Item:
    """An item of a domain."""
    old, new = chosen.values[::-1] if back else chosen.values
    return KINDS[kind](
        Draw(rng=rng, domain=chosen, phrases=PHRASES, mode=mode, neutral=neutral, swap=swap, old=old, new=new)
    )


def prompts(
    rng: random.Random,
    *,
    neutral: int,
    updates: float,
    rounds: int = 3,
    brief: bool = False,
    any_order: bool = False,
) -> Text:
    """A context and, behind it, questions, each answered; between them lines that update the field or another entry.

    Args:
        neutral: how many rules decide nothing.
        updates: the share of questions that follow an update.
        brief: without tools and conversation, as training begins.
        any_order: the sections in any order, so that the field stands behind its rule as often as before it.
    """
    chosen = domain(rng, rng.choice([*FIELDS]), judged=False)
    shape = {"neutral": neutral, "swap": rng.random() < 0.5, "back": rng.random() < 0.5}
    item = item_of(rng, chosen, "direct", kind="gated", **shape)
    value = item.old
    sections = [section.text for section in item.sections][: 2 if brief else None]
    if any_order:
        rng.shuffle(sections)
    if rng.random() < updates / 3:
        value = rng.choice((item.old, item.new))
        stated = next(place for place, text in enumerate(sections) if "{" + item.field + "}" in text)
        place = rng.randint(stated + 1, len(sections))
        sections.insert(place, rng.choice(UPDATES).format(field=item.field, value=value))
    pieces = [("".join(sections).replace("{" + item.field + "}", item.old), False)]
    for _ in range(rounds):
        if rng.random() < updates:
            lines, value = _update(rng, item, chosen, value)
            pieces.append((lines, False))
        kind = rng.choices(("gated", "lookup"), (4, 1))[0]
        item = item_of(rng, chosen, rng.choice(MODES), kind=kind, **shape)  # asks of the same context
        question = item.question + (item.prefix if item.mode == "direct" else "")
        pieces += [(question, False), (item.completion(value) + END, True)]
    return pieces


def _update(rng: random.Random, item: Item, chosen: Domain, value: str) -> tuple[str, str]:
    """Lines of an update, and the value after them."""
    if rng.random() < 0.15:
        key = rng.choice(chosen.context)[0]
        return rng.choice(UPDATES).format(field=key, value=rng.choice(FIELDS[key])), value
    other = item.new if value == item.old else item.old
    stated = rng.choices(([other], [value], [other, value]), (6, 1, 1))[0]
    return "".join(rng.choice(UPDATES).format(field=item.field, value=said) for said in stated), stated[-1]


def recall(rng: random.Random) -> Text:
    """Some values with their calls, and twelve times which call belongs to which: much is asked of a short text."""
    fields = rng.sample([*FIELDS], rng.randint(1, 2))
    pairs: dict[str, str] = {}
    for field in fields:
        pairs |= zip(FIELDS[field], assignment(rng, field, judged=False), strict=True)
    between = rng.choice((" is", " means", " then", " needs", ":"))
    order = rng.sample([*pairs], len(pairs))
    pieces: Text = [("".join(f"{key}{between} {pairs[key]}().\n" for key in order), False)]
    for key in rng.choices(order, k=12):
        pieces += [(f"{key}{between}", False), (f" {pairs[key]}", True), ("().\n", False)]
    return pieces


def verdicts(rng: random.Random, *, count: int = 6) -> Text:
    """Entries, and again and again a clause of a rule and whether it holds."""
    values = {field: rng.choice(FIELDS[field]) for field in rng.sample([*FIELDS], count)}
    pieces: Text = [("".join(PHRASES.entry.format(key=key, value=value) for key, value in values.items()), False)]
    for field in rng.choices([*values], k=8):
        said = rng.choice(FIELDS[field])
        clause = rng.choice(CLAUSES).format(field=field, value=said, call=rng.choice(CALLS))
        pieces += [(clause, False), (f" {VERDICTS[said != values[field]]}", True), (".\n", False)]
    return pieces


def decisions(rng: random.Random, *, updates: float, count: int = 6) -> Text:
    """Entries and, one by one, a rule about each with the call that follows.

    Each field is asked once, so that only one of its values stands in the text before its rule.

    Args:
        updates: how often a line between a rule and its call states the entry anew, changed or not.
    """
    values = {field: rng.choice(FIELDS[field]) for field in rng.sample([*FIELDS], count)}
    pieces: Text = [("".join(PHRASES.entry.format(key=key, value=value) for key, value in values.items()), False)]
    for field in rng.sample([*values], count):
        calls = dict(zip(FIELDS[field], assignment(rng, field, judged=False), strict=True))
        v1, v2 = rng.sample(FIELDS[field], 2)
        words = {"field": field, "v1": v1, "v2": v2, "a1": f"{calls[v1]}()", "a2": f"{calls[v2]}()"}
        pieces.append((rng.choice(PHRASES.rules).format(**words), False))
        value = values[field]
        if rng.random() < updates:
            value = rng.choice((v1, v2))
            pieces.append((rng.choice(UPDATES).format(field=field, value=value), False))
        pieces += [("tool_call:", False), (f" {calls[value]}", True), ("()\n", False)]
    return pieces


def judged(
    mode: Mode, per_field: int, *, neutral: int, seed: int = 0, fields: Sequence[str] = (*FIELDS,)
) -> list[Item]:
    """Items of assignments that training leaves out; the four directions take turns, so labels are balanced."""
    items = []
    for field in fields:
        for number in range(per_field):
            rng = random.Random(f"judged {field} {mode} {neutral} {seed} {number}")
            chosen = domain(rng, field, judged=True)
            swap, back = bool(number % 2), bool(number // 2 % 2)
            item = item_of(rng, chosen, mode, kind="gated", neutral=neutral, swap=swap, back=back)
            items.append(replace(item, key=f"small/{mode}/{neutral}/{seed}/{field}/{number}"))
    return items


def tokenizer() -> Any:
    """A fast tokenizer with one token a word, which are those of the training texts."""
    rng = random.Random(0)
    words = {PAD: 0, END: 1, UNKNOWN: 2}
    texts = ["0 1 2 3 4 5 6 7 8 9", *VERDICTS, *CALLS, *PHRASES.neutral, *UPDATES]
    texts += [word for field, values in FIELDS.items() for word in (field, *values)]
    texts += [piece for _ in range(500) for piece, _ in prompts(rng, neutral=3, updates=0.7)]
    for word in sorted({word for text in texts for word in re.findall(SPLIT, text.removesuffix(END))}):
        words[word] = len(words)
    made = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split(Regex(SPLIT), "isolated")]
    )
    made.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=PAD, eos_token=END, unk_token=UNKNOWN)
