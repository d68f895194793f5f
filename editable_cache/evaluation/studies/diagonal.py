"""Editing inside a transplant: every arm on a spliced skill that holds the field, beside the same arm on a full prefill
(the study's section 6 and figure 7a).

A spliced chunk has ids and no template, so its cache tracks no field in it; ``track`` tells the ledger where it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from editable_cache.cache import Field
from editable_cache.editable import EditableCache
from editable_cache.errors import TaskError
from editable_cache.evaluation.arms import ERRATA, Case, arm
from editable_cache.evaluation.asking import Asking, Decision
from editable_cache.evaluation.chat import turn
from editable_cache.evaluation.gate import require_items
from editable_cache.evaluation.metrics import cosine, divergence, recovery
from editable_cache.evaluation.results import Row, Run
from editable_cache.evaluation.studies.compose import USUAL, Block, Layout, Way, splice
from editable_cache.evaluation.tasks import Item
from editable_cache.forward.text import encode_template, parse_template

ARMS = ("stale", "in_place", "selective@32", "window@32", "suffix", "erratum", "field+erratum")
FULL = "full"
"""A full prefill with the new value, and beside it the skill compiled with the new value and spliced."""
SKILL = "skill"


def track(cache: EditableCache, tokenizer: Any, segment: str, template: str, values: Mapping[str, str]) -> None:
    """Track the fields of a segment that was spliced or appended as ids, as ``append(fields=)`` would have.

    Changes the ledger of ``cache``; no cell.

    Args:
        segment: its name.
        template: its text, with ``{name}`` placeholders.
        values: what they stand for.

    Raises:
        TaskError: if the template does not give the segment's ids.
        FieldError: if a value shares a token with its neighbours, or template and values do not match.
    """
    ledger, parsed = cache.ledger, parse_template(template, values)
    held = ledger.segment(segment)
    encoded = encode_template(tokenizer, parsed, values, first=not held.start)
    if not torch.equal(encoded.ids, ledger.ids[0, held.start : held.stop]):
        raise TaskError(
            f"Segment {segment!r}: expected the ids of its template, got others; give the text it is made of."
        )
    fields = [
        Field(name, value, segment, tuple((held.start + low, held.start + high) for low, high in encoded.spans[name]))
        for name, value in values.items()
    ]
    segments = tuple(replace(each, template=parsed) if each.name == segment else each for each in ledger.segments)
    cache.ledger = replace(ledger, segments=segments, fields=(*ledger.fields, *fields))


def layout(asking: Asking, value: str) -> Layout:
    """The context with everything up to the policy as one skill, in the middle of the other sections.

    Raises:
        TaskError: if the field does not stand before the end of the policy.
    """
    item = asking.item
    names = [section.name for section in item.sections]
    count = names.index("policy") + 1 if "policy" in names else 0
    skill = "".join(section.text for section in item.sections[:count])
    if "{" + item.field + "}" not in skill:
        raise TaskError(f"Item {item.key}: expected the field in front of the policy's end, got {names}.")
    rest = [Block(section.text) for section in item.sections[count:]]
    half = len(rest) // 2
    opening = Block(turn(asking.tokenizer)[0].replace("{", "{{").replace("}", "}}"))
    return Layout(asking, [opening, *rest[:half], Block(skill, skill=True), *rest[half:]], value)


def caches(asking: Asking, value: str, way: Way = USUAL) -> tuple[EditableCache, EditableCache]:
    """The context with a value, recomputed and composed, each with its field tracked and the question behind it."""
    found = layout(asking, value)
    start, count = found.start()
    made = []
    for composed in (False, True):
        cache = start.fork()
        for ids, block in zip(found.ids()[count:], found.blocks[count:], strict=True):
            if not block.skill:
                cache.append(ids)
            elif composed:
                splice(cache, found.chunk(ids), way, SKILL)
            else:
                cache.append(ids, name=SKILL)
        template = next(block.text for block in found.blocks if block.skill)
        track(cache, asking.tokenizer, SKILL, template, {asking.item.field: value})
        made.append(asking.ask(cache))
    return made[0], made[1]


def run_diagonal(
    model: nn.Module,
    tokenizer: Any,
    items: Sequence[Item],
    run: Run,
    *,
    arms: Sequence[str] = ARMS,
    way: Way = USUAL,
    erratum: str | None = None,
    model_name: str = "the model",
) -> None:
    """Edit the field of every item by every arm, on the recomputed and on the composed cache; one row for each arm.

    A row has ``arm``, ``task``, ``domain``, ``mode``; ``recomputed_correct`` and ``composed_correct``; ``agrees``, the
    same decision on both; in direct mode ``recomputed_gap``, ``composed_gap``, ``cosine`` and ``kl`` between the two,
    ``recomputed_recovery`` and ``composed_recovery``, both between the ends of the recomputed cache (null where those
    do not differ), their ``difference``, and ``composed_own_recovery``, between the ends of the composed one: its stale
    decision, and that with the skill compiled anew.

    Args:
        erratum: wording of the correcting line.

    Raises:
        TaskError: for no item, an unknown arm, or an item whose field is not in the skill.
    """
    require_items(items)
    acts = {name: arm(name) for name in arms}
    for item in tqdm(items, desc=f"{model_name}, diagonal", unit="item"):
        if run.has(item.key):
            continue
        asking = Asking(model, tokenizer, item)
        with torch.no_grad():
            stale, exact = caches(asking, item.old, way), caches(asking, item.new, way)
            cases = [
                Case(asking, old, new, erratum or ERRATA["erratum"]) for old, new in zip(stale, exact, strict=True)
            ]
            rows = []
            for name, act in acts.items():
                found = [asking.decide(act(case).cache) for case in cases]
                rows.append(_row(cases, name, found[0], found[1]))
            rows.append(_row(cases, FULL, cases[0].ends().exact, cases[1].ends().exact))
        run.add(item.key, rows)


def _row(cases: Sequence[Case], name: str, recomputed: Decision, composed: Decision) -> Row:
    item = cases[0].asking.item
    row: Row = {
        "arm": name,
        "task": item.task,
        "domain": item.domain,
        "mode": item.mode,
        "recomputed_correct": recomputed.value == item.new,
        "composed_correct": composed.value == item.new,
        "agrees": recomputed.value == composed.value,
    }
    if recomputed.logits is None or composed.logits is None:
        return row
    shares = [_share(cases[0], recomputed), _share(cases[0], composed), _share(cases[1], composed)]
    first, second, own = (None if share is None else round(share, 5) for share in shares)
    return row | {
        "recomputed_gap": None if recomputed.gap is None else round(recomputed.gap, 4),
        "composed_gap": None if composed.gap is None else round(composed.gap, 4),
        "cosine": round(cosine(recomputed.logits, composed.logits), 6),
        "kl": round(divergence(recomputed.logits, composed.logits), 6),
        "recomputed_recovery": first,
        "composed_recovery": second,
        "difference": None if first is None or second is None else round(second - first, 5),
        "composed_own_recovery": own,
    }


def _share(case: Case, found: Decision) -> float | None:
    stale, exact = case.ends().stale.gap, case.ends().exact.gap
    if found.gap is None or stale is None or exact is None:
        return None
    return recovery(found.gap, stale, exact)
