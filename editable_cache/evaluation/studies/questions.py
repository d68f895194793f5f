"""Questions over passages: HotpotQA, MuSiQue and SQuAD's format, read from disk."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from editable_cache.errors import TaskError

Hops = Literal["single", "multi"]


@dataclass(frozen=True)
class Passage:
    """A text with its heading."""

    title: str
    text: str


@dataclass(frozen=True)
class Question:
    """A question with the passages that it is asked about.

    Attributes:
        key: unique.
        dataset: where it comes from; ``hops``: whether two passages must be combined.
        cluster: the document or question that it shares with others.
        support: two passages. With two hops, both are needed; with one, the answer stands in one of them.
        others: further passages, which are not needed.
        answer: the right one.
    """

    key: str
    dataset: str
    hops: Hops
    cluster: str
    support: tuple[Passage, Passage]
    others: tuple[Passage, ...]
    question: str
    answer: str


def hotpot_questions(path: Path | str) -> list[Question]:
    """The bridge questions of a HotpotQA file (Yang et al. 2018) that name two passages and are not answered yes or no.

    Raises:
        TaskError: for a file that can't be read as such.
    """
    found = []
    for entry in _entries(path):
        titles = list(dict.fromkeys(title for title, _ in entry["supporting_facts"]))
        passages = [Passage(title, "".join(sentences).strip()) for title, sentences in entry["context"]]
        support = [passage for passage in passages if passage.title in titles]
        if entry["type"] != "bridge" or len(support) != 2 or entry["answer"] in ("yes", "no"):
            continue
        others = tuple(passage for passage in passages if passage.title not in titles)
        key = f"hotpotqa/{entry['_id']}"
        drawn = _in_any_order(key, support)
        found.append(Question(key, "hotpotqa", "multi", key, drawn, others, entry["question"], entry["answer"]))
    return _some(path, found)


def musique_questions(path: Path | str) -> list[Question]:
    """The two-hop questions of a MuSiQue file (Trivedi et al. 2022), each followed by its second hop alone.

    The second hop names what the first one asks for, and has the same answer and the same passages: a control in which
    nothing differs but the number of hops. It is called ``musique_second_hop``.

    Raises:
        TaskError: for a file that can't be read as such.
    """
    found = []
    for entry in _entries(path):
        hops = entry["question_decomposition"]
        places = [hop["paragraph_support_idx"] for hop in hops]
        if len(hops) != 2 or len(set(places)) != 2 or "#1" not in hops[1]["question"]:
            continue
        passages = {part["idx"]: Passage(part["title"], part["paragraph_text"].strip()) for part in entry["paragraphs"]}
        others = tuple(passage for idx, passage in passages.items() if idx not in places)
        key = f"musique/{entry['id']}"
        drawn = _in_any_order(key, [passages[place] for place in places])
        second = _spoken(hops[1]["question"], hops[0]["answer"])
        whole = Question(key, "musique", "multi", key, drawn, others, entry["question"], entry["answer"])
        alone = Question(f"{key}/second", "musique_second_hop", "single", key, drawn, others, second, hops[1]["answer"])
        found += [whole, alone]
    return _some(path, found)


def squad_questions(path: Path | str) -> list[Question]:
    """One question for each paragraph of a file in SQuAD's format, beside other paragraphs of the same article.

    The first paragraphs of all articles come first.

    Raises:
        TaskError: for a file that can't be read as such.
    """
    found: list[tuple[int, Question]] = []
    for article in _entries(path, "data"):
        passages = [Passage(article["title"].replace("_", " "), part["context"]) for part in article["paragraphs"]]
        for place, part in enumerate(article["paragraphs"]):
            key = f"squad/{part['qas'][0]['id']}"
            rest = [passage for other, passage in enumerate(passages) if other != place]
            if len(rest) < 2:
                continue
            drawn = _in_any_order(key, [passages[place], rest[0]])
            asked, answer = part["qas"][0]["question"], part["qas"][0]["answers"][0]["text"]
            others = tuple(rest[1:])
            found.append((place, Question(key, "squad", "single", article["title"], drawn, others, asked, answer)))
    return _some(path, [question for _, question in sorted(found, key=lambda pair: pair[0])])


def _spoken(question: str, entity: str) -> str:
    """A hop as a question: MuSiQue writes some as ``#1 >> relation``."""
    subject, arrow, relation = question.replace("#1", entity).partition(" >> ")
    return f"What is the {relation} of {subject}?" if arrow else subject


def _in_any_order(key: str, passages: list[Passage]) -> tuple[Passage, Passage]:
    first, second = random.Random(key).sample(passages, 2)
    return first, second


def _entries(path: Path | str, name: str | None = None) -> list[Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TaskError(f"Questions {path}: can't be read ({error.strerror}).") from error
    except ValueError as error:
        raise TaskError(f"Questions {path}: expected JSON, got something else ({error}).") from error
    entries = content.get(name) if name and isinstance(content, dict) else content
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise TaskError(f"Questions {path}: expected a list of objects{f' under {name!r}' if name else ''}.")
    return entries


def _some(path: Path | str, found: list[Question]) -> list[Question]:
    if not found:
        raise TaskError(f"Questions {path}: expected at least one that fits, got none.")
    return found
