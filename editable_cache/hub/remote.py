"""A repository of skills on the Hub: what is fetched, and how the errors of huggingface_hub read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from editable_cache.adapters.origin import REPOSITORY
from editable_cache.errors import ArtifactError, EditableCacheError
from editable_cache.hub.manifest import MANIFEST, MAX_MANIFEST_BYTES
from editable_cache.hub.resolve import BUILDS, MOST_BUILDS

MANIFESTS = f"{BUILDS}/*/{MANIFEST}"
WORDS: tuple[tuple[type[Exception], str], ...] = (
    (GatedRepoError, "access to it is restricted: ask for it on its page, and log in"),
    (RepositoryNotFoundError, "no such repository, or a private one that the token may not read"),
    (RevisionNotFoundError, "no such branch, tag, commit or pull request"),
    (LocalEntryNotFoundError, "not downloaded before, and the Hub may not be asked or does not answer"),
    (OfflineModeIsEnabled, "the Hub may not be asked (HF_HUB_OFFLINE)"),
    (EntryNotFoundError, "no such file in the repository"),
)
"""What the errors of huggingface_hub mean here; the first that fits."""

SECRET = re.compile(r"(?<=Bearer ).*|\bhf_\w+", re.DOTALL)


@dataclass(frozen=True)
class Repository:
    """One repository on the Hub as a reader asks for it; every attribute is what huggingface_hub calls so.

    Attributes:
        repo_id: ``"organization/name"``.
        revision: branch, tag, commit or pull request; the default branch if None.
        cache_dir: where downloads are kept; huggingface_hub's cache if None.
        token: for private repositories; the one that is logged in if None.
        local_files_only: take what was downloaded before, and ask no server.
        force_download: download again what was downloaded before.
    """

    repo_id: str
    revision: str | None = None
    cache_dir: str | Path | None = None
    token: str | bool | None = None
    local_files_only: bool = False
    force_download: bool = False

    def manifests(self) -> Path:
        """Download the manifest of every build; returns the folder of the snapshot.

        Where the Hub can't be asked, what was downloaded before is taken.

        Raises:
            ArtifactError: if the repository or revision does not exist or can't be read, or holds no builds, or too
                many or too large ones.
        """
        with hub_errors(str(self)):
            commit = self._checked_commit()
            folder = snapshot_download(
                self.repo_id,
                revision=self.revision,
                allow_patterns=[MANIFESTS],
                cache_dir=self.cache_dir,
                token=self.token,
                local_files_only=self.local_files_only,
                force_download=self.force_download,
            )
            if commit not in (None, Path(folder).name):
                raise ArtifactError(f"{self}: it was changed while it was read; try again.")
        return Path(folder)

    def payload(self, snapshot: Path, file: Path) -> Path:
        """Download ``file``, the payload of a build of ``snapshot``, from the same commit.

        Raises:
            ArtifactError: if it can't be had.
        """
        name = file.relative_to(snapshot).as_posix()
        with hub_errors(f"{self}: {name}"):
            path = hf_hub_download(
                self.repo_id,
                name,
                revision=snapshot.name,
                cache_dir=self.cache_dir,
                token=self.token,
                local_files_only=self.local_files_only,
                force_download=self.force_download,
            )
        return Path(path)

    @contextmanager
    def repairable(self) -> Iterator[None]:
        """Say with an error about damaged files how to download them again: huggingface_hub compares no digests."""
        try:
            yield
        except ArtifactError as error:
            raise ArtifactError(
                f"{self}: {error} If the download was damaged, force_download=True repairs it."
            ) from error

    def __str__(self) -> str:
        return self.repo_id + (f" at {self.revision}" if self.revision else "")

    def _checked_commit(self) -> str | None:
        """The commit that is meant, whose manifests are few and small; None where the Hub can't be asked."""
        if self.local_files_only:
            return None
        try:
            info = HfApi(token=self.token).model_info(self.repo_id, revision=self.revision, files_metadata=True)
        except Exception:  # snapshot_download meets it again, and knows whether a snapshot on disk will do
            return None
        listed = {each.rfilename: each.size for each in info.siblings or [] if fnmatch(each.rfilename, MANIFESTS)}
        large = [name for name, size in listed.items() if (size or 0) > MAX_MANIFEST_BYTES]
        if not listed or len(listed) > MOST_BUILDS or large:
            raise ArtifactError(
                f"{self}: expected 1 to {MOST_BUILDS} builds ({MANIFESTS}) of at most {MAX_MANIFEST_BYTES} bytes each, "
                f"got {len(listed)}{f', too large: {large[:3]}' if large else ''}. Is it a repository of a skill?"
            )
        return info.sha


def is_repo_id(source: str | Path) -> bool:
    """Whether ``source`` can name a repository on the Hub: ``"organization/name"``."""
    fits = isinstance(source, str) and REPOSITORY.fullmatch(source) is not None
    return fits and not any(each in str(source) for each in ("..", "--"))


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Turn whatever huggingface_hub or its transport raises into an ``ArtifactError`` that says what it was about."""
    try:
        yield
    except EditableCacheError:
        raise
    except Exception as error:
        raise ArtifactError(f"{what}: {said(error)}.") from error


def said(error: Exception) -> str:
    """What an error of huggingface_hub or its transport says, in one line without addresses, markup and secrets."""
    reason = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
    words = next((words for kind, words in WORDS if isinstance(error, kind)), None)
    if words is not None:
        return words + (f" ({said(reason)})" if isinstance(reason, Exception) else "")
    answer: Any = getattr(error, "response", None)
    status = getattr(answer, "status_code", None)
    if status == 412:
        return "somebody else committed meanwhile; try again"
    text = str(getattr(error, "server_message", None) or ("" if status else error)).strip()
    text = re.sub(r"<[^>]*>|\(?https?://\S+", " ", SECRET.sub("...", text))
    kind = f"the Hub answered {status}" if status else type(error).__name__
    return f"{kind}: {' '.join(text.split())[:300]}".rstrip(" .:")
