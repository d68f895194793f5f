"""The edit frontier: ``python -m evidence.frontier MODEL [--quick]`` writes ``results/evidence/frontier-MODEL.json``.

Sets of items, each with its arms: ``direct`` and ``cot`` (the study's table 6, figures 2 and 5), ``near`` and ``far``
(where the binding rule stands; contiguous window against scattered tokens), ``wordings`` of the correcting line, and
``tasks`` off the template. A stopped run goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from editable_cache.evaluation.arms import ERRATA, FRONTIER
from editable_cache.evaluation.studies.frontier import possible, run_frontier
from editable_cache.evaluation.studies.summary import by_arm
from editable_cache.evaluation.tasks import DOMAINS, Item, Mode, build, read_items
from evidence import commands, models

COUNTS = (8, 32, 64)
CHAINED = ("stale", "in_place", "window@32", "repair@32", "cacheblend@15%", "suffix", "erratum", "field+erratum")
REGIME = (
    "stale",
    "in_place",
    *(f"{kind}@{count}" for count in COUNTS for kind in ("window", "selective", "repair")),
    "random@32",
    "suffix",
)
WORDED = ("stale", *(f"{kind}:{wording}" for wording in ERRATA for kind in ("erratum", "field+erratum")), "full")
TASKS = ("two_hop", "free_form", "lookup", "tool_call", "cross_reference")
BRIEF = ("stale", "in_place", "window@32", "suffix", "erratum", "field+erratum", "full")


@dataclass(frozen=True)
class Part:
    """One set: which items, and which arms."""

    name: str
    arms: Sequence[str]
    tasks: Sequence[str] = ("gated",)
    mode: Mode = "direct"
    far: bool = False
    neutral: int = 20


PARTS = (
    Part("direct", FRONTIER),
    Part("cot", (*CHAINED, "hoist", "full"), mode="cot", neutral=12),
    Part("near", REGIME, neutral=12),
    Part("far", REGIME, far=True, neutral=12),
    Part("wordings", WORDED, neutral=12),
    Part("wordings-cot", WORDED, mode="cot", neutral=6),
    *(Part(task, BRIEF, tasks=(task,), neutral=6) for task in TASKS),
)
ITEMS = {"direct": 40, "cot": 40, "wordings": 20}
SIDE_ITEMS = 10
"""Of each other set."""


def items_of(model: str, part: Part, most: int, quick: bool) -> tuple[list[Item], str | None]:
    """The items of a set for a model, and the wording of its correcting line if the model has its own.

    Args:
        most: at most so many; a small model's own items are few and quick, and all are taken.
    """
    path = models.MODELS / model / "items.json"
    if path.is_file():  # a small vocabulary, with items in it
        own = read_items(path)
        kept = [item for item in own.items if item.mode == part.mode and item.task in part.tasks]
        if part.far or part.name.startswith(("near", "wordings")):
            kept = []
        return (kept[:4] if quick else kept), own.erratum
    count = 1 if quick else min(most, ITEMS.get(part.name, SIDE_ITEMS))
    per_domain = -(-count // len(DOMAINS))
    found = [
        item
        for task in part.tasks
        for item in build(task, per_domain=per_domain, mode=part.mode, neutral=part.neutral, far=part.far)
    ]
    return commands.in_turn(found, count), None


def main() -> None:
    """The command."""
    arguments = commands.parser(__doc__, "one item of each set")
    arguments.add_argument("--sets", default="", help="some of the sets, by name, with commas; adds to others")
    arguments.add_argument(
        "--items", type=int, default=max(ITEMS.values()), help="of each set at most; adds to finished ones"
    )
    given = arguments.parse_args()
    names = [part.name for part in PARTS]
    wanted = [name for name in given.sets.split(",") if name] or names
    if unknown := set(wanted) - set(names):
        arguments.error(f"--sets: expected some of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    commands.begin(given.threads)
    model, tokenizer = models.load(given.model)
    described = {part.name: vars(part) for part in PARTS}
    run = commands.run_of("frontier", given.model, {"sets": described, "dtype": "float32"}, given.quick)
    for part in PARTS:
        items, erratum = items_of(given.model, part, given.items, given.quick)
        if part.name not in wanted or not items:
            continue
        options: dict[str, Any] = {
            "arms": possible(part.arms, items, model),
            "erratum": erratum,
            "label": part.name,
            "any_model": True,
        }
        gate = run_frontier(model, tokenizer, items, run, model_name=f"{given.model} {part.name}", **options)
        print(f"\n{given.model}, {part.name}: {gate}")
        for row in by_arm([row for row in run.results().rows if row.get("set") == part.name]):
            print(f"  {row['arm']:28} correct {row['correct']} recovery {row['recovery']} share {row['share']:.3f}")
    run.finish()


if __name__ == "__main__":
    main()
