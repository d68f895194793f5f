"""Publish a skill, and find those of others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard

from editable_cache.chunk import KVChunk
from editable_cache.errors import ArtifactError
from editable_cache.hub.build import Build, open_build
from editable_cache.hub.card import TAGS, card
from editable_cache.hub.chunk_store import save_chunk
from editable_cache.hub.manifest import MANIFEST
from editable_cache.hub.remote import MANIFESTS, Repository, hub_errors, is_repo_id, said
from editable_cache.hub.resolve import BUILDS, MOST_BUILDS, Candidate, build_folders, candidates, label_of
from editable_cache.ops.quantize import Storage

README = "README.md"


@dataclass(frozen=True)
class Upload:
    """How to publish; every attribute but the last three is what huggingface_hub calls so.

    Attributes:
        private: of a repository that is made; the owner's default if None.
        token: the one that is logged in if None.
        revision: branch to commit to; the default branch if None.
        create_pr: open a pull request instead of committing to the branch.
        commit_message: made up by default.
        license: identifier of a licence on the Hub, for the card.
        fidelity: measured figures by name, for the card.
        storage: how the cells are stored.
    """

    private: bool | None = None
    token: str | bool | None = None
    revision: str | None = None
    create_pr: bool = False
    commit_message: str | None = None
    license: str | None = None
    fidelity: Mapping[str, Any] | None = None
    storage: Storage = "original"


@dataclass(frozen=True)
class SkillInfo:
    """A skill on the Hub, as a search finds it.

    Attributes:
        repo_id: what ``Skill.from_pretrained`` takes.
        base_models: repositories of the models that it was compiled for.
        tags: all of its tags.
        downloads: of the last 30 days.
        last_modified: None where the Hub does not say.
        private: whether only its owners see it.
    """

    repo_id: str
    base_models: tuple[str, ...]
    tags: tuple[str, ...]
    downloads: int
    last_modified: datetime | None
    private: bool


def publish(chunk: KVChunk, text: str | None, repo_id: str, how: Upload) -> str:
    """Put a build of a skill and a card into a repository, which is made if there is none, in one commit.

    A build of the same model, dtype and storage is replaced. Returns the address of the commit or pull request.

    Raises:
        ArtifactError: if anything fails; the repository is then as before, and does not exist if it did not, unless
            the Hub committed and its answer was lost.
    """
    if not is_repo_id(repo_id):
        raise ArtifactError(f"push_to_hub: expected a repository 'organization/name', got {repo_id!r:.120}.")
    api = HfApi(token=how.token)
    with TemporaryDirectory() as scratch, hub_errors(repo_id):
        folder = Path(scratch)
        save_chunk(chunk, folder, text=text, storage=how.storage)
        made = not api.repo_exists(repo_id)
        if made:
            api.create_repo(repo_id, private=how.private)
        try:
            return _commit(api, chunk, folder, repo_id, how)
        except BaseException as error:
            if made and not _taken_back(api, repo_id) and isinstance(error, Exception):
                raise ArtifactError(
                    f"{repo_id}: {said(error)}. It was made for this skill and could not be taken back: look whether "
                    "the skill is there, else delete it or push again."
                ) from error
            raise


def _taken_back(api: HfApi, repo_id: str) -> bool:
    """Delete a repository that nothing was committed to; False if there is something, or if it can't be deleted."""
    try:
        empty = set(api.list_repo_files(repo_id)) <= {".gitattributes"}
        if empty:
            api.delete_repo(repo_id)
    except Exception:  # what went wrong before is what the caller wants to know
        return False
    return empty


def _commit(api: HfApi, chunk: KVChunk, folder: Path, repo_id: str, how: Upload) -> str:
    build = open_build(folder)
    label = label_of(build)
    head = api.model_info(repo_id, revision=how.revision)
    files = [each.rfilename for each in head.siblings or []]
    there = _builds(repo_id, files, head.sha, how)
    _require_same_skill(repo_id, there, label, build)
    shown = sorted([*(each for each in there if each.label != label), Candidate(label, build)], key=lambda c: c.label)
    old = _card(Path(api.hf_hub_download(repo_id, README, revision=head.sha)), repo_id) if README in files else None
    page = card(repo_id, chunk.name or repo_id, shown, fidelity=how.fidelity, license=how.license, old=old)
    place = f"{BUILDS}/{label}"
    payload = build.payload.path.name
    gone = [name for name in files if name.startswith(f"{place}/") and name.split("/")[-1] not in (payload, MANIFEST)]
    commit = api.create_commit(
        repo_id,
        operations=[
            CommitOperationAdd(f"{place}/{MANIFEST}", folder / MANIFEST),
            CommitOperationAdd(f"{place}/{payload}", build.payload.path),
            CommitOperationAdd(README, str(page).encode()),
            *(CommitOperationDelete(name) for name in gone),
        ],
        commit_message=how.commit_message or f"{'Replace' if gone else 'Add'} build {label} of {chunk.name}",
        revision=how.revision,
        create_pr=how.create_pr,
        parent_commit=head.sha,
    )
    return str(commit.pr_url or commit.commit_url)


def _builds(repo_id: str, files: list[str], sha: str | None, how: Upload) -> list[Candidate]:
    """The builds that are in the repository already."""
    if not any(fnmatch(name, MANIFESTS) for name in files):
        return []
    snapshot = Repository(repo_id, revision=sha, token=how.token).manifests()
    return list(candidates(build_folders(snapshot, of_hub=True), None, str))


def _require_same_skill(repo_id: str, there: list[Candidate], label: str, build: Build) -> None:
    """Refuse to put one skill among the builds of another, or one model in the place of another."""
    if label not in [each.label for each in there] and len(there) >= MOST_BUILDS:
        raise ArtifactError(f"{repo_id}: expected at most {MOST_BUILDS} builds, got one more; delete some.")
    for each in there:
        if each.build is None:
            continue
        if each.build.name != build.name:
            raise ArtifactError(
                f"{repo_id}: holds builds of the skill {each.build.name!r}, got one of {build.name!r}: push it to a "
                "repository of its own."
            )
        if each.label == label and each.build.model.rotary != build.model.rotary:
            raise ArtifactError(
                f"{repo_id}: the build {label} is of a model with these weights and other rope settings; push this one "
                "to a repository of its own, or delete that one."
            )


def _card(path: Path, repo_id: str) -> ModelCard:
    try:
        found: ModelCard = ModelCard.load(path)
    except Exception as error:  # of YAML, of huggingface_hub, of an encoding
        raise ArtifactError(
            f"{repo_id}: its {README} can't be kept, because the YAML between its first two '---' can't be read "
            f"({said(error)}); repair or delete it."
        ) from error
    return found


def search(
    query: str | None, *, base_model: str | None, author: str | None, limit: int, token: str | bool | None
) -> Iterator[SkillInfo]:
    """Skills on the Hub, most downloaded first.

    Raises:
        ArtifactError: if the Hub can't be asked.
    """
    tags = [TAGS[0], *([] if base_model is None else [f"base_model:{base_model}"])]
    with hub_errors("search"):
        for info in HfApi(token=token).list_models(
            filter=tags, search=query, author=author, limit=limit, sort="downloads", full=True
        ):
            named = [tag.removeprefix("base_model:") for tag in info.tags or [] if tag.startswith("base_model:")]
            yield SkillInfo(
                repo_id=info.id,
                base_models=tuple(name for name in named if ":" not in name),
                tags=tuple(info.tags or ()),
                downloads=info.downloads or 0,
                last_modified=info.last_modified,
                private=bool(info.private),
            )
