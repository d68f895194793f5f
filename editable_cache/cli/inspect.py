"""``inspect``: what a skill says about itself, without its cells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from editable_cache.cli.facts import candidate_json, size
from editable_cache.cli.loading import ModelOptions, find_builds, load_model
from editable_cache.cli.options import (
    Adapter,
    BuildName,
    Device,
    Json,
    ModelDtype,
    ModelRevision,
    OtherModel,
    Revision,
    Source,
    Trust,
)
from editable_cache.cli.screen import NO, YES, command, line, shown, table
from editable_cache.errors import ArtifactError

SHOWN_TOKENS = 20
Characters = Annotated[int, typer.Option("--chars", min=0, help="How much of the end of the text to show.")]


def inspect(
    skill: Source,
    model: OtherModel = None,
    build: BuildName = None,
    revision: Revision = None,
    chars: Characters = 300,
    adapter: Adapter = None,
    dtype: ModelDtype = None,
    device: Device = "cpu",
    model_revision: ModelRevision = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Show every build of a skill: model, size, provenance, control tokens, the end of its text; with --model, the fit.

    Of a skill on the Hub only the manifests are downloaded. The recorded text is whatever its author wrote there: the
    ids are the truth, and --model shows them decoded. Exit code 0, or with --model 1 if no build fits, 2 if it can't
    be read.
    """
    with command(as_json) as screen:
        loaded = None
        if model is not None:
            options = ModelOptions(model, adapter, dtype, device, model_revision, trust_remote_code)
            loaded = load_model(screen, options)
        found = find_builds(screen, skill, revision, loaded)
        chosen = [each for each in found.candidates if build in (None, each.label)]
        if not chosen:
            raise ArtifactError(
                f"{skill}: expected a build {build!r}, got {[each.label for each in found.candidates]}."
            )
        if all(each.build is None for each in chosen):
            raise ArtifactError(chosen[0].reasons[0].got)
        tokenizer = None if loaded is None else loaded.tokenizer
        builds = [candidate_json(each, tokenizer, asked=loaded is not None, characters=chars) for each in chosen]
        fits = None if loaded is None else any(each["fits"] for each in builds)
        facts = {"ok": fits is not False, "skill": skill, "model": model, "fits": fits, "builds": builds}
        screen.answer(facts, _parts(facts), NO if fits is False else YES)


def _parts(facts: dict[str, Any]) -> Iterable[RenderableType]:
    for build in facts["builds"]:
        yield line(f"{facts['skill']}: build {build['build'] or '(the only one)'}")
        if build["readable"]:
            yield table("", ("fact", "value"), [pair for pair in _rows(build) if pair[1] not in (None, "")])
            texts = (
                ("compiled behind", build["prefix_tail"]),
                ("recorded text", build["text_tail"]),
                ("decoded ids", build["decoded_tail"]),
            )
            for title, text in texts:
                if text:
                    yield line(f"  {title}, the end:")
                    yield from ("  | " + shown(each) for each in text.split("\n"))
        yield from _fit(build)
        yield ""


def _rows(build: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    model, origin, provenance = build["model"], build["origin"], build["provenance"]
    at = f" at {model['revision'][:12]}" if model["revision"] else ""
    yield "name", build["name"]
    yield "tokens", f"{build['tokens']} from position {build['first_position']}"
    yield "model", f"{model['repo'] or model['model_type']}{at}, {model['dtype']}"
    yield "weights", f"{model['weights'][:16]}" + (f", adapters {model['adapters'][:16]}" if model["adapters"] else "")
    yield "storage", f"{build['storage']}, {size(build['bytes'])}" + ("" if build["downloaded"] else ", not downloaded")
    seen = f"behind {provenance['prefix_tokens']} tokens" if provenance["prefix_tokens"] else "alone"
    yield "provenance", f"{provenance['how']} {'of parts' if provenance['parts'] else seen}"
    yield "note", provenance["note"]
    for part in provenance["parts"]:
        note = f" ({part['note']})" if part["note"] else ""
        yield (
            f"part {part['start']} to {part['stop']}",
            f"{part['name'] or 'unnamed'}, behind {part['prefix_tokens']} tokens{note}",
        )
    yield "attention", origin["attention"]
    yield "tokenizer", origin["tokenizer"]
    yield "adapters", ", ".join(f"{name} x {scale:g}" for name, scale in origin["adapters"].items())
    yield "versions", ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    yield "images", build["images"] or None
    yield "live ends", build["live_ends"] and "{} and {} tokens".format(*build["live_ends"])
    yield "compressed layers", len(build["compressed_layers"]) or None
    tokens = build["control_tokens"]
    listed = ", ".join(f"{each['text']!r} at {each['slot']}" for each in tokens[:SHOWN_TOKENS])
    yield (
        "control tokens",
        f"{len(tokens)}: {listed}" + (" ..." if len(tokens) > SHOWN_TOKENS else "") if tokens else "none",
    )


def _fit(build: dict[str, Any]) -> Iterator[str]:
    if not build["readable"]:
        yield line("  unreadable:")
    elif build["fits"] is not None:
        convertible = " (the weights are the same: from_pretrained(dtype=) converts)" if build["convertible"] else ""
        yield line(f"  fits the model: {'yes' if build['fits'] else 'no'}{convertible}")
    for each in build["reasons"]:
        yield line(f"  - {each['what']}: expected {each['expected']}, got {each['got']}")
