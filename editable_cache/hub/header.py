"""The header of a safetensors file, checked before anything maps the file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from editable_cache.errors import ArtifactError
from editable_cache.hub.manifest import unique
from editable_cache.hub.schema import MOST_ENTRIES, MOST_NUMBER

MAX_HEADER_BYTES = 16 * 2**20
MOST_DIMS = 8
ITEMSIZE = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1, "BOOL": 1}
"""The dtypes that may occur, and bytes of one element."""


class Entry(NamedTuple):
    """One tensor: its dtype, its shape, and its bytes ``[start, stop)`` behind the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path, file: BinaryIO, size: int) -> dict[str, Entry]:
    """The tensors of a safetensors file of ``size`` bytes by name; they fill it without gaps and do not overlap.

    Raises:
        ArtifactError: for anything else.
    """
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise ArtifactError(
            f"{path}: expected a safetensors header of at most {MAX_HEADER_BYTES} bytes inside of the file's {size}, "
            f"got {length}; save or download it again."
        )
    try:
        content = file.read(length)
        if content.count(b"{") + content.count(b"[") > 3 * MOST_ENTRIES + 3:
            raise ValueError(f"more than {MOST_ENTRIES} tensors")
        header = json.loads(content.decode("utf-8"), object_pairs_hook=unique)
        header.pop("__metadata__", None)
        entries = {name: _entry(facts) for name, facts in header.items()}
        _require_filled(list(entries.values()), size - 8 - length)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise ArtifactError(
            f"{path}: the header is not that of a whole safetensors file: {str(error)[:200]!r}; save or download it "
            "again."
        ) from error
    return entries


def _entry(facts: Any) -> Entry:
    dtype, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    fine = len(facts) == 3 and isinstance(dtype, str) and dtype in ITEMSIZE
    fine = fine and isinstance(shape, list) and len(shape) <= MOST_DIMS
    fine = fine and isinstance(offsets, list) and len(offsets) == 2
    fine = fine and all(type(value) is int and 0 <= value < MOST_NUMBER for value in shape)
    fine = fine and all(type(value) is int and 0 <= value < 2**62 for value in offsets)
    if not fine or math.prod(shape) * ITEMSIZE[dtype] != offsets[1] - offsets[0]:
        raise ValueError(f"a tensor of one of {sorted(ITEMSIZE)}, with the bytes of its shape, was expected")
    return Entry(dtype, tuple(shape), *offsets)


def _require_filled(entries: list[Entry], size: int) -> None:
    end = 0
    for entry in sorted(entries, key=lambda each: (each.start, each.stop)):
        if entry.start != end:
            raise ValueError(f"tensors overlap or leave a gap at byte {end}")
        end = entry.stop
    if end != size:
        raise ValueError(f"tensors of {end} bytes in {size}")
