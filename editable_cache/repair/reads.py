"""Which signals need a trace of the prefill, and which do with what the cache itself knows."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from editable_cache.repair.selector import Signal
from editable_cache.repair.trace import TRACED_ONLY, CleanTrace, PrefillTrace, ProbeTrace
from editable_cache.repair.view import Tier2View, narrowed

MADE_UP = (4, 64)
"""Layers and tokens of made-up traces."""


@functools.cache
def reads_trace(signal: Signal) -> bool:
    """Whether the scores depend on what only a trace knows: measured on two made-up traces that differ in that."""
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> list[Tensor]:
        return list(torch.rand((count, *MADE_UP), generator=generator, dtype=torch.float32) + 0.01)

    slots = torch.arange(MADE_UP[1])
    marks = {"token_ids": slots * 7 % 5, "distance": slots + 3, "is_delimiter": slots % 4 == 1}
    norms = dict(zip(("key_norm", "value_norm"), drawn(2), strict=True))
    probe, clean = ProbeTrace(*drawn(2)), CleanTrace(*drawn(3))
    found = []
    for _ in range(2):
        prefill = PrefillTrace(**dict(zip(TRACED_ONLY, drawn(4), strict=True)), **norms, **marks)
        found.append(signal(narrowed(Tier2View(prefill, probe, clean), signal.tier)))
    return not torch.equal(*found)
