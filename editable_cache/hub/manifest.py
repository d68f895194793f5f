"""A manifest: one JSON file of bounded size with a seal over its content."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from editable_cache.errors import ArtifactError

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 32 * 2**20
MANY_DIGITS = re.compile(rb"[0-9]{400}")
"""Of a number that takes long to read; what any number may be is checked where it is taken."""

SEAL = re.compile(rb',\n"seal": "([0-9a-f]{16})"\n}\n\Z')
MOST_BRACKETS = 2**20 + 2**17
"""Lists and objects in one manifest: one for each token and some; empty ones would take 30 times their bytes."""


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Write ``manifest`` with its seal: one line for each key, so that it can be read and compared by people.

    Raises:
        ArtifactError: if nobody could read it again because of its size.
    """
    lines = [
        f"{json.dumps(key)}: {json.dumps(manifest[key], sort_keys=True, allow_nan=False)}" for key in sorted(manifest)
    ]
    content = sealed(("{\n" + ",\n".join(lines) + "\n}").encode())
    if len(content) > MAX_MANIFEST_BYTES:
        raise ArtifactError(
            f"{path}: expected a manifest of at most {MAX_MANIFEST_BYTES} bytes, got {len(content)}; save it in parts."
        )
    path.write_bytes(content)


def read_manifest(folder: Path, kind: str) -> dict[str, Any]:
    """The manifest of a folder that holds a ``kind`` of version 1, its seal checked and everything else unchecked.

    Raises:
        ArtifactError: if it is missing, too large, no JSON, of another kind or version, or changed since it was sealed.
    """
    path = folder / MANIFEST
    content = read_bounded(path, MAX_MANIFEST_BYTES, "save_pretrained")
    try:
        if content.count(b"[") + content.count(b"{") > MOST_BRACKETS:
            raise ValueError(f"more than {MOST_BRACKETS} lists and objects")
        if MANY_DIGITS.search(content):
            raise ValueError("a number of more than 400 digits")
        manifest: dict[str, Any] = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=unique,
            parse_float=_number,
            parse_constant=_constant,
        )
        if b"\\u" in content:
            json.dumps(manifest, ensure_ascii=False).encode()  # half a surrogate pair can be written nowhere
        kind_of, version = manifest.get("kind"), manifest.get("version")
    except (ValueError, RecursionError, AttributeError) as error:
        raise ArtifactError(f"{path}: not readable as a JSON object: {str(error)[:200]!r}.") from error
    if kind_of != kind or type(version) is not int or version != 1:
        shown = [value if type(value) in (str, int) else type(value).__name__ for value in (kind_of, version)]
        raise ArtifactError(
            f"{path}: expected kind {kind!r}, version 1, got {ascii(shown)[:120]}; a newer editable_cache may know it."
        )
    given = SEAL.search(content)
    if given is None or given[1] != _seal(content[: given.start()]):
        raise ArtifactError(
            f"{path}: expected a seal over its content as the last line: it was changed after it was written; save or "
            "download it again."
        )
    del manifest["seal"]
    return manifest


def read_bounded(path: Path, most: int, writer: str) -> bytes:
    """All bytes of a small file of a folder that ``writer`` made.

    Raises:
        ArtifactError: if it is missing, no file, a link that leads out, unreadable, or larger than ``most`` bytes.
    """
    require_own(path)
    if not path.is_file():  # a pipe or device would block
        raise ArtifactError(f"{path}: no such file; expected a folder written by {writer}.")
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise ArtifactError(f"{path}: can't be read: {error}.") from error
    if len(content) > most:
        raise ArtifactError(f"{path}: expected at most {most} bytes, got more.")
    return content


def sealed(text: bytes) -> bytes:
    """A JSON object with one more key at its end: a digest of all bytes before it.

    Ids that no longer belong to their cells must not pass. Against accident only.
    """
    content = text.rstrip().removesuffix(b"}").rstrip()
    return content + b',\n"seal": "' + _seal(content) + b'"\n}\n'


def _seal(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest()[:16].encode()


def require_own(path: Path) -> None:
    """Refuse a link that leads out of the folder; the Hub's cache keeps files as links into its own ``blobs``.

    Raises:
        ArtifactError: for any other link.
    """
    if not path.is_symlink():
        return
    try:
        target, folder = path.resolve(), path.parent.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise ArtifactError(f"{path}: expected a file of this folder, got a link that leads nowhere.") from error
    snapshots = [parent for parent in folder.parents if parent.name == "snapshots"]
    own = target.parent == folder or any(target.parent == each.parent / "blobs" for each in snapshots)
    if not own:
        raise ArtifactError(f"{path}: expected a file of this folder, got a link to {target}.")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for ``object_pairs_hook``: readers differ about keys that stand there twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has one key twice")
    return found


def _number(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("a number that is too large")
    return number


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
