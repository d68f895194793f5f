"""Digest of a tensor's bytes at the speed of memory.

Integer sums over rows of 4,096 elements, hashed with BLAKE2: exact, and the same on every device. It guards against
accident (another weight, a flipped bit, a truncated file), not against an adversary who can choose the bytes.
"""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

ROW = 4096

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> str:
    """16 bytes in hex over shape, dtype and content of ``tensor``; layout in memory does not matter."""
    hasher = hashlib.blake2b(json.dumps([list(tensor.shape), str(tensor.dtype)]).encode(), digest_size=16)
    flat = tensor.detach().contiguous().reshape(-1)
    numbers = flat.view(_INTEGERS[flat.element_size()])
    rows = numbers.numel() // ROW * ROW
    sums = numbers[:rows].view(-1, ROW).sum(dim=1, dtype=torch.int64)
    rest = numbers[rows:].sum(dtype=torch.int64)[None]
    hasher.update(torch.cat((sums, rest)).cpu().numpy().tobytes())
    return hasher.hexdigest()
