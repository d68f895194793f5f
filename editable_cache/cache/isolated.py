"""Isolated chunks as a ledger records them: one group for each part of a chunk, and cells that no token made."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from editable_cache.cache.ledger import UNKNOWN, Isolated, Ledger
from editable_cache.chunk import KVChunk


class Isolation(NamedTuple):
    """What a ledger records about tokens of a chunk (see ``Ledger``).

    Attributes:
        chunks: what each part was, the parts without any of these tokens left out.
        groups: int64 ``[num_tokens]``, the number of each token's part among all isolated chunks of the ledger.
        offsets: int64 ``[num_tokens]``, index of each token in its part.
    """

    chunks: tuple[Isolated, ...]
    groups: Tensor
    offsets: Tensor


def isolation(chunk: KVChunk, first: int, stop: int, held: int) -> Isolation:
    """What tokens ``[first, stop)`` of ``chunk`` are, in a ledger that holds ``held`` isolated chunks already."""
    chunks: list[Isolated] = []
    groups, offsets = torch.zeros(stop - first, dtype=torch.int64), torch.zeros(stop - first, dtype=torch.int64)
    for part in chunk.parts:
        low, high = max(part.start, first), min(part.stop, stop)
        if low < high:
            chunks.append(Isolated(tuple(chunk.token_ids[part.start : part.stop].tolist()), part.prefix_ids))
            groups[low - first : high - first] = held + len(chunks)
            offsets[low - first : high - first] = torch.arange(low, high) - part.start
    return Isolation(tuple(chunks), groups, offsets)


def trained(ledger: Ledger) -> Tensor:
    """bool ``[batch, length]``: cells of a spliced chunk that no token made (a trained prefix)."""
    return (ledger.ids == UNKNOWN) & (ledger.groups > 0)
