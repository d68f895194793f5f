"""Hold a cache with recurrent layers against a plain prefill of what it holds."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from editable_cache.adapters.leaves import tensors_of
from editable_cache.cache import Ledger, LedgeredCache
from editable_cache.cache.kept_layers import KeptValue
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
    for kept, new in zip(map(_numbers, cache.states()), map(_numbers, twin.states()), strict=True):
        if not all(bool(t.isfinite().all()) for t in kept.values()):
            errors.append(math.inf)
        if first == len(ledger):
            same = {place: t.shape for place, t in kept.items()} == {place: t.shape for place, t in new.items()}
            errors += [relative_error(kept[place], t) for place, t in new.items()] if same else [math.inf]
    return PrefillCheck(max(errors), len(ledger) - first, logits.float())


def _numbers(value: Any) -> dict[Any, Tensor]:
    """The numbers of a ``StateValue`` or ``KeptValue``, by their place in the layer."""
    if isinstance(value, KeptValue):
        held = dict(tensors_of(value.leaves))
    else:
        parts = {"conv": value.conv, "recurrent": value.recurrent}
        held = {(kind, i): t for kind, part in parts.items() for i, t in part.items() if t is not None}
    return {place: t for place, t in held.items() if t.is_floating_point() and t.numel()}


def _as_fed(ledger: Ledger) -> list[tuple[int, int]]:
    """Spans of slots to run one after the other: all up to the first generated token, each of those, and so on."""
    single = [slot for s in ledger.segments if s.origin == "generated" for slot in range(s.start, s.stop)]
    borders = sorted({0, len(ledger), *single, *(slot + 1 for slot in single)})
    return list(itertools.pairwise(borders))
