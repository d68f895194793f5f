"""A manifest: one JSON file of bounded size with a seal over its content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from editable_cache.errors import ArtifactError

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 * 2**20
MOST_DIGITS = 19


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Write ``manifest`` with its seal: one line for each key, so that it can be read and compared by people."""
    sealed = {**manifest, "seal": seal(manifest)}
    lines = [f"{json.dumps(key)}: {json.dumps(sealed[key], sort_keys=True, allow_nan=False)}" for key in sorted(sealed)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read_manifest(folder: Path, kind: str) -> dict[str, Any]:
    """The manifest of a folder that holds a ``kind`` of version 1, its seal checked and everything else unchecked.

    Raises:
        ArtifactError: if it is missing, too large, no JSON, of another kind or version, or changed since it was sealed.
    """
    path = folder / MANIFEST
    require_own(path)
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; expected a folder written by save_pretrained.")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise ArtifactError(f"{path}: can't be read: {error}.") from error
    if len(content) > MAX_MANIFEST_BYTES:
        raise ArtifactError(f"{path}: expected at most {MAX_MANIFEST_BYTES} bytes, got more.")
    try:
        manifest = json.loads(
            content.decode("utf-8"), object_pairs_hook=_unique, parse_int=_integer, parse_constant=_constant
        )
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: not readable as JSON: {error}.") from error
    if not isinstance(manifest, dict) or manifest.get("kind") != kind or manifest.get("version") != 1:
        found = type(manifest).__name__
        if isinstance(manifest, dict):
            found = repr((manifest.get("kind"), manifest.get("version")))[:120]
        raise ArtifactError(
            f"{path}: expected kind {kind!r}, version 1, got {found}; a newer editable_cache may know it."
        )
    found = seal({key: value for key, value in manifest.items() if key != "seal"})
    if manifest.pop("seal", None) != found:
        raise ArtifactError(
            f"{path}: expected seal {found}: the manifest was changed after it was written; save or download it again."
        )
    return manifest


def seal(manifest: Mapping[str, Any]) -> str:
    """Digest of a manifest's content: ids that no longer belong to their cells must not pass. Against accident only."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]


def require_own(path: Path) -> None:
    """Refuse a link that leads out of the folder; the Hub's cache keeps files as links into its own ``blobs``.

    Raises:
        ArtifactError: for any other link.
    """
    if not path.is_symlink():
        return
    target = path.resolve()
    snapshots = [parent for parent in path.parent.resolve().parents if parent.name == "snapshots"]
    own = target.parent == path.parent.resolve() or any(target.parent == each.parent / "blobs" for each in snapshots)
    if not own:
        raise ArtifactError(f"{path}: expected a file of this folder, got a link to {target}.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has one key twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS + 1:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
