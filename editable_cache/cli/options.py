"""Options that several commands have."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Dtype(str, Enum):
    """Dtypes of a model."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Storages(str, Enum):
    """How cells are stored."""

    ORIGINAL = "original"
    INT8 = "int8"
    FP8 = "fp8"


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="A model on the Hub, or a local folder.")]
NeededModel = Annotated[
    str, typer.Option("--model", metavar="MODEL", help="A model on the Hub, or a local folder.", show_default=False)
]
OtherModel = Annotated[str | None, typer.Option("--model", metavar="MODEL", help="Compare with this model.")]
Adapter = Annotated[
    str | None, typer.Option("--adapter", metavar="PEFT", help="A PEFT adapter on top of the model (a folder).")
]
ModelDtype = Annotated[
    Dtype | None, typer.Option("--dtype", help="Load the model in this dtype, not its own.", show_default=False)
]
Device = Annotated[str, typer.Option("--device", metavar="NAME", help="Where the model runs, for instance cuda.")]
Tasks = Annotated[
    Path | None,
    typer.Option("--tasks", metavar="FILE", help="Your own items; see docs/evaluation.md.", show_default=False),
]
Neutral = Annotated[int, typer.Option("--neutral", min=0, help="Rules of the policy that decide nothing (its length).")]
Seed = Annotated[int, typer.Option("--seed", help="The same seed gives the same items.")]
AnyModel = Annotated[bool, typer.Option("--any-model", help="Measure a model below the inclusion gate, too.")]
ModelRevision = Annotated[
    str | None,
    typer.Option("--model-revision", metavar="REV", help="Branch, tag or commit of the model on the Hub."),
]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code from the model's repository, which can do anything.")
]
Source = Annotated[
    str,
    typer.Argument(metavar="SKILL", help="A folder, a local copy of a repository, or organization/name on the Hub."),
]
BuildName = Annotated[
    str | None, typer.Option("--build", metavar="NAME", help="The build to take, by its name in the repository.")
]
Revision = Annotated[
    str | None, typer.Option("--revision", metavar="REV", help="Branch, tag or commit of the skill on the Hub.")
]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The folder to write.", show_default=False)]


def require_built_in_only(context: typer.Context, *names: str) -> None:
    """Refuse options that choose built-in items, where the items come from a file; ``names`` are those of parameters.

    Raises:
        TaskError: with the options that were given.
    """
    from editable_cache.errors import TaskError

    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    sources = {name: context.get_parameter_source(name) for name in names}
    given = [flags[name] for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        raise TaskError(
            f"{', '.join(given)}: these choose built-in items, but --tasks gives items; leave out one side."
        )
