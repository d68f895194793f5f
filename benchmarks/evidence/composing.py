"""Composing, judged by decisions.

    cd benchmarks && ../.venv/bin/python -m evidence.composing MODEL [--quick] [--threads N] [--scale N] [--sets A,B]

Contents (rule, fact, tools) at five points of the context, before the field and behind it, with seams of 0, 1, 4 and 16
tokens and without rotation; two and four skills; a memory split in two; the same with a chain of thought and with JSON
function calls. Writes ``results/evidence/composing-MODEL.json``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from editable_cache.evaluation.results import Row
from editable_cache.evaluation.statistics import mcnemar
from editable_cache.evaluation.studies.compose import (
    BORDERS,
    CONTENTS,
    POINTS,
    run_contents,
    run_counts,
    run_split,
)
from editable_cache.evaluation.studies.tables import grouped, paired, table
from editable_cache.evaluation.tasks import Item, Mode, build, read_items
from evidence import commands, models

NEUTRAL = 3
"""Neutral rules of a policy: prompts of about 330 tokens, near the length of the training texts."""
MEASURES = ("full_correct", "correct", "agrees", "cosine", "kl", "top")
FIDELITY = (*models.PRETRAINED,)
"""Models that don't take these decisions: of them only logits are compared, on fewer items."""
OWN_ITEMS = 40
"""Of a small model's items."""


@dataclass(frozen=True)
class Part:
    """One set: a measurement, the items, and how many of each domain (for models that don't decide, ``brief``)."""

    test: str
    task: str = "gated"
    mode: Mode = "direct"
    per_domain: int = 1
    brief: int = 1
    contents: Sequence[str] = CONTENTS
    points: Sequence[str] = POINTS
    sweep: Sequence[str] = ()


PARTS = (
    Part("split", "cross_reference", points=("end",)),
    Part("split", "cross_reference", points=("start",)),
    Part("content", "lookup", contents=("fact",), points=("middle", "end", "tool")),
    Part("content", points=("middle",), sweep=("rule",)),
    Part("content", contents=("rule", "fact"), points=("ahead",), sweep=("rule",)),
    Part("content", contents=("rule",), points=("system", "end", "tool")),
    Part("content", contents=("fact", "tools"), points=("end", "tool")),
    Part("count", points=("middle",)),
    Part("count", points=("ahead",)),
    Part("content", mode="cot", brief=0, contents=("rule",), points=("middle",)),
    Part("content", mode="cot", brief=0, contents=("rule",), points=("ahead",)),
    Part("content", "tool_call", brief=0, points=("middle",)),
    Part("content", "tool_call", brief=0, contents=("rule", "fact"), points=("ahead",)),
)
COUNTS = (2, 4)
"""Of skills; one skill is the rule alone."""


def items_of(model: str, part: Part, scale: int, quick: bool) -> list[Item]:
    """The items of a set for a model; those of its own vocabulary, if it has one."""
    path = models.MODELS / model / "items.json"
    if path.is_file():
        kept = [item for item in read_items(path).items if item.mode == part.mode and item.task == part.task]
        return models.spread(kept, 4 if quick else OWN_ITEMS)
    count = (part.brief if model in FIDELITY else part.per_domain) * scale
    if not count or (quick and part.mode == "cot"):
        return []
    found = build(part.task, per_domain=1 if quick else count, mode=part.mode, neutral=1 if quick else NEUTRAL)
    return found[: 4 if part.test == "count" else 1] if quick else found


def main() -> None:
    """The command."""
    options = commands.parser(__doc__, "one item of most sets, with a short policy")
    options.add_argument("--scale", type=int, default=1, help="so many times the usual items; adds to finished ones")
    options.add_argument("--sets", default="", help="some of split, content, count, by name, with commas")
    given = options.parse_args()
    commands.begin(given.threads)
    model, tokenizer = models.load(given.model)
    own = (models.MODELS / given.model / "items.json").is_file()
    settings = {"neutral": None if own else NEUTRAL, "value": "new", "dtype": "float32"}
    run = commands.run_of("composing", given.model, settings, given.quick)
    for part in PARTS:
        items = items_of(given.model, part, given.scale, given.quick)
        if not items or (given.sets and part.test not in given.sets.split(",")):
            continue
        label: dict[str, Any] = {"model_name": f"{given.model} {part.task} {part.mode}"}
        if part.test == "split":
            run_split(model, tokenizer, items, run, points=part.points, **label)
        elif part.test == "count":
            counts = COUNTS[:1] if given.quick else COUNTS
            run_counts(model, tokenizer, items, run, counts=counts, points=part.points, **label)
        else:
            sweep = CONTENTS if own else part.sweep
            run_contents(model, tokenizer, items, run, contents=part.contents, points=part.points, sweep=sweep, **label)
    print("\n".join(described(list(run.results().rows))))
    run.finish()


def described(rows: list[Row]) -> list[str]:
    """Lines of text: every set with intervals, and what the border in a memory costs."""
    names = ("task", "mode", "content", "point", "seam", "rotated")
    lines = table(grouped([row for row in rows if row["test"] == "content"], names, MEASURES))
    lines += table(grouped([row for row in rows if row["test"] == "count"], ("test", "point", "chunks"), MEASURES))
    split = [row for row in rows if row["test"] == "split"]
    lines += table(grouped(split, ("test", "point", "border"), MEASURES))
    for point in dict.fromkeys(row["point"] for row in split):
        by_border = {
            border: [row["agrees"] for row in split if row["border"] == border and row["point"] == point]
            for border in BORDERS
        }
        test = mcnemar(by_border["together"], by_border["split"])
        here = [row for row in split if row["point"] == point]
        lines.append(
            f"  memory at the {point}: agrees together less split, McNemar {test.statistic:+.0f}, p {test.p:.3g}"
        )
        for measure in ("agrees", "correct", "cosine"):
            lines.append(f"    {measure}: {paired(here, 'border', 'together', 'split', measure)}")
    return lines


if __name__ == "__main__":
    main()
