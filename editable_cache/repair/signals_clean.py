"""Signals of tier 2: they also read how the contaminated cache differs from the clean one. For research only.

``RF`` is short for "What Must a KV-Cache Repair Know to Choose?"; CacheBlend is Yao et al. 2025; l is a layer, j a
token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from editable_cache.repair.selector import ranks, signal
from editable_cache.repair.view import Tier2View


@signal("attention_shift", tier=2)
def attention_shift(view: Tier2View) -> Tensor:
    """``|attention of the query here - over the clean cache|`` per cell.

    Source: RF, section 3, its winner among those that know the clean cache.
    """
    return (view.probe.attention - view.clean.attention).abs()


@signal("key_deviation", tier=2)
def key_deviation(view: Tier2View) -> Tensor:
    """``|k - k_clean|``.

    Source: CacheBlend, section 4, the keys' part (LMCache compares keys at its check layers).
    """
    return view.clean.key_deviation


@signal("value_deviation", tier=2)
def value_deviation(view: Tier2View) -> Tensor:
    """``|v - v_clean|``.

    Source: CacheBlend, section 4, the values' part.
    """
    return view.clean.value_deviation


@signal("kv_deviation", tier=2)
def kv_deviation(view: Tier2View) -> Tensor:
    """``sqrt(|k - k_clean|^2 + |v - v_clean|^2)`` per cell.

    Source: CacheBlend, section 4, "KV deviation".
    """
    return torch.hypot(view.clean.key_deviation, view.clean.value_deviation)


@signal("cacheblend", tier=2)
def cacheblend(view: Tier2View, *, check_layer: int = 1) -> Tensor:
    """``kv_deviation`` at one early layer, for all layers: tokens that deviate there are taken as whole columns.

    It needs clean cells up to `check_layer` only (or the last layer, if there are fewer), which a server gets by
    computing those layers for all tokens. At layer 0 there is no deviation yet.

    Source: CacheBlend, section 4: high-deviation tokens of an early layer stay so in the layers above.
    """
    found = kv_deviation(view)
    return found[min(check_layer, len(found) - 1)].expand(found.shape)


@signal("deviation_readout", tier=2)
def deviation_readout(view: Tier2View) -> Tensor:
    """``rank(kv_deviation) * rank(readout)``: S_IR with the true deviation in place of the inflow.

    Source: ours, the bound on what a better estimate of the inflow could bring to S_IR.
    """
    return ranks(kv_deviation(view)) * ranks(view.probe.readout)


@signal("readout_shift", tier=2)
def readout_shift(view: Tier2View) -> Tensor:
    """``attention_shift * value_norm + clean attention * value_deviation``.

    By ``a v - a' v' = (a - a') v + a' (v - v')`` this bounds how far a cell's part of the readout moved.

    Source: ours, attention shift and CacheBlend's deviation of values in one unit.
    """
    moved = attention_shift(view) * view.prefill.value_norm
    return moved + view.clean.attention * view.clean.value_deviation
