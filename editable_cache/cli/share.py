"""``push`` and ``pull``: to the Hub and back."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from editable_cache.cli.facts import size
from editable_cache.cli.loading import ModelOptions, find_builds, load_model, quiet
from editable_cache.cli.options import (
    Adapter,
    BuildName,
    Device,
    Json,
    ModelDtype,
    ModelRevision,
    OtherModel,
    Out,
    Revision,
    Storages,
    Trust,
)
from editable_cache.cli.screen import command, line
from editable_cache.errors import ArtifactError

if TYPE_CHECKING:
    from editable_cache.hub.build import Build

Folder = Annotated[str, typer.Argument(metavar="DIR", help="A folder with a skill, or a local copy of a repository.")]
RepoId = Annotated[str, typer.Argument(metavar="REPO_ID", help="organization/name on the Hub.")]
Private = Annotated[
    bool | None, typer.Option("--private/--public", help="Of a repository that is made.", show_default=False)
]
Branch = Annotated[str | None, typer.Option("--revision", metavar="BRANCH", help="The branch to commit to.")]
CreatePr = Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")]
License = Annotated[str | None, typer.Option("--license", metavar="ID", help="For the card, for instance mit.")]
Message = Annotated[str | None, typer.Option("--message", "-m", metavar="TEXT", help="The commit message.")]
PushedStorage = Annotated[
    Storages | None,
    typer.Option("--storage", help="Store the cells so; as they are by default.", show_default=False),
]
Replace = Annotated[bool, typer.Option("--replace", help="Delete builds of another text in the same commit.")]
Again = Annotated[bool, typer.Option("--force-download", help="Download again what was downloaded before.")]


def push(
    folder: Folder,
    repo_id: RepoId,
    build: BuildName = None,
    private: Private = None,
    revision: Branch = None,
    create_pr: CreatePr = False,
    license_id: License = None,
    message: Message = None,
    storage: PushedStorage = None,
    replaces: Replace = False,
    as_json: Json = False,
) -> None:
    """Publish a skill on the Hub: one build and a card, in one commit.

    Makes the repository if there is none, and replaces a build for the same model, dtype and storage. Log in with
    "hf auth login" before. Exit code 0 if it was published, else 2; then nothing was changed.
    """
    with command(as_json) as screen:
        if not Path(folder).is_dir():
            raise ArtifactError(f"{folder}: no such folder; expected one that precompile or pull wrote.")
        source = find_builds(screen, folder, None).choose(build).build
        assert source is not None
        from editable_cache.hub.resolve import label_of
        from editable_cache.published import PublishedChunk

        chunk = PublishedChunk.from_pretrained(folder, build=build, exact=True, control_tokens="allow")
        stored = source.storage if storage is None else storage.value
        with screen.stage(f"publishing {size(chunk.nbytes)} to {repo_id}", own_bar=True), quiet(screen):
            url = chunk.push_to_hub(
                repo_id,
                private=private,
                revision=revision,
                create_pr=create_pr,
                commit_message=message,
                license=license_id,
                storage=stored,
                replace=replaces,
            )
        label = label_of(replace(source, storage=stored))
        facts = {"ok": True, "repo_id": repo_id, "build": label, "storage": stored, "url": url}
        screen.answer(facts, [line(f"{chunk.name}: build {label} is at {url}")])


def pull(
    repo_id: RepoId,
    out: Out,
    build: BuildName = None,
    model: OtherModel = None,
    revision: Revision = None,
    force_download: Again = False,
    adapter: Adapter = None,
    dtype: ModelDtype = None,
    device: Device = "cpu",
    model_revision: ModelRevision = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Copy a skill from the Hub into a folder: all builds, the one named by --build, or the one that fits --model.

    The folder must be new or empty, and not the current one. It holds files of its own, no links, and appears only when
    all of them are there and have the digests that their manifests say. Exit code 0 if it was written, else 2.
    """
    with command(as_json) as screen:
        _require_room(out)
        loaded = None
        if model is not None:
            options = ModelOptions(model, adapter, dtype, device, model_revision, trust_remote_code)
            loaded = load_model(screen, options)
        found = find_builds(screen, repo_id, revision, loaded, force_download=force_download)
        if found.repository is None:
            raise ArtifactError(f"{repo_id}: expected organization/name on the Hub, got a local folder.")
        if build is not None or loaded is not None:
            chosen = found.choose(build)
            wanted = {"": chosen}
        else:
            wanted = {each.label: each for each in found.candidates}
        builds: dict[str, Build] = {}
        for label, each in wanted.items():
            if each.build is None:
                raise ArtifactError(f"{repo_id}: build {each.label}: {each.reasons[0].got} Pull others with --build.")
            builds[label] = each.build
            what = f"downloading {each.label}, {size(each.build.payload.num_bytes)}"
            with screen.stage(what, own_bar=True), quiet(screen):
                found.repository.payload(found.snapshot, each.build.payload.path)
        with screen.stage("copying"):
            _copy(builds, out)
        commit = found.snapshot.name
        facts: dict[str, Any] = {
            "ok": True,
            "repo_id": repo_id,
            "commit": commit,
            "folder": str(out),
            "builds": [{"build": wanted[key].label, "bytes": b.payload.num_bytes} for key, b in builds.items()],
        }
        told = [f"{out}: {len(builds)} build{'s'[: len(builds) != 1]} of {repo_id} at commit {commit[:12]}"]
        told += [f"  {each['build']}, {size(each['bytes'])}" for each in facts["builds"]]
        screen.answer(facts, map(line, told))


def _require_room(out: Path) -> None:
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ArtifactError(f"{out}: expected a new or empty folder; remove it, or choose another with -o.")
    if out.exists() and out.samefile("."):  # put in its place at once, it would not be where the shell stands
        raise ArtifactError(f"{out}: expected a new folder, got the current one; name one to make here with -o.")


def _copy(builds: dict[str, Build], out: Path) -> None:
    """Write the builds beside ``out`` and put all in its place at once; a manifest comes after its payload.

    Raises:
        ArtifactError: if a payload has another digest than its manifest says, or the folder can't be written.
    """
    from editable_cache.hub.manifest import MANIFEST
    from editable_cache.hub.payload import read_payload
    from editable_cache.hub.resolve import BUILDS

    draft = out.parent / f".{out.name}-{os.getpid()}.partial"
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(draft, ignore_errors=True)
    try:
        for label, build in builds.items():
            place = draft / BUILDS / label if label else draft
            place.mkdir(parents=True)
            read_payload(build.payload, exact=True)
            for source in (build.payload.path, build.folder / MANIFEST):
                target = place / source.name
                shutil.copyfile(source, target)
                with target.open("rb+") as file:
                    os.fsync(file.fileno())
        if out.exists():
            out.rmdir()
        os.replace(draft, out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
