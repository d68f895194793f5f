"""Cut a chunk out of a cache."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from editable_cache.adapters import made_by, measured
from editable_cache.cache import UNKNOWN, Ledger, LedgeredCache
from editable_cache.chunk import ImageSpan, KVChunk, Part, Provenance
from editable_cache.errors import LedgerError, SpanError
from editable_cache.forward import run
from editable_cache.forward.move import check_reach
from editable_cache.forward.spans import Where, resolve


def extract(cache: LedgeredCache, tokenizer: Any, where: Where, *, name: str | None = None) -> KVChunk:
    """Cut out a chunk; see ``EditableCache.extract``."""
    model = run.require_model(cache, "extract")
    cache.require_idle("extract")
    cache.adopt()
    cache.require_cells_only("extract", "compile the text with Skill.precompile")
    cache.require_same_weights("extract")
    ledger = cache.ledger
    start, stop = resolve(ledger, where, "extract")
    if ledger.batch != 1:
        raise SpanError(f"extract: expected a cache of one row, got {ledger.batch}; take a row with unstack() first.")
    ids = ledger.ids[0, start:stop]
    if bool((ids == UNKNOWN).any()):
        raise LedgerError(
            f"extract: the ids of slots [{start}, {stop}) are unknown: no token made these cells (a trained "
            "prefix), or the cache never saw it; only tokens that it saw can be cut out."
        )
    check_reach(measured(model), ledger.positions, "extract")  # all keys are turned as the last one asks for
    causes = ledger.causes(start, stop)
    seen = tuple(ledger.ids[0, :start].tolist())
    isolated = bool((ledger.groups[0, start:stop] != 0).any())
    parts = _isolated_parts(ledger, start, stop)
    if parts:  # pieces of isolated chunks have seen what those chunks had seen, and nothing else
        seen, causes, isolated = (parts[0].prefix_ids if len(parts) == 1 else ()), (), False
    before = [*seen, *(each for part in parts for each in part.prefix_ids)]
    gaps = not torch.equal(ledger.positions[0, :stop], torch.arange(stop)) and not parts and bool(seen)
    note = "; ".join(
        [
            *(f"stale: {cause}" for cause in causes),
            *(["holds cells of an isolated chunk"] if isolated else []),
            *(["computed at positions with gaps or out of order"] if gaps else []),
        ]
    )
    provenance = Provenance("extracted" if seen or note else "precompiled", seen, note)
    if len(parts) > 1:
        provenance = Provenance("merged", parts=tuple(parts))
    return KVChunk(
        layers=tuple(
            {name: tensor[..., start:stop, :].detach().clone() for name, tensor in layer.view().items()}
            for layer in cache.editable_layers
        ),
        token_ids=ids.clone(),
        axes=ledger.axes[0, start:stop].clone() if bool(ledger.axes[0, start:stop].any()) else None,
        images=image_spans(ledger, start, stop),
        position_ids=ledger.positions[0, start:stop].clone(),
        **made_by(model, tokenizer, torch.cat((torch.tensor(before, dtype=torch.int64), ids))),
        provenance=provenance,
        name=name,
    )


def image_spans(ledger: Ledger, start: int, stop: int, row: int = 0) -> tuple[ImageSpan, ...]:
    """The images of slots ``[start, stop)`` of a row, counted from ``start``, ascending."""
    numbers = ledger.images[row, start:stop]
    spans = []
    for number in numbers[numbers > 0].unique().tolist():
        slots = (numbers == number).nonzero()[:, 0].tolist()
        spans.append(ImageSpan(slots[0], slots[-1] + 1, ledger.digests[number - 1]))
    return tuple(sorted(spans, key=lambda span: span.start))


def _isolated_parts(ledger: Ledger, start: int, stop: int) -> list[Part]:
    """The pieces of isolated chunks that a span is made of, each in its order; none if other cells are among them."""
    groups, offsets = ledger.groups[0, start:stop], ledger.offsets[0, start:stop]
    if not bool((groups > 0).all()):
        return []
    breaks = (groups.diff() != 0) | (offsets.diff() != 1)
    borders = [0, *(breaks.nonzero()[:, 0] + 1).tolist(), stop - start]
    parts = []
    for low, high in itertools.pairwise(borders):
        chunk = ledger.chunks[int(groups[low]) - 1]
        parts.append(Part(low, high, (*chunk.prefix_ids, *chunk.ids[: int(offsets[low])])))
    return parts
