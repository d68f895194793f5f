"""``precompile``: from a text file to a folder with a skill."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from editable_cache.cli.facts import model_line, size
from editable_cache.cli.loading import ModelOptions, load_model
from editable_cache.cli.options import Adapter, Device, Json, ModelDtype, ModelName, ModelRevision, Out, Storages, Trust
from editable_cache.cli.screen import command, line
from editable_cache.errors import ArtifactError, SpanError

TextFile = Annotated[str, typer.Argument(metavar="TEXTFILE", help="A UTF-8 text, or - for the standard input.")]
Name = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="What the skill is called; the file's name by default.")
]
Prefix = Annotated[
    str | None,
    typer.Option(
        "--prefix",
        metavar="TEXT",
        help="What the text sees before it while it is compiled; by default the BOS token where the tokenizer adds "
        "one. Empty to compile alone.",
    ),
]
StorageOption = Annotated[Storages, typer.Option("--storage", help="int8 and fp8 are smaller and cost accuracy.")]


def precompile(
    model: ModelName,
    textfile: TextFile,
    out: Out,
    name: Name = None,
    adapter: Adapter = None,
    storage: StorageOption = Storages.ORIGINAL,
    prefix: Prefix = None,
    dtype: ModelDtype = None,
    device: Device = "cpu",
    model_revision: ModelRevision = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Compute the keys and values of a text once and write them to a folder.

    What the folder held before stays valid until the end. Exit code 0 if it was written, else 2.
    """
    with command(as_json) as screen:
        from editable_cache.hub.schema import NAME, is_name

        title = name if name is not None else "skill" if textfile == "-" else Path(textfile).stem
        if not is_name(title):
            raise SpanError(f"precompile: expected a name of {NAME}, got {title!r:.80}; say another with --name.")
        if out.exists() and not out.is_dir():
            raise ArtifactError(f"{out}: expected a folder, or nothing yet, got a file; choose another with -o.")
        text = _read(textfile)
        options = ModelOptions(model, adapter, dtype, device, model_revision, trust_remote_code)
        loaded = load_model(screen, options)
        from editable_cache.forward.run import PREFILL_TOKENS, PROGRESS_FROM
        from editable_cache.hub.build import open_build
        from editable_cache.skill import Skill

        tokens = len(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])
        start = time.perf_counter()
        # From so many forwards on the library shows its own bar.
        own_bar = tokens > PREFILL_TOKENS * (PROGRESS_FROM - 1)
        with screen.stage(f"compiling {tokens} tokens", own_bar=own_bar):
            how: dict[str, Any] = {} if prefix is None else {"prefix": prefix}
            skill = Skill.precompile(loaded.model, loaded.tokenizer, text, name=title, **how)
        seconds = time.perf_counter() - start
        with screen.stage(f"writing {size(skill.nbytes)}"):
            skill.save_pretrained(out, storage=storage.value)
        build = open_build(out)
        facts = {
            "ok": True,
            "folder": str(out),
            "name": skill.name,
            "tokens": len(skill),
            "prefix_tokens": len(skill.provenance.prefix_ids),
            "dtype": skill.model.dtype,
            "storage": build.storage,
            "bytes": build.payload.num_bytes,
            "seconds": seconds,
        }
        told = (
            f"{out}: {skill.name}, {len(skill)} tokens ({skill.provenance}), {model_line(build)}, "
            f"{size(build.payload.num_bytes)} in {build.storage}, compiled in {seconds:.1f} s"
        )
        screen.answer(facts, [line(told)])


def _read(textfile: str) -> str:
    data = sys.stdin.buffer.read() if textfile == "-" else Path(textfile).read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{textfile}: expected UTF-8 text, got {error.reason} at byte {error.start}.") from error
    if not text:
        raise SpanError(f"{textfile}: expected a text, got none.")
    return text
