"""A folder with one manifest and one payload, written whole or not at all.

The payload's name carries its digest, and the manifest, written last, names the payload. A reader therefore sees
either the old pair or the new one, whenever a writer is killed. Both are first written into a new folder beside them,
which nobody else knows; a lock on the folder keeps writers apart and tells what a killed one left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from editable_cache.errors import ArtifactError
from editable_cache.hub.manifest import MANIFEST, read_manifest, write_manifest
from editable_cache.hub.payload import PAYLOAD, Payload, checksums_of, file_digest, read_payload
from editable_cache.hub.schema import Section

if sys.platform != "win32":
    import fcntl

DRAFT = ".saving-"


def write_folder(
    folder: str | Path,
    tensors: Mapping[str, Tensor],
    manifest: Mapping[str, Any],
    *,
    check: Callable[[Path], object] = lambda _: None,
) -> None:
    """Write ``tensors`` and ``manifest`` into ``folder``, replacing what it held before.

    Waits for other writers of the folder, where the system has locks.

    Args:
        check: raises ``ArtifactError`` if nobody could read what was written, given the folder of the drafts.

    Raises:
        ArtifactError: if the folder can't be written; what it held before is then still valid.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            _clean(folder, DRAFT)
            drafts = Path(tempfile.mkdtemp(prefix=DRAFT, dir=folder))
            try:
                payload = _write(drafts, tensors, manifest)
                check(drafts)
                os.replace(drafts / payload, folder / payload)
                _sync(folder)
                os.replace(drafts / MANIFEST, folder / MANIFEST)
                _sync(folder)
            finally:
                shutil.rmtree(drafts, ignore_errors=True)
            _clean(folder, "", keep=payload)
    except (OSError, SafetensorError) as error:
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"{folder}: can't be written: {error}.") from error


def _write(drafts: Path, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> str:
    """Write payload and manifest as drafts; returns the payload's name."""
    stored = _apart(tensors)
    temporary = drafts / "cells"
    save_file(stored, temporary)
    digest = file_digest(temporary)
    payload = drafts / f"cells-{digest[:16]}.safetensors"
    os.replace(temporary, payload)
    facts = {
        "payload": payload.name,
        "payload_bytes": payload.stat().st_size,
        "payload_sha256": digest,
        "checksums": checksums_of(stored),
    }
    write_manifest(drafts / MANIFEST, {**manifest, **facts})
    payload.chmod((drafts / MANIFEST).stat().st_mode & 0o777)  # safetensors lets nobody else read
    for path in (payload, drafts / MANIFEST):
        _sync(path)
    return payload.name


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as a file holds them: contiguous, in memory, none of them sharing storage with another."""
    stored, seen = {}, set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        if (start := own.untyped_storage().data_ptr()) in seen:
            own = own.clone()
        seen.add(start)
        stored[name] = own
    return stored


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other writers out of ``folder`` until the process ends or this does; readers need no lock."""
    if sys.platform == "win32":
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _clean(folder: Path, prefix: str, *, keep: str = "") -> None:
    """Delete drafts that a killed writer left, or (without ``prefix``) payloads other than ``keep``.

    What can't be deleted stays: on some systems that is a file that somebody has mapped.
    """
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if prefix and path.name.startswith(prefix):
                path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)
            elif not prefix and PAYLOAD.fullmatch(path.name) and path.name != keep:
                path.unlink()


def read_folder(folder: str | Path, kind: str, *, exact: bool = False) -> tuple[dict[str, Tensor], Section]:
    """Tensors (memory-mapped) of a folder that holds a ``kind``, and the rest of its manifest.

    Every tensor is compared with its checksum, at the speed of memory. ``exact`` also compares the file's SHA-256,
    which nobody can forge, at a tenth of that speed.

    Raises:
        ArtifactError: if something is missing, damaged, truncated, or of another kind or version.
    """
    facts = open_manifest(folder, kind)
    return read_payload(Payload.of(folder, facts), exact=exact), facts


def open_manifest(folder: str | Path, kind: str) -> Section:
    """The manifest of a folder that holds a ``kind``; its content is yet to be taken and checked."""
    folder = Path(folder)
    facts = Section(read_manifest(folder, kind), str(folder / MANIFEST))
    facts.take("kind")
    facts.take("version")
    return facts


def _sync(path: Path) -> None:
    if sys.platform == "win32" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
