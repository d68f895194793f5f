"""Where a model keeps its notes: all probes of the study's section 3 and appendices C and D.

    cd benchmarks && ../.venv/bin/python -m evidence.mechanism gatekeeper [--quick] [--threads N] [--items N]

Writes ``results/evidence/mechanism-MODEL.json`` and the pictures beside it, in ``mechanism-MODEL/``. A model below the
inclusion gate is refused unless ``--any-model`` is given: then it is a control. A small model gets the items of its own
vocabulary that lie beside it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from editable_cache.evaluation.probes.pictures import draw
from editable_cache.evaluation.probes.registry import PROBES
from editable_cache.evaluation.probes.study import OTHER_TASKS, STUDY, SWEPT, TURNED, items_of, run_probes, turned
from editable_cache.evaluation.probes.summary import lines
from editable_cache.evaluation.tasks import Item, read_items
from evidence.commands import RESULTS, begin, parser, run_of
from evidence.models import MODELS, load

NEUTRAL = 10
"""Neutral rules: prompts of about 400 tokens."""

MAIN_TASKS = (SWEPT, TURNED, "trigger")

ITEMS, OWN_ITEMS, SIDE_ITEMS, QUICK_ITEMS = 10, 40, 10, 4


def main() -> None:
    """The command."""
    options = parser(__doc__, "two tasks, few items, a short policy")
    options.add_argument("--items", type=int, help="items of each task; another number is another measurement")
    options.add_argument("--any-model", action="store_true")
    arguments = options.parse_args()
    begin(arguments.threads)
    own = MODELS / arguments.model / "items.json"
    if own.is_file():
        items = beside(read_items(own).items, QUICK_ITEMS if arguments.quick else arguments.items or OWN_ITEMS)
    else:
        items = asked(arguments.items or ITEMS, quick=arguments.quick)
    settings = {"items": [item.key for item in items], "neutral": NEUTRAL, "any_model": arguments.any_model}
    run = run_of(STUDY, arguments.model, settings, arguments.quick)
    model, tokenizer = load(arguments.model)
    started = time.time()
    run_probes(
        model,
        tokenizer,
        items,
        run,
        probes=tuple(PROBES.values()),
        model_name=arguments.model,
        any_model=arguments.any_model,
        observe=lambda text: print(f"{time.time() - started:6.0f} s  {text}", flush=True),
    )
    results = run.finish()
    for line in lines(results.rows):
        at = "" if line.x is None else f" {line.x:g}"
        print(f"{line.probe} {line.task}: {line.measure} {line.arm}{at}: {line.interval} (n = {line.interval.n})")
    if not arguments.quick:
        draw(results, RESULTS / f"{STUDY}-{arguments.model}")


def asked(count: int, *, quick: bool) -> list[Item]:
    """The items: half as many of each side task, which only ask where the note stands."""
    if quick:
        return [item for task in MAIN_TASKS[:2] for item in items_of(task, QUICK_ITEMS, neutral=2)]
    side = [item for task in OTHER_TASKS for item in items_of(task, min(count, SIDE_ITEMS), neutral=NEUTRAL)]
    main = [item for task in MAIN_TASKS for item in items_of(task, count, neutral=NEUTRAL)]
    return [*main, *side]


def beside(items: Sequence[Item], count: int) -> list[Item]:
    """Up to ``count`` items of each task of a small model, those with direct answers, from many domains."""
    direct = [item for item in items if item.mode == "direct"]
    found = []
    for task in dict.fromkeys(item.task for item in direct):
        mine = [item for item in direct if item.task == task]
        found += mine[:: max(1, len(mine) // count)][:count]
    return [*found, *turned(item for item in found if item.task == SWEPT)]


if __name__ == "__main__":
    main()
