"""Items for the tiny tokenizer, which splits words: answers that begin differently, values of as many tokens."""

from __future__ import annotations

import functools
from dataclasses import replace

from editable_cache.evaluation.probes.pairs import Situation
from editable_cache.evaluation.probes.prefill import Prefills
from editable_cache.evaluation.probes.study import turned
from editable_cache.evaluation.probes.subject import Subject
from editable_cache.evaluation.tasks import Domain, Item, build, call
from editable_cache.testing.tiny_models import tiny_model, tiny_tokenizer

DOMAINS = tuple(
    Domain(
        f"d{number}",
        "You help.",
        f"state{number}",
        ("xq", "zq", "jq"),
        (call("ant", a=str(number)), call("use", b=str(number))),
        "Please?",
        (("k", "y"),),
    )
    for number in range(4)
)


def items(task: str, count: int = 4, *, domains: int = 4) -> list[Item]:
    """``count`` items of a task from each domain in turn; of a seed whose states the tiny models tell apart."""
    if task == "exchanged":
        return turned(items("gated", count, domains=domains))
    found = build(task, per_domain=-(-count // domains), neutral=0, seed=2, domains=DOMAINS[:domains])
    return [
        replace(item, prefix=item.prefix + " ", answers={value: text.strip() for value, text in item.answers.items()})
        for item in found
    ][:count]


@functools.cache
def subject(family: str = "llama") -> Subject:
    """A tiny random model of a family; made once."""
    return Subject.of(tiny_model(family).eval(), tiny_tokenizer())


@functools.cache
def situation(task: str = "gated", family: str = "llama", number: int = 0) -> Situation:
    """One item on a tiny model, with its prompts."""
    return Situation(subject(family), items(task, 8)[number], Prefills())
