"""What the conclusion of a prompt is, in a way that means the same in every domain."""

from __future__ import annotations

from editable_cache.evaluation.probes.pairs import Situation, State
from editable_cache.evaluation.tasks import DOMAINS, Item

LABELS = ("clause", "call")
"""``clause``: does the rule's first clause hold, so that its first-named call is right? ``call``: is it the call that a
domain names first (to grant what was asked), wherever the rule names it? Both are balanced against the field's value.
"""


def label(situation: Situation, state: State, kind: str) -> bool | None:
    """The conclusion in that state, or None where it is not known (``call`` in a domain of one's own)."""
    item = situation.item
    answers = item if not state.startswith("flipped") else situation.flipped_item
    assert answers is not None
    right = answers.answers[item.old if state.endswith("old") else item.new]
    if kind == "clause":
        return right == first_named(item)
    domain = next((domain for domain in DOMAINS if domain.name == item.domain), None)
    return None if domain is None else right.strip().startswith(domain.actions[0].name)


def first_named(item: Item) -> str:
    """The answer that the context names first."""
    context = item.context(item.old)
    return min(item.answers.values(), key=lambda answer: context.find(answer.strip()))
