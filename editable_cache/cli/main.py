"""The application: ``editable-cache``. Commands import what they need when they run."""

from __future__ import annotations

from typing import Annotated

import typer

import editable_cache
from editable_cache.cli.check import check
from editable_cache.cli.diff import diff
from editable_cache.cli.evaluate import evaluate
from editable_cache.cli.inspect import inspect
from editable_cache.cli.precompile import precompile
from editable_cache.cli.probe import probe
from editable_cache.cli.report import report
from editable_cache.cli.share import pull, push
from editable_cache.cli.verify import verify

app = typer.Typer(
    name="editable-cache",
    help="Compile texts into skills (keys and values of a language model), look at them, check them, share them.",
    epilog="Exit codes: 0 yes or done, 1 checked and the answer is no, 2 it could not be done or decided.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"editable-cache {editable_cache.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """What stands in front of every command."""


def _examples(*lines: str) -> str:
    return "\n\n".join(("[bold]Examples[/bold]", *(f"  {line}" for line in lines)))


app.command(
    epilog=_examples(
        "editable-cache check HuggingFaceTB/SmolLM2-135M-Instruct",
        "editable-cache check ./my-model --dtype bfloat16 --json",
    )
)(check)
app.command(
    epilog=_examples(
        "editable-cache precompile HuggingFaceTB/SmolLM2-135M-Instruct policy.txt -o refund-policy",
        "cat policy.txt | editable-cache precompile ./my-model - -o policy --name refund-policy --storage int8",
    )
)(precompile)
app.command(
    epilog=_examples(
        "editable-cache inspect ./refund-policy",
        "editable-cache inspect org/refund-policy --model HuggingFaceTB/SmolLM2-135M-Instruct",
    )
)(inspect)
app.command(
    epilog=_examples("editable-cache diff ./old-policy ./new-policy", "editable-cache diff ./policy org/policy")
)(diff)
app.command(
    epilog=_examples(
        "editable-cache push ./refund-policy org/refund-policy --license apache-2.0",
        "editable-cache push ./refund-policy org/refund-policy --storage int8 --create-pr",
    )
)(push)
app.command(
    epilog=_examples(
        "editable-cache pull org/refund-policy -o refund-policy",
        "editable-cache pull org/refund-policy -o refund-policy --model HuggingFaceTB/SmolLM2-135M-Instruct",
    )
)(pull)
app.command(
    epilog=_examples(
        "editable-cache verify ./refund-policy --model HuggingFaceTB/SmolLM2-135M-Instruct",
        "editable-cache verify org/refund-policy --model ./my-model --tokens 128 --seed 7 --json",
    )
)(verify)
app.command(
    "eval",
    epilog=_examples(
        "editable-cache eval HuggingFaceTB/SmolLM2-135M-Instruct --adapter benchmarks/models/gatekeeper -o edits.json",
        "editable-cache eval ./my-model --tasks items.json --arms stale,erratum,full --json",
    ),
)(evaluate)
app.command(
    epilog=_examples(
        "editable-cache report benchmarks/results/evidence -o report.html",
        "editable-cache report edits.json probes.json --json",
    )
)(report)
app.command(
    epilog=_examples(
        "editable-cache probe ./my-model -o notes",
        "editable-cache probe ./my-model --adapter ./my-lora --tasks decisions.json --probes locality,heads --json",
    )
)(probe)
