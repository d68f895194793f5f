"""A folder with one manifest and one payload, written whole or not at all.

The payload's name carries its digest, and the manifest, written last, names the payload. A reader therefore sees
either the old pair or the new one, whenever a writer is killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from editable_cache.errors import ArtifactError
from editable_cache.ops import checksum

MANIFEST = "manifest.json"
PAYLOAD = re.compile(r"cells-[0-9a-f]{16}\.safetensors")
MAX_MANIFEST_BYTES = 64 * 2**20


def write_folder(folder: str | Path, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> None:
    """Write ``tensors`` and ``manifest`` into ``folder``, replacing what it held before.

    Raises:
        ArtifactError: if the folder can't be written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".cells-{os.getpid()}.tmp"
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, temporary)
        digest = file_digest(temporary)
        payload = folder / f"cells-{digest[:16]}.safetensors"
        _sync(temporary)
        os.replace(temporary, payload)
        sealed = {**manifest, "payload": payload.name, "payload_sha256": digest, "checksums": _checksums(tensors)}
        content = json.dumps({**sealed, "seal": seal(sealed)}, indent=1, sort_keys=True)
        draft = folder / f".manifest-{os.getpid()}.tmp"
        draft.write_text(content, encoding="utf-8")
        _sync(draft)
        os.replace(draft, folder / MANIFEST)
    except OSError as error:
        raise ArtifactError(f"{folder}: can't be written: {error}.") from error
    for old in folder.iterdir():
        if PAYLOAD.fullmatch(old.name) and old.name != payload.name:
            old.unlink()


def read_folder(folder: str | Path, kind: str, *, exact: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors (memory-mapped) and manifest of a folder that holds a ``kind``.

    Every tensor is compared with its checksum, at the speed of memory. ``exact`` also compares the file's SHA-256,
    which nobody can forge, at a tenth of that speed.

    Raises:
        ArtifactError: if something is missing, damaged, truncated, or of another kind or version.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder, kind)
    name, digest = manifest.get("payload"), manifest.get("payload_sha256")
    if not isinstance(name, str) or not PAYLOAD.fullmatch(name) or not isinstance(digest, str):
        raise ArtifactError(
            f"{folder / MANIFEST}: expected payload 'cells-<digest>.safetensors' with its sha256, got {name!r}."
        )
    payload = folder / name
    if payload.is_symlink() and payload.resolve().parent != folder.resolve() and not _is_hub_blob(payload):
        raise ArtifactError(f"{payload}: expected a file of this folder, got a link to {payload.resolve()}.")
    if not payload.is_file():
        raise ArtifactError(
            f"{payload}: expected the payload that the manifest names, got no such file; save or download it again."
        )
    if exact and (found := file_digest(payload)) != digest:
        raise ArtifactError(f"{payload}: expected sha256 {digest}, got {found}: the file was changed or damaged.")
    try:
        with safe_open(payload, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, RuntimeError, OSError) as error:
        raise ArtifactError(
            f"{payload}: not a readable safetensors file: {error}; save or download it again."
        ) from error
    wanted, got = manifest.get("checksums"), _checksums(tensors)
    if wanted != got:
        bad = sorted(set(got) ^ set(wanted)) if isinstance(wanted, dict) else []
        bad = bad or [name for name, value in got.items() if not isinstance(wanted, dict) or wanted[name] != value]
        raise ArtifactError(
            f"{payload}: expected the tensors that the manifest lists with their checksums, got others or damaged "
            f"ones: {bad[:3]}; save or download it again."
        )
    return tensors, manifest


def _checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: checksum(tensor) for name, tensor in tensors.items()}


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return (
            hashlib.file_digest(file, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else _digest_in_blocks(file)
        )


def _digest_in_blocks(file: Any) -> str:
    hasher = hashlib.sha256()
    while block := file.read(2**20):
        hasher.update(block)
    return hasher.hexdigest()


def _read_manifest(folder: Path, kind: str) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; expected a folder written by save_pretrained.")
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise ArtifactError(f"{path}: expected at most {MAX_MANIFEST_BYTES} bytes, got {path.stat().st_size}.")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ArtifactError(f"{path}: not readable as JSON: {error}.") from error
    if not isinstance(manifest, dict) or manifest.get("kind") != kind or manifest.get("version") != 1:
        found = (
            (manifest.get("kind"), manifest.get("version")) if isinstance(manifest, dict) else type(manifest).__name__
        )
        raise ArtifactError(f"{path}: expected kind {kind!r}, version 1, got {found}.")
    found = seal({key: value for key, value in manifest.items() if key != "seal"})
    if manifest.get("seal") != found:
        raise ArtifactError(
            f"{path}: expected seal {found}, got {manifest.get('seal')!r}: the manifest was changed after it was "
            "written; save or download it again."
        )
    return manifest


def seal(manifest: Mapping[str, Any]) -> str:
    """Digest of a manifest's content: ids that no longer belong to their cells must not pass. Against accident only."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]


def _is_hub_blob(payload: Path) -> bool:
    """The hub's own cache keeps files as links into its ``blobs`` folder."""
    return payload.resolve().parent.name == "blobs"


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def require(condition: bool, folder: str | Path, what: str, expected: str, got: Any) -> None:
    """Raise ``ArtifactError`` unless ``condition``."""
    if not condition:
        raise ArtifactError(f"{Path(folder) / MANIFEST}: {what}: expected {expected}, got {got!r}.")
