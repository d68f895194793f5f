"""``verify``: compute a sample of a skill's cells again and compare."""

from __future__ import annotations

from typing import Annotated

import typer

from editable_cache.cli.loading import ModelOptions, load_model, quiet
from editable_cache.cli.options import (
    Adapter,
    BuildName,
    Device,
    Json,
    ModelDtype,
    ModelRevision,
    NeededModel,
    Revision,
    Source,
    Trust,
)
from editable_cache.cli.screen import ERROR, NO, YES, command, line, reasons_json

Tokens = Annotated[int, typer.Option("--tokens", min=1, help="How many tokens to compute again, the first among them.")]
Seed = Annotated[int, typer.Option("--seed", help="Chooses the sample.")]


def verify(
    skill: Source,
    model: NeededModel,
    tokens: Tokens = 32,
    seed: Seed = 0,
    build: BuildName = None,
    revision: Revision = None,
    adapter: Adapter = None,
    dtype: ModelDtype = None,
    device: Device = "cpu",
    model_revision: ModelRevision = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Compute a sample of a skill's cells again from its ids and compare: were they computed from these ids at all?

    Forged or damaged cells of sampled tokens show; those of other tokens need not. What is stored in 8 bits, and chunks
    of recurrent models, are computed whole. Exit code 0 if all are equal, 1 if some are not, 2 if it can't be decided.
    """
    with command(as_json) as screen:
        options = ModelOptions(model, adapter, dtype, device, model_revision, trust_remote_code)
        loaded = load_model(screen, options)
        from editable_cache.published import PublishedChunk

        with screen.stage(f"reading {skill}", own_bar=True), quiet(screen):
            chunk = PublishedChunk.from_pretrained(
                skill,
                model=loaded.model,
                tokenizer=loaded.tokenizer,
                build=build,
                revision=revision,
                exact=True,
                control_tokens="allow",
            )
        with screen.stage("computing"):
            found = chunk.verify(loaded.model, loaded.tokenizer, num_tokens=tokens, seed=seed)
        facts = {
            "ok": found.ok,
            "decided": not found.undecided,
            "skill": skill,
            "model": model,
            "name": chunk.name,
            "tokens": found.num_tokens,
            "checked": len(found.slots),
            "slots": list(found.slots) if len(found.slots) < found.num_tokens else None,
            "errors": dict(found.errors),
            "worst_at": found.worst_at,
            "tolerance": found.tolerance,
            "precision": found.precision,
            "reasons": reasons_json(found.undecided),
        }
        code = ERROR if found.undecided else YES if found.ok else NO
        screen.answer(facts, [line(f"{chunk.name}: {found}")], code)
