"""Which tokens behind a field matter, told by the exact cache: by causal effect, and by how far their cells are off."""

from __future__ import annotations

import torch
from torch import Tensor

from editable_cache.adapters import host
from editable_cache.editable import EditableCache
from editable_cache.errors import TaskError
from editable_cache.evaluation.asking import Asking

ROWS = 16
"""Variants of one cache that are read in one forward."""


def effect_order(asking: Asking, cache: EditableCache, exact: EditableCache, behind: slice) -> Tensor:
    """Slots of ``behind`` by the effect of giving that one token its exact cells, largest first (the study, section 3).

    int64 ``[n]``. Both caches hold the same number of tokens at the same positions.

    Raises:
        TaskError: for an item with a chain of thought, whose last token decides nothing.
    """
    if asking.item.mode != "direct":
        raise TaskError(f"Item {asking.item.key}: expected direct mode to rank tokens by their effect, got a chain.")
    order: Tensor = single_effects(asking, cache, exact, behind).argsort(descending=True, stable=True)
    return torch.add(order, behind.start)


def single_effects(asking: Asking, cache: EditableCache, exact: EditableCache, behind: slice) -> Tensor:
    """Change of the gap towards the new answer when one token of ``behind`` gets its exact cells, float64 ``[n]``."""
    slots = torch.arange(behind.start, behind.stop)
    masks = torch.zeros((len(slots), len(cache.ledger)), dtype=torch.bool)
    masks[torch.arange(len(slots)), slots] = True
    return patched_gaps(asking, cache, exact, masks) - gap_of(asking, asking.read(cache)[None])[0]


def patched_gaps(asking: Asking, cache: EditableCache, source: EditableCache, masks: Tensor) -> Tensor:
    """Gaps of variants of ``cache`` whose cells come from ``source`` where a mask is set, float64 ``[num_masks]``.

    The last token runs on each variant; nothing is written.

    Args:
        masks: bool ``[num_masks, seq_len]``, or ``[num_masks, num_layers, seq_len]``.
    """
    gaps = [gap_of(asking, _read_rows(asking, cache, source, some)) for some in masks.split(ROWS)]
    return torch.cat(gaps)


def gap_of(asking: Asking, logits: Tensor) -> Tensor:
    """Logit of the new value's answer minus that of the old one's, float64 ``[...]`` of ``[..., vocab]``."""
    return (logits[..., asking.new_id] - logits[..., asking.old_id]).double()


def deviation_order(asking: Asking, cache: EditableCache, exact: EditableCache, behind: slice) -> Tensor:
    """Slots of ``behind`` by how far values are off at the second layer, largest first.

    The selection of CacheBlend (Yao et al. 2025, section 4), which computes the first layers of all tokens to know it.
    """
    layers = (cache.editable_layers, exact.editable_layers)
    check = min(1, len(layers[0]) - 1)
    mine, theirs = (found[check].view()["values"][..., behind, :] for found in layers)
    order: Tensor = (mine - theirs).float().square().sum((0, 1, 3)).argsort(descending=True, stable=True)
    return torch.add(order, behind.start)


def _read_rows(asking: Asking, cache: EditableCache, source: EditableCache, masks: Tensor) -> Tensor:
    """Logits ``[rows, vocab]`` of the last token on a stock cache of patched copies."""
    last, rows = len(cache.ledger) - 1, len(masks)
    stock = host.full_cache(asking.model.config)
    whole = masks if masks.dim() == 3 else masks[:, None].expand(-1, len(cache.editable_layers), -1)
    for index, (mine, theirs) in enumerate(zip(cache.editable_layers, source.editable_layers, strict=True)):
        chosen = whole[:, index, :last, None][:, None]
        held, given = mine.view(), theirs.view()
        keys, values = (
            torch.where(chosen, given[name][..., :last, :], held[name][..., :last, :]) for name in ("keys", "values")
        )
        stock.update(keys, values, index)
    ids = cache.token_ids[:, last:].expand(rows, -1)
    positions = cache.positions[:, last:].expand(rows, -1)
    return host.run(asking.model, ids, stock, position_ids=positions, last_logits_only=True)[:, -1].float()
