"""A balanced set of items: every domain, both polarities of the rule, both directions of the change."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

from editable_cache.errors import TaskError
from editable_cache.evaluation.tasks.domains import DOMAINS, Domain
from editable_cache.evaluation.tasks.item import Item, Mode
from editable_cache.evaluation.tasks.kinds import KINDS, Draw
from editable_cache.evaluation.tasks.phrases import JUDGED, Phrases


def build(
    task: str,
    *,
    per_domain: int = 4,
    mode: Mode = "direct",
    neutral: int = 20,
    far: bool = False,
    seed: int = 0,
    domains: Sequence[Domain] = DOMAINS,
    phrases: Phrases = JUDGED,
) -> list[Item]:
    """Items of one task, ``per_domain`` from each domain.

    The four combinations of "which value leads to which call" and "from which value to which" take turns, within a
    domain and from one domain to the next: a model that always gives one call, or never changes its answer, is at
    chance. With a multiple of four that holds within each domain.

    Args:
        task: a name of ``KINDS``.
        per_domain: two for both calls, four for both directions too.
        neutral: how many rules of the policy decide nothing.
        far: the binding rule stands behind all of them, not among the first two.
        seed: the same arguments give the same items.

    Raises:
        TaskError: for an unknown task, or fewer than one item per domain.
    """
    if task not in KINDS:
        raise TaskError(f"build: expected a task among {', '.join(KINDS)}, got {task!r}.")
    if per_domain < 1 or not domains:
        raise TaskError(f"build: expected at least one item of one domain, got {per_domain} of {len(domains)}.")
    items = []
    for place, domain in enumerate(domains):
        pairs = list(itertools.combinations(domain.values, 2))
        for number in range(per_domain):
            rng = random.Random(f"{task} {domain.name} {number} {neutral} {seed}")
            first, second = pairs[(number // 4) % len(pairs)]
            turn = number + place
            swap, back = bool(turn % 2), bool(turn // 2 % 2)
            old, new = (second, first) if back else (first, second)
            draw = Draw(
                rng=rng,
                domain=domain,
                phrases=phrases,
                mode=mode,
                neutral=neutral,
                swap=swap,
                old=old,
                new=new,
                far=far,
            )
            items.append(
                replace(
                    KINDS[task](draw),
                    key=f"{task}{'-far' if far else ''}/{mode}/{neutral}/{seed}/{domain.name}/{number}",
                )
            )
    return items
