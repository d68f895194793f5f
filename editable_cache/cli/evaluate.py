"""``eval``: put a model's decisions through the arms of an edit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

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
from editable_cache.cli.screen import command, line, table

Task = Annotated[
    str, typer.Option("--task", help="A built-in task: gated, trigger, two_hop, free_form, tool_call, ...")
]
Arms = Annotated[
    str | None,
    typer.Option(
        "--arms",
        metavar="A,B",
        help="Arms to compare; by default all of the frontier that items and model allow.",
        show_default=False,
    ),
]
ModeName = Annotated[
    str | None,
    typer.Option(
        "--mode",
        help="direct, or cot: a chain of thought first. Of a task file only such items; without it, all of the file, "
        "and built-in tasks are asked direct.",
        show_default=False,
    ),
]
PerDomain = Annotated[int, typer.Option("--items", help="Items from each of the ten domains.")]
Far = Annotated[bool, typer.Option("--far", help="The binding rule stands last in the policy, not first.")]
Output = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FILE", help="Results as JSON; a stopped run goes on.", show_default=False),
]


def evaluate(
    context: typer.Context,
    model: ModelName,
    tasks: Tasks = None,
    task: Task = "gated",
    arms: Arms = None,
    mode: ModeName = None,
    per_domain: PerDomain = 2,
    neutral: Neutral = 20,
    far: Far = False,
    seed: Seed = 0,
    any_model: AnyModel = False,
    out: Output = None,
    adapter: Adapter = None,
    dtype: ModelDtype = None,
    device: Device = "cpu",
    model_revision: ModelRevision = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Which edit of a cache recovers a decision, and what does it compute?

    Each item is read with a field's old value; then the field changes, each arm does what it does, and the model
    decides. Exit code 0 when it was measured, 2 if it could not be: unknown arm, empty task file, a model below the
    inclusion gate, results of another version.
    """
    with command(as_json) as screen:
        from editable_cache.errors import TaskError
        from editable_cache.evaluation.arms import FRONTIER, arm
        from editable_cache.evaluation.results import Run
        from editable_cache.evaluation.studies.frontier import possible, require_possible, run_frontier
        from editable_cache.evaluation.studies.summary import by_arm
        from editable_cache.evaluation.tasks import build, digest, read_items

        asked = _mode(mode)
        given = None
        if tasks is not None:
            require_built_in_only(context, "task", "per_domain", "neutral", "far", "seed")
            given = read_items(tasks)
            items = [item for item in given.items if asked in (None, item.mode)]
            if not items:
                raise TaskError(f"Task file {tasks}: expected an item in the mode {mode}, got none.")
        else:
            items = build(task, per_domain=per_domain, mode=asked or "direct", neutral=neutral, far=far, seed=seed)
        chosen = [name.strip() for name in (arms or "").split(",") if name.strip()]
        if arms is not None and not chosen:
            raise TaskError(f"--arms: expected at least one arm, got {arms!r}; leave the option out for all of them.")
        for name in chosen:
            arm(name)
        require_possible(chosen, items)
        options = ModelOptions(model, adapter, dtype, device, model_revision, trust_remote_code)
        settings = {
            "arms": chosen or "possible",
            "items": [item.key for item in items],
            "digest": digest(items, None if given is None else given.erratum),
            "adapter": adapter,
            "revision": model_revision,
            "dtype": None if dtype is None else dtype.value,
        }
        run = Run(out, study="frontier", model=model, settings=settings)
        loaded = load_model(screen, options)
        gate = run_frontier(
            loaded.model,
            loaded.tokenizer,
            items,
            run,
            arms=chosen or possible(FRONTIER, items, loaded.model),
            erratum=None if given is None else given.erratum,
            any_model=any_model,
            model_name=model,
        )
        rows = by_arm(run.finish().rows)
        facts = {
            "ok": True,
            "model": model,
            "gate": {"old": gate.old, "new": gate.new, "update": gate.update, "items": gate.n},
            "arms": rows,
            "results": None if out is None else str(out),
        }
        screen.answer(facts, _shown(gate, rows))


def _mode(name: str | None) -> Literal["direct", "cot"] | None:
    from editable_cache.errors import TaskError

    if name is None:
        return None
    if name == "direct":
        return "direct"
    if name == "cot":
        return "cot"
    raise TaskError(f"--mode: expected direct or cot, got {name!r}.")


def _shown(gate: Any, rows: list[dict[str, Any]]) -> list[RenderableType]:
    cells = (
        (row["arm"], _interval(row["correct"]), _interval(row["recovery"]), f"{row['share']:.1%}", row["n"])
        for row in rows
    )
    head = (
        f"full prefills decide right: {gate.old:.2f} (old value), {gate.new:.2f} (new), {gate.update:.2f} (old value "
        f"and an update); {gate.n} items"
    )
    return [line(head), table("", ("arm", "correct", "recovery", "tokens run", "items"), cells)]


def _interval(found: list[float] | None) -> str:
    return "" if found is None else f"{found[0]:.2f} [{found[1]:.2f}, {found[2]:.2f}]"
