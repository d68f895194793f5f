"""Digest of a tensor's bytes at the speed of memory.

Sums of 8-byte words, wrapping around, over rows and columns of the content laid out 2,048 words wide, hashed with
BLAKE2: the same on every device, and different for any one element changed and any two swapped. It guards against
accident (another weight, a flipped bit, swapped rows), not against an adversary who can choose the bytes.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

WORDS = 2048
FOLD = 16
"""Rows that are first added as one long row when columns are summed: memory is read in order, not in strides."""

BLOCK = 192
"""Rows that are summed both ways before the next ones: they stay in the processor's cache between the passes."""


def checksum(tensor: Tensor) -> str:
    """16 bytes in hex over shape, dtype and content of ``tensor``; layout in memory does not matter."""
    hasher = hashlib.blake2b(f'[{list(tensor.shape)}, "{tensor.dtype}"]'.encode(), digest_size=16)
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = content.numel() // (8 * WORDS) * 8 * WORDS
    if content.storage_offset() % 8:
        content = content.clone()
    table = content[:whole].view(torch.int64).view(-1, WORDS)
    for part in (*_sums(table), content[whole:]):
        hasher.update(part.cpu().numpy().tobytes())
    return hasher.hexdigest()


def _sums(table: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the rows and of the columns of an int64 table, wrapping around."""
    if table.device.type != "cpu" or len(table) < 2 * FOLD:
        return table.sum(dim=1), table.sum(dim=0)
    sums = [(_column_sums(block), block.sum(dim=1)) for block in table.split(BLOCK)]  # columns first is faster
    if len(sums) == 1:
        return sums[0][1], sums[0][0]
    return torch.cat([rows for _, rows in sums]), torch.stack([columns for columns, _ in sums]).sum(dim=0)


def _column_sums(block: Tensor) -> Tensor:
    even = len(block) // FOLD * FOLD
    folded = block[:even].view(-1, FOLD * WORDS).sum(dim=0).view(FOLD, WORDS).sum(dim=0)
    return folded if even == len(block) else folded + block[even:].sum(dim=0)
