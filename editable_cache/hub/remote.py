"""A repository of skills on the Hub: what is fetched, and how the errors of huggingface_hub read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, snapshot_download

from editable_cache.adapters.origin import REPOSITORY
from editable_cache.errors import ArtifactError, EditableCacheError
from editable_cache.hub.manifest import MANIFEST, MAX_MANIFEST_BYTES
from editable_cache.hub.resolve import BUILDS, MOST_BUILDS

MANIFESTS = f"{BUILDS}/*/{MANIFEST}"


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

        Raises:
            ArtifactError: if the repository or revision does not exist or can't be read, or holds no builds, or too
                many or too large ones.
        """
        with hub_errors(str(self)):
            revision = self.revision
            if not self.local_files_only:
                info = HfApi(token=self.token).model_info(self.repo_id, revision=revision, files_metadata=True)
                revision = info.sha
                listed = {
                    each.rfilename: each.size for each in info.siblings or [] if fnmatch(each.rfilename, MANIFESTS)
                }
                self._require_few(listed)
            folder = snapshot_download(
                self.repo_id,
                revision=revision,
                allow_patterns=[MANIFESTS],
                cache_dir=self.cache_dir,
                token=self.token,
                local_files_only=self.local_files_only,
                force_download=self.force_download,
            )
        return Path(folder)

    def payload(self, snapshot: Path, file: Path) -> Path:
        """Download ``file``, the payload of a build of ``snapshot``, from the same commit.

        Raises:
            ArtifactError: if it can't be had.
        """
        with hub_errors(f"{self}: {file.name}"):
            path = hf_hub_download(
                self.repo_id,
                file.relative_to(snapshot).as_posix(),
                revision=snapshot.name,
                cache_dir=self.cache_dir,
                token=self.token,
                local_files_only=self.local_files_only,
                force_download=self.force_download,
            )
        return Path(path)

    def __str__(self) -> str:
        return self.repo_id + (f" at {self.revision}" if self.revision else "")

    def _require_few(self, listed: dict[str, int | None]) -> None:
        large = [name for name, size in listed.items() if (size or 0) > MAX_MANIFEST_BYTES]
        if not listed or len(listed) > MOST_BUILDS or large:
            raise ArtifactError(
                f"{self}: expected 1 to {MOST_BUILDS} builds ({MANIFESTS}) of at most {MAX_MANIFEST_BYTES} bytes each, "
                f"got {len(listed)}{f', too large: {large[:3]}' if large else ''}. Is it a repository of a skill?"
            )


def is_repo_id(source: str | Path) -> bool:
    """Whether ``source`` can name a repository on the Hub: ``"organization/name"``."""
    return isinstance(source, str) and REPOSITORY.fullmatch(source) is not None


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Turn whatever huggingface_hub or its transport raises into an ``ArtifactError`` that says what it was about."""
    try:
        yield
    except EditableCacheError:
        raise
    except Exception as error:
        said: Any = getattr(error, "server_message", None)
        lines = str(said or error).strip().splitlines()
        text = " ".join(line.strip() for line in lines[:3] if line.strip())
        raise ArtifactError(f"{what}: {type(error).__name__}: {text[:500]}") from error
