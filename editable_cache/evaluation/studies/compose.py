"""Composing, judged by decisions: a part of the context is compiled alone and spliced (the study's section 5, appendix
F and figure 19; a memory split in two, appendix G).

Every way is compared with a full prefill of the same ids.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from editable_cache.chunk import KVChunk
from editable_cache.editable import EditableCache
from editable_cache.errors import TaskError
from editable_cache.evaluation.asking import Asking, Decision
from editable_cache.evaluation.chat import turn
from editable_cache.evaluation.gate import require_items
from editable_cache.evaluation.metrics import cosine, divergence
from editable_cache.evaluation.results import Row, Run
from editable_cache.evaluation.tasks import Item, Section
from editable_cache.evaluation.tasks.item import filled
from editable_cache.forward.text import encode
from editable_cache.skill import Skill

CONTENTS = ("rule", "fact", "tools")
"""What a skill holds: the policy, the section with the field, the list of tools."""
POINTS = ("system", "ahead", "middle", "end", "tool")
"""Where it stands: behind the chat's beginning; behind all other sections but that which it is combined with
(``PARTNERS``), which comes right after it; among the other sections; right before the question; and there in a turn of
the role ``tool``. At the first two it is read before its partner, as in the study; a rule at the others behind it.
"""
PARTNERS = {"rule": "fact", "fact": "rule"}
SWEPT = ("ahead", "middle")
SEAMS = (0, 1, 4, 16)
COUNTS = (1, 2, 3, 4)
BORDERS = {"one": (3,), "together": (1, 2), "split": (2, 1)}
"""A memory of three parts (session, definition, settings) in blocks, by how many parts each holds."""

_CONTENT = "\u2063{}\u2063"


@dataclass(frozen=True)
class Way:
    """How a chunk is spliced: how many tokens at its start are computed (None: all, a control that must be exact), and
    whether its keys are turned.
    """

    seam: int | None = 1
    rotated: bool = True


USUAL = Way()
SWEEP = (*(Way(seam) for seam in SEAMS), Way(None), Way(1, rotated=False))


@dataclass(frozen=True)
class Block:
    """A piece of the context: a template with at most one placeholder; a skill is compiled alone."""

    text: str
    skill: bool = False


@dataclass
class Memo:
    """What layouts of one item share, by ids: compiled chunks, and decisions of full prefills."""

    chunks: dict[tuple[int, ...], KVChunk] = field(default_factory=dict)
    decisions: dict[tuple[int, ...], Decision] = field(default_factory=dict)


@dataclass
class Layout:
    """A context in blocks, with one value of the field in place.

    Attributes:
        asking: the item; its question stands behind the blocks.
        blocks: in order. Line breaks that begin a block are moved to the one before, so that most tokenizers make the
            same tokens of the blocks as of the whole text; ids are in any case those of the blocks, in all ways.
        value: of the field.
        memo: what other layouts of the same item have computed.
    """

    asking: Asking
    blocks: Sequence[Block]
    value: str
    memo: Memo = field(default_factory=Memo)

    def __post_init__(self) -> None:
        joined: list[Block] = []
        for block in self.blocks:
            text = block.text.lstrip("\n") if joined else block.text
            if joined:
                breaks = block.text[: len(block.text) - len(text)]
                joined[-1] = Block(joined[-1].text + breaks, joined[-1].skill)
            joined.append(Block(text, block.skill))
        self.blocks = [block for block in joined if block.text]

    def ids(self) -> list[Tensor]:
        """int64 ``[num_tokens]`` of each block; the first one with what the tokenizer puts in front of a text."""
        item = self.asking.item
        texts = [filled(block.text, item.field, self.value) for block in self.blocks]
        return [encode(self.asking.tokenizer, text, first=not place) for place, text in enumerate(texts)]

    def start(self) -> tuple[EditableCache, int]:
        """A prefill of what stands before the first skill, and the number of its blocks."""
        cache, count = EditableCache(self.asking.model, tokenizer=self.asking.tokenizer), 0
        for ids, block in zip(self.ids(), self.blocks, strict=True):
            if block.skill:
                break
            cache.append(ids)
            count += 1
        return cache, count

    def exact(self, start: EditableCache) -> Decision:
        """What is decided after a full prefill: a fork of ``start`` reads the rest in one go. Computed once."""
        ids = torch.cat([*self.ids(), self.asking.question_ids])
        key = tuple(ids.tolist())
        if key not in self.memo.decisions:
            cache = start.fork()
            cache.append(ids[len(start.ledger) :])
            self.memo.decisions[key] = self.asking.decide(cache)
        return self.memo.decisions[key]

    def composed(self, start: EditableCache, count: int, way: Way) -> EditableCache:
        """A fork of ``start`` with each skill spliced, the rest and the question read behind it."""
        cache = start.fork()
        for place, (ids, block) in enumerate(zip(self.ids()[count:], self.blocks[count:], strict=True)):
            if block.skill:
                splice(cache, self.chunk(ids), way, f"skill {place}")
            else:
                cache.append(ids)
        return self.asking.ask(cache)

    def chunk(self, ids: Tensor) -> KVChunk:
        """The chunk of these ids, compiled alone (behind a BOS where the tokenizer has one); compiled once."""
        key = tuple(ids.tolist())
        if key not in self.memo.chunks:
            self.memo.chunks[key] = Skill.precompile(self.asking.model, self.asking.tokenizer, ids, name="skill")
        return self.memo.chunks[key]


def splice(cache: EditableCache, chunk: KVChunk, way: Way, name: str) -> None:
    """Splice a chunk at the end, its keys turned to where they go, or left as they are."""
    if not way.rotated:
        first = int(cache.positions.max()) + 1 if len(cache.ledger) else 0
        places = torch.arange(first, first + len(chunk))
        chunk = KVChunk(chunk.layers, chunk.token_ids, places, chunk.model, chunk.provenance, name)
    cache.splice(chunk, seam_tokens=len(chunk) if way.seam is None else way.seam, name=name)


def tool_turn(tokenizer: Any) -> tuple[str, str] | None:
    """What stands before and behind a tool's result between two user turns; None if the template has no such turn."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    before, result, after = (_CONTENT.format(number) for number in range(3))
    messages = [("user", before), ("assistant", "One moment."), ("tool", result), ("user", after)]
    try:
        turns = [{"role": role, "content": text} for role, text in messages]
        whole = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # templates raise what they like for a role that they don't know
        return None
    if any(str(whole).count(text) != 1 for text in (before, result, after)):
        return None
    opening, _, rest = str(whole).partition(before)[2].partition(result)
    return opening, rest.partition(after)[0]


def layout(asking: Asking, content: str, point: str, value: str, others: Sequence[Section] = ()) -> Layout | None:
    """The item's context with one of its sections as a skill; None where the item or the chat has no such place.

    Args:
        content: of ``CONTENTS``.
        point: of ``POINTS``.
        others: further skills, in front of and behind it; which comes where is drawn by the item's key.

    Raises:
        TaskError: for an unknown content or point.
    """
    if content not in CONTENTS or point not in POINTS:
        raise TaskError(f"Expected a content of {CONTENTS} and a point of {POINTS}, got {content!r}, {point!r}.")
    item, (before, _) = asking.item, turn(asking.tokenizer)
    chosen = next((section for section in item.sections if _holds(item, section, content)), None)
    if chosen is None or (point == "system" and not before):
        return None
    skills = [Block(section.text, skill=True) for section in others]
    skills.insert(random.Random(item.key).randint(0, len(skills)), Block(chosen.text, skill=True))
    opening = Block(before.replace("{", "{{").replace("}", "}}"))
    rest = [Block(section.text) for section in item.sections if section is not chosen]
    if point == "system":
        return Layout(asking, [opening, *skills, *rest], value)
    if point == "ahead":
        partners = [
            Block(section.text)
            for section in item.sections
            if section is not chosen and content in PARTNERS and _holds(item, section, PARTNERS[content])
        ]
        elsewhere = [block for block in rest if block not in partners]
        return Layout(asking, [opening, *elsewhere, *skills, *partners], value) if partners else None
    if point == "middle":
        half = len(rest) // 2
        return Layout(asking, [opening, *rest[:half], *skills, *rest[half:]], value)
    if point == "end":
        return Layout(asking, [opening, *rest, *skills], value)
    borders = tool_turn(asking.tokenizer)
    if borders is None:
        return None
    return Layout(asking, [opening, *rest, Block(borders[0]), *skills, Block(borders[1])], value)


def measure(found: Layout, ways: Sequence[Way], facts: Row) -> list[Row]:
    """A row for each way to splice the skills of a layout, against the full prefill of the same ids.

    Ways that chunks of recurrent layers don't have are left out: without rotation, and seams longer than the tokens
    that they were compiled to run live.

    ``agrees`` (the same decision), ``correct``, ``full_correct``, ``tokens`` of the prompt, ``skill_tokens``, ``seam``,
    ``rotated``; in direct mode ``cosine`` and ``kl`` of the next token's logits, ``top`` (the same most likely token),
    ``gap`` and ``full_gap``; and ``facts``.
    """
    asking, item = found.asking, found.asking.item
    start, count = found.start()
    full = found.exact(start)
    skills = [ids for ids, block in zip(found.ids(), found.blocks, strict=True) if block.skill]
    lengths, chunks = [len(ids) for ids in skills], [found.chunk(ids) for ids in skills]
    tokens = sum(map(len, found.ids())) + len(asking.question_ids)
    rows = []
    for way in ways:
        if not all(_possible(chunk, way) for chunk in chunks):
            continue
        got = asking.decide(found.composed(start, count, way))
        row: Row = {**facts, "task": item.task, "domain": item.domain, "mode": item.mode, "seam": way.seam}
        row |= {"rotated": way.rotated, "tokens": tokens, "skill_tokens": sum(lengths)}
        rows.append(row | {"chunks": len(lengths)} | compared(full, got, found.value))
    return rows


def _possible(chunk: KVChunk, way: Way) -> bool:
    if chunk.recurrence is None:
        return True
    return way.rotated and way.seam is not None and way.seam <= chunk.recurrence.head


def compared(full: Decision, got: Decision, value: str) -> Row:
    """Entries of a row: a decision beside that of the full prefill, where ``value`` is what the context says."""
    row: Row = {
        "agrees": got.value == full.value,
        "correct": got.value == value,
        "full_correct": full.value == value,
    }
    if full.logits is None or got.logits is None or full.gap is None or got.gap is None:
        return row
    return row | {
        "cosine": round(cosine(full.logits, got.logits), 6),
        "kl": round(divergence(full.logits, got.logits), 6),
        "top": bool(full.logits.argmax() == got.logits.argmax()),
        "gap": round(got.gap, 4),
        "full_gap": round(full.gap, 4),
    }


def run_contents(
    model: nn.Module,
    tokenizer: Any,
    items: Sequence[Item],
    run: Run,
    *,
    contents: Sequence[str] = CONTENTS,
    points: Sequence[str] = POINTS,
    sweep: Sequence[str] = CONTENTS,
    model_name: str = "the model",
) -> None:
    """Each content at each point with the usual seam of one token; of ``sweep`` all of ``SWEEP`` at ``SWEPT``.

    Rows of ``measure`` with ``test`` = "content", ``content`` and ``point``, kept under ``content/POINTS/KEY``.

    Raises:
        TaskError: for no item, or an unknown content or point.
    """
    require_items(items)
    for item in tqdm(items, desc=f"{model_name}, contents", unit="item"):
        key = f"content/{'+'.join(points)}/{item.key}"
        if run.has(key):
            continue
        rows, asking, memo = [], Asking(model, tokenizer, item), Memo()
        with torch.no_grad():
            for content in contents:
                for point in points:
                    found = layout(asking, content, point, item.new)
                    if found is not None:
                        found.memo = memo
                        ways = SWEEP if content in sweep and point in SWEPT else (USUAL,)
                        rows += measure(found, ways, {"test": "content", "content": content, "point": point})
        run.add(key, rows)


def run_counts(
    model: nn.Module,
    tokenizer: Any,
    items: Sequence[Item],
    run: Run,
    *,
    counts: Sequence[int] = COUNTS,
    points: Sequence[str] = SWEPT,
    model_name: str = "the model",
) -> None:
    """The policy among policies of other domains, each compiled by itself: ``counts`` skills in all.

    Rows of ``measure`` with ``test`` = "count" and ``point``, kept under ``count/POINTS/KEY``; ``chunks`` is the number
    of skills.

    Raises:
        TaskError: for no item, an unknown point, or too few other domains.
    """
    require_items(items)
    policies = {item.domain: section for item in items for section in item.sections if section.name == "policy"}
    if len(policies) < max(counts):
        raise TaskError(f"Expected policies of at least {max(counts)} domains, got {len(policies)}.")
    for item in tqdm(items, desc=f"{model_name}, several skills", unit="item"):
        key = f"count/{'+'.join(points)}/{item.key}"
        if run.has(key):
            continue
        rng, asking, rows = random.Random(item.key), Asking(model, tokenizer, item), []
        foreign = [section for domain, section in policies.items() if domain != item.domain]
        drawn = rng.sample(foreign, max(counts) - 1)
        with torch.no_grad():
            for point, count in itertools.product(points, counts):
                found = layout(asking, "rule", point, item.new, drawn[: count - 1])
                if found is not None:
                    rows += measure(found, (USUAL,), {"test": "count", "content": "rule", "point": point})
        run.add(key, rows)


def run_split(
    model: nn.Module,
    tokenizer: Any,
    items: Sequence[Item],
    run: Run,
    *,
    points: Sequence[str] = ("start", "end"),
    model_name: str = "the model",
) -> None:
    """A memory in which one line names the setting that governs and others give values (appendix G).

    Its parts are spliced by ``BORDERS``: as ``one`` block, or as two; ``together`` keeps definition and settings in one
    block, ``split`` puts the border between them. The memory stands at the ``start`` of
    the context or at its ``end``. The value is the one that the rival setting does not have, so that only a model
    that resolves the reference is right. Rows of ``measure`` with ``test`` = "split", ``border`` and ``point``, kept
    under ``split/POINT/KEY``.

    Raises:
        TaskError: for no item, or one of another task.
    """
    require_items(items)
    for item in tqdm(items, desc=f"{model_name}, memory in two", unit="item"):
        if item.task != "cross_reference":
            raise TaskError(f"Item {item.key}: expected the task cross_reference, got {item.task}.")
        asking, memo = Asking(model, tokenizer, item), Memo()
        for point in points:
            key, rows = f"split/{point}/{item.key}", []
            if run.has(key):
                continue
            with torch.no_grad():
                for border, sizes in BORDERS.items():
                    found = _memory(asking, point, sizes)
                    found.memo = memo
                    rows += measure(found, (USUAL,), {"test": "split", "border": border, "point": point})
            run.add(key, rows)


def _memory(asking: Asking, point: str, sizes: Sequence[int]) -> Layout:
    sections, item = {section.name: section.text for section in asking.item.sections}, asking.item
    memory = [sections.pop(name) for name in ("session", "definition", "settings")]
    blocks, done = [], 0
    for size in sizes:
        blocks.append(Block("".join(memory[done : done + size]), skill=True))
        done += size
    rest = [Block(text) for text in sections.values()]
    opening = Block(turn(asking.tokenizer)[0].replace("{", "{{").replace("}", "}}"))
    value = item.old if f": {item.new}\n" in memory[2] else item.new
    return Layout(asking, [opening, *(blocks + rest if point == "start" else rest + blocks)], value)


def _holds(item: Item, section: Section, content: str) -> bool:
    """Whether a section is what is meant by a content."""
    if content == "fact":
        return "{" + item.field + "}" in section.text
    return section.name == {"rule": "policy", "tools": "tools"}[content]
