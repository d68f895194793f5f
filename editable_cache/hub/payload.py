"""Tensors of a stranger: one safetensors file, mapped into memory, compared with its checksums."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from editable_cache.errors import ArtifactError
from editable_cache.hub.header import read_header
from editable_cache.hub.manifest import require_own
from editable_cache.hub.schema import Section
from editable_cache.ops import checksum

PAYLOAD = re.compile(r"cells-[0-9a-f]{16}\.safetensors")


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
            num_bytes=facts.integer("payload_bytes", 0, 2**62 - 1),
            sha256=facts.text("payload_sha256", most=64),
            checksums={tensor: checksums.text(tensor, most=64) for tensor in checksums.keys()},  # noqa: SIM118
        )


def read_payload(payload: Payload, *, exact: bool) -> dict[str, Tensor]:
    """Every tensor of a payload, mapped into memory.

    The mapping is private: writing into a tensor copies the page and never reaches the file, and a file that is
    replaced or deleted stays as it was for those who mapped it. One that another program truncates meanwhile ends the
    process.

    Args:
        exact: compare the file's SHA-256 too, which nobody can forge.

    Raises:
        ArtifactError: if it is missing, damaged, truncated, longer than it says, or holds other tensors.
    """
    path, wanted = payload.path, payload.checksums
    require_own(path)
    if not path.is_file():  # a pipe or device would block
        raise ArtifactError(
            f"{path}: expected the payload that the manifest names, got no such file; save or download it again."
        )
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != payload.num_bytes:
                raise ArtifactError(
                    f"{path}: expected {payload.num_bytes} bytes, got {size}; save or download it again."
                )
            listed = read_header(path, file, size).keys()
    except OSError as error:
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"{path}: can't be read: {error}.") from error
    if listed != wanted.keys():
        others = ascii(sorted(listed ^ wanted.keys())[:3])[:200]
        raise ArtifactError(
            f"{path}: expected the tensors that the manifest lists, got others: {others}; save or download it again."
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
            f"{path}: expected tensors with the checksums of the manifest, got damaged ones: {ascii(bad[:3])[:200]}; "
            "save or download it again."
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
