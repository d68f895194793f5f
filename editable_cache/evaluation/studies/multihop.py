"""Passages compiled one by one, and questions that need two of them: does blind reuse hurt those more?

The study's appendix G finds that a decision that follows a reference across two blocks suffers; others report the same
for retrieved passages. What is measured is the probability of the right answer, which says something about models that
would seldom generate it, too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from editable_cache.adapters import host
from editable_cache.editable import EditableCache
from editable_cache.errors import TaskError
from editable_cache.evaluation.chat import turn
from editable_cache.evaluation.metrics import cosine, divergence
from editable_cache.evaluation.results import Row, Run
from editable_cache.evaluation.studies.compose import USUAL, Way, splice
from editable_cache.evaluation.studies.questions import Passage, Question
from editable_cache.forward.text import encode
from editable_cache.skill import Skill

SEAMS = (0, 1, 16)
FULL, JOINED, NONE = "full", "joined", "none"
"""A full prefill; both supporting passages compiled as one chunk; and a prompt without any passage."""
OTHERS = 2
"""Passages beside the two supporting ones."""
MOST_TOKENS = 200
"""Of a supporting passage; questions with longer ones are left out. Other passages are cut at half of it."""


@dataclass(frozen=True)
class Prompt:
    """Ids of a question: the chat's beginning, the passages in order (the supporting ones in the middle), question and
    answer, each int64 ``[num_tokens]``.
    """

    opening: Tensor
    passages: tuple[Tensor, ...]
    question: Tensor
    answer: Tensor


def prompt(tokenizer: Any, asked: Question) -> Prompt | None:
    """The ids of a question; None if a supporting passage is too long or there are too few others."""
    before, after = turn(tokenizer)

    def ids(text: str) -> Tensor:
        return encode(tokenizer, text, first=False)

    def passage(found: Passage) -> Tensor:
        return ids(f"{found.title}\n{found.text}\n\n")

    support = [passage(found) for found in asked.support]
    if max(map(len, support)) > MOST_TOKENS or len(asked.others) < OTHERS:
        return None
    others = [passage(found) for found in random.Random(asked.cluster).sample(asked.others, OTHERS)]
    others = [torch.cat((found[: MOST_TOKENS // 2 - 1], ids("\n\n"))) for found in others]
    opening = f"{before}Read the passages and answer the question.\n\n"
    question = f"Question: {asked.question}\nAnswer with a few words.{after or chr(10)}Answer:"
    return Prompt(
        encode(tokenizer, opening, first=True),
        (others[0], *support, *others[1:]),
        ids(question),
        ids(f" {asked.answer}"),
    )


def fitting(tokenizer: Any, questions: Sequence[Question], count: int) -> list[Question]:
    """The first ``count`` questions of each dataset that make a prompt, one of each dataset after the other."""
    kept: dict[str, list[Question]] = {}
    for asked in questions:
        found = kept.setdefault(asked.dataset, [])
        if len(found) < count and prompt(tokenizer, asked) is not None:
            found.append(asked)
    return [found[place] for place in range(count) for found in kept.values() if place < len(found)]


def run_multihop(
    model: nn.Module, tokenizer: Any, questions: Sequence[Question], run: Run, *, model_name: str = "the model"
) -> None:
    """Ask every question on a full prefill, on spliced passages with each seam, on joined ones, and on none.

    A row has ``dataset``, ``hops``, ``cluster``, ``arm`` ("seam@K", "joined", "none"), ``tokens`` of the passages,
    ``answer_tokens``; ``full_logp`` and ``logp`` in nats for each token of the right answer, teacher forced, and
    ``drop``, their difference; ``less_likely``; ``agreement``, the share of the answer's tokens at which the most
    likely token is the same as in a full prefill; ``exact`` and ``full_exact`` (greedy decoding would give the answer);
    ``cosine`` and ``kl`` of the logits of its first token.

    Raises:
        TaskError: for no question, or one that makes no prompt.
    """
    if not questions:
        raise TaskError("Expected at least one question, got none.")
    passages: tuple[tuple[int, ...], ...] = ()
    caches: dict[str, EditableCache] = {}
    for asked in tqdm(questions, desc=f"{model_name}, questions", unit="question"):
        if run.has(asked.key):
            continue
        found = prompt(tokenizer, asked)
        if found is None:
            raise TaskError(f"Question {asked.key}: a supporting passage has more than {MOST_TOKENS} tokens.")
        texts = tuple(tuple(ids.tolist()) for ids in found.passages)
        with torch.no_grad():
            if texts != passages:  # two questions in a row may share their passages
                passages, caches = texts, read(model, tokenizer, found)
            exact = answer_logits(model, caches[FULL], found)
            rows: list[Row] = []
            for arm in (*(f"seam@{seam}" for seam in SEAMS), JOINED, NONE):
                row: Row = {"dataset": asked.dataset, "hops": asked.hops, "cluster": asked.cluster, "arm": arm}
                row["tokens"] = sum(map(len, found.passages))
                rows.append(row | compared(exact, answer_logits(model, caches[arm], found), found.answer))
            run.add(asked.key, rows)


def read(model: nn.Module, tokenizer: Any, found: Prompt) -> dict[str, EditableCache]:
    """The caches of all arms, and ``full``, each behind the last passage."""
    start = EditableCache(model, tokenizer=tokenizer)
    start.append(found.opening)
    caches = {FULL: start.fork(), NONE: start}
    caches[FULL].append(torch.cat(found.passages))
    chunks = [Skill.precompile(model, tokenizer, ids, name="passage") for ids in found.passages]
    both = Skill.precompile(model, tokenizer, torch.cat(found.passages[1:3]), name="passage")
    ways = {f"seam@{seam}": (chunks, Way(seam)) for seam in SEAMS} | {JOINED: ([chunks[0], both, *chunks[3:]], USUAL)}
    for arm, (parts, way) in ways.items():
        caches[arm] = start.fork()
        for place, chunk in enumerate(parts):
            splice(caches[arm], chunk, way, f"passage {place}")
    return caches


def answer_logits(model: nn.Module, cache: EditableCache, found: Prompt) -> Tensor:
    """Logits float32 ``[num_answer_tokens, vocab]`` that predict the answer's tokens behind ``cache`` and question.

    The cache is not changed.
    """
    fork, count = cache.fork(), len(found.answer)
    ids = torch.cat((found.question, found.answer[: count - 1]))
    places = torch.arange(len(ids)) + int(fork.positions.max()) + 1
    logits = host.run(model, ids[None], fork, position_ids=places[None])
    return logits[0, -count:].float()


def compared(exact: Tensor, got: Tensor, answer: Tensor) -> Row:
    """Entries of a row from logits ``[num_answer_tokens, vocab]`` of the full prefill and of an arm."""
    full, mine = (float(_log_probability(logits, answer)) for logits in (exact, got))
    same = exact.argmax(-1) == got.argmax(-1)
    return {
        "answer_tokens": len(answer),
        "full_logp": round(full, 5),
        "logp": round(mine, 5),
        "drop": round(full - mine, 5),
        "less_likely": mine < full,
        "agreement": round(float(same.double().mean()), 5),
        "exact": bool((got.argmax(-1) == answer).all()),
        "full_exact": bool((exact.argmax(-1) == answer).all()),
        "cosine": round(cosine(exact[0], got[0]), 6),
        "kl": round(divergence(exact[0], got[0]), 6),
    }


def _log_probability(logits: Tensor, answer: Tensor) -> Tensor:
    """Mean log-probability of the answer's tokens, in nats."""
    return logits.double().log_softmax(-1).gather(1, answer[:, None]).mean()
