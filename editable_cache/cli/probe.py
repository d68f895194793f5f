"""``probe``: where a model keeps its notes of a decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from editable_cache.cli.loading import ModelOptions, load_model
from editable_cache.cli.options import (
    Adapter,
    AnyModel,
    Device,
    Json,
    ModelDtype,
    ModelName,
    ModelRevision,
    Neutral,
    Seed,
    Tasks,
    Trust,
    require_built_in_only,
)
from editable_cache.cli.screen import Screen, command, line, table

if TYPE_CHECKING:
    from editable_cache.evaluation.probes.study import Inclusion
    from editable_cache.evaluation.probes.summary import Line, Series
    from editable_cache.evaluation.results import Results
    from editable_cache.evaluation.tasks import Item

MOST_POINTS = 9
"""Points of a series that the table shows; of a longer one it shows the largest."""

Probes = Annotated[str, typer.Option("--probes", metavar="A,B", help="Probes to run; all by default.")]
Items = Annotated[int, typer.Option("--items", min=1, help="Items of each built-in task.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="DIR", help="Results and pictures; a stopped run goes on.", show_default=False),
]


def probe(
    context: typer.Context,
    model: ModelName,
    tasks: Tasks = None,
    probes: Probes = "",
    items: Items = 20,
    neutral: Neutral = 10,
    seed: Seed = 0,
    any_model: AnyModel = False,
    out: Out = None,
    adapter: Adapter = None,
    dtype: ModelDtype = None,
    device: Device = "cpu",
    model_revision: ModelRevision = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Which tokens hold a model's notes of a decision, and what reads them?

    Each item's prompt is read with two values of a field, or two words in its rule. Cells and head outputs of one are
    then put into the other, and it is seen how far the decision follows. Exit code 0 when it was measured, 2 if it
    could not be: unknown probe, empty task file, a model below the inclusion gate or with another kind of cache.
    """
    with command(as_json) as screen:
        from editable_cache.evaluation.probes.pictures import draw, require_matplotlib
        from editable_cache.evaluation.probes.registry import chosen
        from editable_cache.evaluation.probes.study import STUDY, run_probes
        from editable_cache.evaluation.probes.summary import lines
        from editable_cache.evaluation.results import Run
        from editable_cache.evaluation.tasks import digest

        wanted = chosen([name.strip() for name in probes.split(",") if name.strip()])
        if out is not None:
            require_matplotlib()
        asked = _items(context, tasks, items, neutral, seed)
        options = ModelOptions(model, adapter, dtype, device, model_revision, trust_remote_code)
        settings = {
            "probes": [each.name for each in wanted],
            "items": [item.key for item in asked],
            "digest": digest(asked),
            "any_model": any_model,
            "adapter": adapter,
            "revision": model_revision,
            "dtype": None if dtype is None else dtype.value,
        }
        run = Run(None if out is None else out / f"{STUDY}.json", study=STUDY, model=model, settings=settings)
        loaded = load_model(screen, options)
        included = run_probes(
            loaded.model,
            loaded.tokenizer,
            asked,
            run,
            probes=wanted,
            model_name=model,
            any_model=any_model,
            progress=screen.is_watched,
            observe=screen.note,
        )
        results = run.finish()
        drawn = [] if out is None else draw(results, out)
        found = lines(results.rows)
        facts = {
            "ok": True,
            "model": model,
            "inclusion": [asdict(each) for each in included],
            "lines": [each.facts() for each in found],
            "results": None if out is None else str(out / f"{STUDY}.json"),
            "pictures": [str(path) for path in drawn],
        }
        _answer(screen, facts, results, included, found)


def _items(context: typer.Context, tasks: Path | None, count: int, neutral: int, seed: int) -> list[Item]:
    from editable_cache.evaluation.probes.pairs import RULE_TASKS
    from editable_cache.evaluation.probes.study import OTHER_TASKS, SWEPT, TURNED, items_of, turned
    from editable_cache.evaluation.tasks import read_items

    if tasks is not None:
        require_built_in_only(context, "items", "neutral", "seed")
        own = read_items(tasks).items
        return [*own, *turned(item for item in own if item.task not in RULE_TASKS)]
    names = (SWEPT, TURNED, "trigger", *OTHER_TASKS)
    return [item for task in names for item in items_of(task, count, neutral=neutral, seed=seed)]


def _answer(
    screen: Screen,
    facts: dict[str, object],
    results: Results,
    included: Sequence[Inclusion],
    found: Sequence[Line],
) -> None:
    from editable_cache.evaluation.probes.registry import PROBES
    from editable_cache.evaluation.probes.summary import series

    rows = (
        (each.task, each.items, each.included, f"{each.accuracy:.2f}", "yes" if each.passed else "no",
         "; ".join(f"{reason}: {count}" for reason, count in each.left_out.items()))
        for each in included
    )  # fmt: skip
    parts: list[RenderableType] = [
        line(f"{results.model}: recovery 0 is the first prompt's decision, 1 the other's; 95 % intervals over domains"),
        table("items", ("task", "asked", "included", "decided right", "gate", "left out"), rows),
    ]
    together = series(found)
    for name, its in PROBES.items():
        mine = [each for each in together if each.probe == name]
        if mine:
            cells = ((each.task, each.measure, each.arm, _points(each)) for each in mine)
            parts.append(table(f"\n{name}: {its.question}", ("task", "measure", "arm", "mean [interval]"), cells))
    screen.answer(facts, parts)


def _points(found: Series) -> str:
    """The numbers of an arm; of many, the largest and where it is."""
    shown = list(found.points)
    if len(shown) > MOST_POINTS:
        best = max(shown, key=lambda point: point.interval.mean)
        return f"most at {best.x:g}: {_interval(best)}; of {len(shown)}"
    return ", ".join(_interval(point) if point.x is None else f"{point.x:g}: {_interval(point)}" for point in shown)


def _interval(point: Line) -> str:
    found = point.interval
    return f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"
