"""Move cells, where the model allows it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from editable_cache.adapters import model_spec
from editable_cache.cache import Ledger, LedgeredCache
from editable_cache.cache.arrange import Placed, rearrange
from editable_cache.chunk import KVChunk
from editable_cache.errors import SpanError
from editable_cache.forward.masks import left_padding
from editable_cache.forward.run import require_model
from editable_cache.spec import ModelSpec


def require_moves(cache: LedgeredCache, operation: str) -> ModelSpec | None:
    """How the cells move; None with recurrent layers, where everything behind a change is computed again instead.

    Raises:
        UnsupportedModelError: if the self-test can't prove how they move.
    """
    cache.require_editable(operation)
    model = require_model(cache, operation)
    return None if cache.state_layers else model_spec(model)


def move(cache: LedgeredCache, operation: str, placed: Sequence[Placed], positions: Tensor) -> None:
    """Bring the slots of ``cache`` into another order, at other positions; call inside an operation.

    Raises:
        UnsupportedModelError, SpanError: if this model's cells can't be moved, or not there.
    """
    spec, before = require_moves(cache, operation), cache.ledger
    if spec is not None:
        for old in (before.positions[before.valid], positions.flatten()):
            check_reach(spec, old, operation)
    rearrange(cache, spec, placed, positions)
    if spec is not None:
        check_slots(spec, cache.ledger, operation)


def check_reach(spec: ModelSpec, positions: Tensor, operation: str) -> None:
    """Refuse positions at which moved cells would not be what the model computes there.

    Raises:
        SpanError: with the limit.
    """
    if spec.limit is not None and positions.numel() and int(positions.max()) >= spec.limit.value:
        raise SpanError(
            f"{operation}: expected positions below {spec.limit.value} ({spec.limit.name}), got "
            f"{int(positions.max())}: from there on this model computes differently, so that cells can't be moved. "
            "Append the text instead, or recompute it."
        )


def check_slots(spec: ModelSpec, ledger: Ledger, operation: str) -> None:
    """Refuse an order in which positions are not slots, where the model can't tell them apart.

    Raises:
        SpanError: with what to do.
    """
    if spec.positions != "slots":
        return
    slots = torch.arange(len(ledger)) - (0 if spec.counts_slots else left_padding(ledger.valid)[:, None])
    if not torch.equal(ledger.positions, slots.clamp(min=0).expand(ledger.batch, -1)):
        raise SpanError(
            f"{operation}: the positions of this model are the slots of its cache; expected positions 0 to "
            f"{len(ledger) - 1} without gaps or padding. Close the gap, and work on caches of one row."
        )


def check_blocks(spec: ModelSpec, ledger: Ledger, chunk: KVChunk, slot: int, operation: str) -> None:
    """Refuse a slot where blocks of chunked attention, which begin behind the padding of each row, would cut a chunk
    (each part of a merged one) otherwise than where it was compiled.

    Raises:
        SpanError: with the next slot that fits.
    """
    starts = sorted({slot - padding for padding in left_padding(ledger.valid).tolist()})
    for size, slot in itertools.product(spec.chunk_sizes, starts):
        wanted = _cuts(chunk, size, [len(part.prefix_ids) for part in chunk.parts])
        if wanted == _cuts(chunk, size, [slot + part.start for part in chunk.parts]):
            continue
        others = range(slot + 1, slot + size)
        fits = next((s for s in others if wanted == _cuts(chunk, size, [s + p.start for p in chunk.parts])), None)
        advice = "Splice its parts one by one, or append the text instead."
        if fits is not None:
            advice = (
                f"The next slot that fits is {fits}: put {fits - slot} tokens in front, or append the text instead."
            )
        raise SpanError(
            f"{operation}: this model attends in blocks of {size} slots, and at slot {slot} a border would cut the "
            f"chunk where it was not cut when it was compiled. {advice}"
        )


def _cuts(chunk: KVChunk, size: int, starts: Sequence[int]) -> list[int]:
    """Tokens of a chunk in front of which a block of ``size`` slots begins, where its parts begin at ``starts``."""
    return [
        i
        for part, start in zip(chunk.parts, starts, strict=True)
        for i in range(part.start + 1 + (-start - 1) % size, part.stop, size)
    ]
