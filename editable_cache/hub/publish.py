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

from editable_cache.chunk import CONVERTED, STORED, KVChunk
from editable_cache.errors import ArtifactError, CompatibilityError
from editable_cache.hub.build import Build, open_build
from editable_cache.hub.card import TAGS, card
from editable_cache.hub.chunk_store import save_chunk
from editable_cache.hub.manifest import MANIFEST
from editable_cache.hub.remote import MANIFESTS, Repository, hub_errors, is_repo_id, said
from editable_cache.hub.resolve import BUILDS, MOST_BUILDS, Candidate, build_folders, candidates, label_of
from editable_cache.ops.quantize import Storage
from editable_cache.spec import compare

README = "README.md"
"""What the notes of a chunk say whose cells are not those that a model computed."""


@dataclass(frozen=True)
class Upload:
    """How to publish; every attribute but the last four is what huggingface_hub calls so.

    Attributes:
        private: of a repository that is made; the owner's default if None.
        token: the one that is logged in if None.
        revision: branch to commit to; the default branch if None.
        create_pr: open a pull request instead of committing to the branch.
        commit_message: made up by default.
        license: identifier of a licence on the Hub, for the card.
        fidelity: measured figures by name, for the card.
        storage: how the cells are stored.
        replace: delete the builds that were compiled from another text.
    """

    private: bool | None = None
    token: str | bool | None = None
    revision: str | None = None
    create_pr: bool = False
    commit_message: str | None = None
    license: str | None = None
    fidelity: Mapping[str, Any] | None = None
    storage: Storage = "original"
    replace: bool = False


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
        CompatibilityError: if the cells are not those that the model computed: they were rounded to 8 bits and are to
            be stored otherwise now, or they were converted from another dtype.
        ArtifactError: if anything fails; the repository is then as before, and does not exist if it did not, unless
            the Hub committed and its answer was lost.
    """
    if not is_repo_id(repo_id):
        raise ArtifactError(f"push_to_hub: expected a repository 'organization/name', got {repo_id!r:.120}.")
    if how.fidelity is not None and not isinstance(how.fidelity, Mapping):
        raise ArtifactError(
            f"push_to_hub: expected fidelity as a mapping of names to figures, got {type(how.fidelity).__name__}; pass "
            '{"cosine of logits": 0.9998}.'
        )
    _require_as_computed(chunk, how.storage)
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
    others = _others(repo_id, there, label, build, replace=how.replace)
    staying = {each.label for each in others}
    shown = sorted([*others, Candidate(label, build)], key=lambda c: c.label)
    payload = build.payload.path.name
    out = [each for each in there if each.label not in staying and not _has_cells(each, payload)]
    old = _card(Path(api.hf_hub_download(repo_id, README, revision=head.sha)), repo_id) if README in files else None
    page = card(
        repo_id,
        chunk.name or repo_id,
        shown,
        fidelity=how.fidelity,
        license=how.license,
        old=old,
        keep_fidelity=not out,
    )
    place = f"{BUILDS}/{label}"
    kept = (f"{place}/{payload}", f"{place}/{MANIFEST}")
    places = tuple(f"{BUILDS}/{name}/" for name in {label, *(each.label for each in there)} - staying)
    gone = [name for name in files if name.startswith(places) and name not in kept]
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


def _has_cells(there: Candidate, payload: str) -> bool:
    """Whether a build holds the cells of this payload, whose name carries its digest."""
    return there.build is not None and there.build.payload.path.name == payload


def _require_as_computed(chunk: KVChunk, storage: Storage) -> None:
    """Refuse cells that were rounded: they would take the place of those that the model computed.

    The cells of a trained prefix may be converted: no model computed them.
    """
    notes = "; ".join([chunk.provenance.note, *(part.note for part in chunk.provenance.parts)])
    for rounded in STORED.findall(notes):
        if rounded != storage:
            raise CompatibilityError(
                f"push_to_hub: {chunk!r}: its cells, or those of a part, were rounded to {rounded} when they were "
                f"stored, and are to be stored as {storage!r}: pass storage={rounded!r}, or push the skill it came "
                "from."
            )
    found = CONVERTED.search(notes)
    if found is not None and chunk.provenance.how != "trained":
        raise CompatibilityError(
            f"push_to_hub: {chunk!r}: its cells, or those of a part, were {found[0]}: push the one it was converted "
            "from; from_pretrained(dtype=) converts on loading."
        )


def _others(repo_id: str, there: list[Candidate], label: str, build: Build, *, replace: bool) -> list[Candidate]:
    """The builds that stay beside this one.

    Raises:
        ArtifactError: if they are of another skill, or too many, or the label is that of another model.
    """
    others = [each for each in there if each.label != label]
    for each in there:
        if each.build is None:
            continue
        if each.build.name != build.name:
            raise ArtifactError(
                f"{repo_id}: holds builds of the skill {each.build.name!r}, got one of {build.name!r}: push it to a "
                "repository of its own."
            )
        if each.label == label and (reasons := compare(build.model, each.build.model)):
            raise ArtifactError(
                f"{repo_id}: the build {label} is of another model ({reasons[0]}); push this one to a repository of "
                "its own, or delete that one."
            )
    differing = [each.label for each in others if each.build is not None and _is_of_another_text(each.build, build)]
    if differing and not replace:
        raise ArtifactError(
            f"{repo_id}: expected builds of one text, but this one has another text, or other token ids, than "
            f"{differing}: push it to a repository of its own, or pass replace=True to delete those in the same commit."
        )
    others = [each for each in others if each.label not in differing]
    if len(others) >= MOST_BUILDS:
        raise ArtifactError(f"{repo_id}: expected at most {MOST_BUILDS} builds, got one more; delete some.")
    return others


def _is_of_another_text(a: Build, b: Build) -> bool:
    """Whether two builds differ in their texts, or in their ids where the same tokenizer made them."""
    if a.text is not None and b.text is not None and a.text != b.text:
        return True
    if a.model.tokenizer and b.model.tokenizer:
        same = a.model.tokenizer == b.model.tokenizer
    else:  # of one model, ids have one meaning
        same = (a.origin.rounded_weights or a.model.weights) == (b.origin.rounded_weights or b.model.weights)
    return same and a.token_ids.tolist() != b.token_ids.tolist()


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
