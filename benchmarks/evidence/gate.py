"""Which decisions a model takes: ``python -m evidence.gate MODEL [--quick]`` writes ``evidence/gate-MODEL.json``.

Plain full prefills with the old value, the new value, and the old value with a line behind the context that updates
it; no edit anywhere. Short and long policies, direct and with a chain of thought, in domains and wordings that no model
here was trained on.
"""

from __future__ import annotations

from editable_cache.evaluation.gate import measure_gate
from editable_cache.evaluation.tasks import Item, Mode, build, read_items
from evidence import commands, models

CELLS: tuple[tuple[str, Mode, int, int], ...] = (
    ("gated", "direct", 3, 4),
    ("gated", "cot", 3, 2),
    ("gated", "direct", 30, 2),
    ("gated", "cot", 30, 2),
    ("trigger", "direct", 10, 2),
)
"""Task, mode, neutral rules, items from each domain."""


def main() -> None:
    """The command."""
    given = commands.parser(__doc__, "two items of each kind").parse_args()
    commands.begin(given.threads)
    model, tokenizer = models.load(given.model)
    run = commands.run_of("gate", given.model, {"cells": CELLS, "dtype": "float32"}, given.quick)
    for name, items, erratum in _cells(given.model):
        chosen = items[:2] if given.quick else items
        print(f"{given.model}, {name}: {measure_gate(model, tokenizer, chosen, run, erratum=erratum)}", flush=True)
    run.finish()


def _cells(model: str) -> list[tuple[str, list[Item], str | None]]:
    path = models.MODELS / model / "items.json"
    if path.is_file():  # a small vocabulary, with items in it
        own = read_items(path)
        kinds = sorted({(item.task, item.mode) for item in own.items})
        return [
            (f"{task} {mode}", [item for item in own.items if (item.task, item.mode) == (task, mode)], own.erratum)
            for task, mode in kinds
        ]
    return [
        (f"{task} {mode}, {neutral} neutral rules", build(task, per_domain=count, mode=mode, neutral=neutral), None)
        for task, mode, neutral, count in CELLS
    ]


if __name__ == "__main__":
    main()
