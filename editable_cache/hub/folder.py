"""A folder with one manifest and one payload, written whole or not at all.

The payload's name carries its digest, and the manifest, written last, names the payload. A reader therefore sees
either the old pair or the new one, whenever a writer is killed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from editable_cache.errors import ArtifactError
from editable_cache.hub.manifest import MANIFEST, read_manifest, write_manifest
from editable_cache.hub.payload import PAYLOAD, Payload, checksums_of, file_digest, read_payload
from editable_cache.hub.schema import Section


def write_folder(folder: str | Path, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> None:
    """Write ``tensors`` and ``manifest`` into ``folder``, replacing what it held before.

    Raises:
        ArtifactError: if the folder can't be written; what it held before is then still valid.
    """
    folder = Path(folder)
    temporary, draft = folder / f".cells-{os.getpid()}.tmp", folder / f".manifest-{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in (temporary, draft):  # a link in their place would be written through
            left.unlink(missing_ok=True)
        stored = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        save_file(stored, temporary)
        digest = file_digest(temporary)
        payload = folder / f"cells-{digest[:16]}.safetensors"
        _sync(temporary)
        size = temporary.stat().st_size
        os.replace(temporary, payload)
        sealed = {
            **manifest,
            "payload": payload.name,
            "payload_bytes": size,
            "payload_sha256": digest,
            "checksums": checksums_of(stored),
        }
        write_manifest(draft, sealed)
        _sync(draft)
        os.replace(draft, folder / MANIFEST)
        _sync(folder)
    except OSError as error:
        raise ArtifactError(f"{folder}: can't be written: {error}.") from error
    finally:
        for left in (temporary, draft):
            with contextlib.suppress(OSError):
                left.unlink(missing_ok=True)
    for old in folder.iterdir():
        if PAYLOAD.fullmatch(old.name) and old.name != payload.name:
            old.unlink()


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
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
