"""Selectors without a signal, to be beaten: each reads no more than the shape of the document.

``RF`` is short for "What Must a KV-Cache Repair Know to Choose?".
"""

from __future__ import annotations

import torch
from torch import Tensor

from editable_cache.repair.selector import signal
from editable_cache.repair.view import Tier0View


@signal("random", tier=0)
def random_cells(view: Tier0View, *, seed: int = 0) -> Tensor:
    """Uniform numbers in [0, 1); the same for the same `seed` and shape. The generators of torch are left alone.

    Source: RF, section 3, its random baseline.
    """
    return torch.rand(view.prefill.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


@signal("even_columns", tier=0)
def even_columns(view: Tier0View) -> Tensor:
    """Token columns in the order of van der Corput's sequence: the first k are evenly spread, for every k.

    For a k that is a power of two the gaps are equal, else they differ by a factor of two at most, up to rounding.

    Source: RF, section 3, "evenly spaced token columns"; van der Corput 1935 for an order that needs no budget.
    """
    num_tokens = view.prefill.shape[1]
    bits = max(1, (num_tokens - 1).bit_length())
    reversed_ = [int(f"{place:0{bits}b}"[::-1], 2) for place in range(2**bits)]
    order = torch.tensor([slot for slot in reversed_ if slot < num_tokens])
    found = torch.empty(num_tokens, dtype=torch.float32)
    found[order] = torch.arange(num_tokens, 0, -1, dtype=torch.float32)
    return found.expand(view.prefill.shape)


@signal("shallow_layers", tier=0)
def shallow_layers(view: Tier0View) -> Tensor:
    """``-l``: complete layers from the lowest up. Whole columns all tie, and come in the order of their slots.

    Source: RF, section 3: -0.005 at 10 % of the cells.
    """
    return -_layers(view)


@signal("deep_layers", tier=0)
def deep_layers(view: Tier0View) -> Tensor:
    """``l``: complete layers from the highest down. Whole columns all tie, and come in the order of their slots.

    Source: ours, the control of ``shallow_layers``.
    """
    return _layers(view)


@signal("boundary", tier=0)
def boundary(view: Tier0View, *, chunk_tokens: int = 512) -> Tensor:
    """``-(j mod chunk_tokens)``: the first k tokens of each chunk of the document, k by the budget.

    Source: Hu et al. 2024, EPIC (LegoLink: the first k tokens of each chunk, which attract attention by mistake).
    """
    return -(torch.arange(view.prefill.shape[1]) % chunk_tokens).to(torch.float32).expand(view.prefill.shape)


@signal("window", tier=0)
def window(view: Tier0View) -> Tensor:
    """``-distance(j)``: the contiguous window right behind the contamination.

    Source: arXiv 2609.17983, "Contiguity, Not Importance".
    """
    return -view.prefill.distance.to(torch.float32).expand(view.prefill.shape)


def _layers(view: Tier0View) -> Tensor:
    num_layers, num_tokens = view.prefill.shape
    return torch.arange(num_layers, dtype=torch.float32)[:, None].expand(num_layers, num_tokens)
