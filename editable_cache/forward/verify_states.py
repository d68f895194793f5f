"""Hold a cache with recurrent layers against a plain prefill of what it holds."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from editable_cache.cache import Ledger, LedgeredCache
from editable_cache.forward import run
from editable_cache.ops import relative_error


class PrefillCheck(NamedTuple):
    """What the comparison found.

    ``live_error`` is the largest relative error of cells that stand before every composed one, and of the states if
    nothing was composed; ``unchecked`` counts the tokens from the first composed one on, for which no oracle exists
    (a state knows them all); ``logits`` are those of the prefill after the last token, float32 ``[batch, vocab]``.
    """

    live_error: float
    unchecked: int
    logits: Tensor


def check_prefill(cache: LedgeredCache) -> PrefillCheck:
    """Prefill everything in the ledger into an empty cache of the same kind and compare. Changes nothing.

    Generated tokens run one by one, as they did: some models decode otherwise than they prefill.
    """
    ledger, twin = cache.ledger, cache.empty_twin()
    ids = ledger.ids.masked_fill(~ledger.valid, 0)
    for start, stop in _as_fed(ledger):
        logits = run.forward_at_end(twin, ids[:, start:stop], ledger.positions[:, start:stop], ledger.valid[:, :stop])
    composed = ((ledger.groups != 0).any(dim=0)).nonzero()
    first = int(composed[0]) if len(composed) else len(ledger)
    errors = [0.0]
    for mine, fresh in zip(cache.editable_layers, twin.editable_layers, strict=True):
        for name, tensor in fresh.view().items():
            seen = ledger.valid[:, :first, None].to(tensor.device)
            expected, found = tensor[..., :first, :], mine.view()[name][..., :first, :]
            shown = seen[:, None].expand_as(expected)
            if bool(shown.any()):
                real = expected.dtype if expected.is_floating_point() else torch.float64
                errors.append(relative_error(found[shown].to(real), expected[shown].to(real)))
    numbers = [t for value in cache.states() for part in (value.conv, value.recurrent) for t in part.values()]
    if not all(t is None or bool(t.isfinite().all()) for t in numbers):
        errors.append(math.inf)
    if first == len(ledger):
        for kept, new in zip(cache.states(), twin.states(), strict=True):
            for held, wanted in ((kept.conv, new.conv), (kept.recurrent, new.recurrent)):
                errors += [relative_error(held[i], t) for i, t in wanted.items() if t is not None]
    return PrefillCheck(max(errors), len(ledger) - first, logits.float())


def _as_fed(ledger: Ledger) -> list[tuple[int, int]]:
    """Spans of slots to run one after the other: all up to the first generated token, each of those, and so on."""
    single = [slot for s in ledger.segments if s.origin == "generated" for slot in range(s.start, s.stop)]
    borders = sorted({0, len(ledger), *single, *(slot + 1 for slot in single)})
    return list(itertools.pairwise(borders))
