"""A new order of slots, written as the pieces it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from editable_cache.chunk import KVChunk


class Keep(NamedTuple):
    """Slots ``[start, stop)`` of the cache as it is."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Paste(NamedTuple):
    """All cells of a chunk."""

    chunk: KVChunk

    def __len__(self) -> int:
        return len(self.chunk)


class Blank(NamedTuple):
    """Slots for tokens whose cells are computed next; ``token_ids`` is int64 ``[batch, num_tokens]``."""

    token_ids: Tensor

    def __len__(self) -> int:
        return int(self.token_ids.shape[-1])


Piece = Keep | Paste | Blank


def total_length(pieces: Sequence[Piece]) -> int:
    """Number of slots of the new order."""
    return sum(map(len, pieces))


def untouched_prefix(pieces: Sequence[Piece]) -> int:
    """Number of leading slots that stay where they are."""
    length = 0
    for piece in pieces:
        if not isinstance(piece, Keep) or piece.start != length:
            break
        length = piece.stop
    return length


def move_spans(pieces: Sequence[Piece], start: int, stop: int) -> list[tuple[int, int]]:
    """Where the old slots ``[start, stop)`` went, as ascending, merged spans of new slots."""
    spans: list[tuple[int, int]] = []
    offset = 0
    for piece in pieces:
        if isinstance(piece, Keep):
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                spans.append((offset + low - piece.start, offset + high - piece.start))
        offset += len(piece)
    return merge(spans)


def merge(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending union of half-open spans."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def spans_of(mask: Tensor) -> list[tuple[int, int]]:
    """The runs of True in a bool mask ``[length]``, as ascending half-open spans."""
    edges = torch.diff(
        mask.to(torch.int8), prepend=torch.zeros(1, dtype=torch.int8), append=torch.zeros(1, dtype=torch.int8)
    )
    starts, stops = (edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist()
    return list(zip(starts, stops, strict=True))
