"""Tensors of a stranger: one safetensors file, mapped into memory, compared with its checksums."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from editable_cache.errors import ArtifactError
from editable_cache.hub.manifest import require_own
from editable_cache.hub.schema import MOST_ENTRIES, Section
from editable_cache.ops import checksum

PAYLOAD = re.compile(r"cells-[0-9a-f]{16}\.safetensors")
MAX_HEADER_BYTES = 32 * 2**20
DTYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "I64", "I32", "I8", "U8", "BOOL"})


@dataclass(frozen=True)
class Payload:
    """What a manifest says about its payload.

    Attributes:
        path: the file.
        num_bytes: its size.
        sha256: digest of its bytes, in hex.
        checksums: of every tensor by name.
    """

    path: Path
    num_bytes: int
    sha256: str
    checksums: Mapping[str, str]

    @classmethod
    def of(cls, folder: str | Path, facts: Section) -> Payload:
        """Take the facts of a payload out of a manifest."""
        name, checksums = facts.text("payload"), facts.section("checksums")
        facts.require(PAYLOAD.fullmatch(name) is not None, "payload", "'cells-<digest>.safetensors'", name)
        return cls(
            path=Path(folder) / name,
            num_bytes=facts.integer("payload_bytes", 0, 2**62),
            sha256=facts.text("payload_sha256", most=64),
            checksums={tensor: checksums.text(tensor, most=64) for tensor in checksums.keys()},  # noqa: SIM118
        )


def read_payload(payload: Payload, *, exact: bool) -> dict[str, Tensor]:
    """Every tensor of a payload, mapped into memory, read-only by agreement.

    Args:
        exact: compare the file's SHA-256 too, which nobody can forge.

    Raises:
        ArtifactError: if it is missing, damaged, truncated, longer than it says, or holds other tensors.
    """
    path, size, wanted = payload.path, payload.num_bytes, payload.checksums
    require_own(path)
    if not path.is_file():
        raise ArtifactError(
            f"{path}: expected the payload that the manifest names, got no such file; save or download it again."
        )
    if path.stat().st_size != size:
        raise ArtifactError(f"{path}: expected {size} bytes, got {path.stat().st_size}; save or download it again.")
    listed = _listed(path, size)
    if listed != wanted.keys():
        raise ArtifactError(
            f"{path}: expected the tensors that the manifest lists, got others: "
            f"{sorted(listed ^ wanted.keys())[:3]}; save or download it again."
        )
    if exact and (found := file_digest(path)) != payload.sha256:
        raise ArtifactError(f"{path}: expected sha256 {payload.sha256}, got {found}: the file was changed or damaged.")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in sorted(listed)}
    except (SafetensorError, ValueError, TypeError, RuntimeError, OSError, OverflowError) as error:
        raise ArtifactError(f"{path}: not a readable safetensors file: {error}; save or download it again.") from error
    bad = [name for name, tensor in tensors.items() if checksum(tensor) != wanted[name]]
    if bad:
        raise ArtifactError(
            f"{path}: expected tensors with the checksums of the manifest, got damaged ones: {bad[:3]}; save or "
            "download it again."
        )
    return tensors


def checksums_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The checksum of every tensor by its name."""
    return {name: checksum(tensor) for name, tensor in tensors.items()}


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            hasher.update(block)
    return hasher.hexdigest()


def _listed(path: Path, size: int) -> set[str]:
    """Names in the header of a safetensors file, before anything maps it."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ArtifactError(
                f"{path}: expected a safetensors header of at most {MAX_HEADER_BYTES} bytes inside of the file's "
                f"{size}, got {length}; save or download it again."
            )
        content = file.read(length)
    try:
        header: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: the header is not readable as JSON: {error}.") from error
    if not isinstance(header, dict) or len(header) > MOST_ENTRIES:
        raise ArtifactError(f"{path}: expected a header of at most {MOST_ENTRIES} tensors.")
    header.pop("__metadata__", None)
    for name, facts in header.items():
        dtype = facts.get("dtype") if isinstance(facts, dict) else None
        if dtype not in DTYPES:
            raise ArtifactError(f"{path}: {name[:80]!r}: expected one of {sorted(DTYPES)}, got {dtype!r:.80}.")
    return set(header)
