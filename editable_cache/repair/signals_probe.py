"""Signals of tier 1: they also read what one forward of a query took from the contaminated cache.

The query may be the request that is about to be served, or any stand-in: a bank of probes, the document's last tokens.
``RF`` is short for "What Must a KV-Cache Repair Know to Choose?"; l is a layer, j a token of the document.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from editable_cache.repair.selector import ranks, signal
from editable_cache.repair.signals_prefill import inflow_accumulated, inflow_entering
from editable_cache.repair.view import Tier0View, Tier1View


@signal("probe_attention", tier=1)
def probe_attention(view: Tier1View) -> Tensor:
    """Attention mass that the query gave to cell (l, j), mean over heads and tokens of the query.

    Source: RF, section 3; Li et al. 2024, SnapKV.
    """
    return view.probe.attention


@signal("readout", tier=1)
def readout(view: Tier1View) -> Tensor:
    """``|sum over q of alpha_qj v_j W_O|``: what the query took from cell (l, j).

    Source: RF, section 3, the native weighted-value readout.
    """
    return view.probe.readout


@signal("sir", tier=1)
def sir(view: Tier1View) -> Tensor:
    """``S_IR = rank(A) * rank(readout)``, ranks over all cells: written by the contamination, and read by the query.

    Source: RF, section 3, its winner of tier 1.
    """
    return ranks(inflow_accumulated(_tier0(view))) * ranks(view.probe.readout)


@signal("inflow_attention", tier=1)
def inflow_attention(view: Tier1View) -> Tensor:
    """``rank(A) * rank(attention of the query)``.

    Source: RF, section 3: S_IR without values and output projection.
    """
    return ranks(inflow_accumulated(_tier0(view))) * ranks(view.probe.attention)


@signal("sir_entering", tier=1)
def sir_entering(view: Tier1View) -> Tensor:
    """``rank(E) * rank(readout)``, with E the inflow of the blocks before l: no cell of layer 0 is worth anything.

    Source: ours, after S_IR.
    """
    return ranks(inflow_entering(_tier0(view))) * ranks(view.probe.readout)


@signal("sir_layerwise", tier=1)
def sir_layerwise(view: Tier1View) -> Tensor:
    """S_IR with ranks within each layer: in the sum over a column no layer outweighs another.

    Source: ours, after S_IR, for whole columns.
    """
    accumulated = inflow_accumulated(_tier0(view))
    return ranks(accumulated, per_layer=True) * ranks(view.probe.readout, per_layer=True)


@signal("column_ranks", tier=1)
def column_ranks(view: Tier1View, *, inflow_weight: float = 2.0) -> Tensor:
    """``inflow_weight * rank(sum over l of A_l(j)) + rank(sum over l of readout_l(j))``, the same at all layers.

    Tokens are ranked, not cells, and a sum lets no token out that only one side wants. Inflow weighs more, because a
    token that is computed again sees stale ones: early tokens that the contamination wrote to itself come out clean,
    late ones that are read much do not.

    Source: ours, after S_IR, for whole columns.
    """
    written = ranks(inflow_accumulated(_tier0(view)).sum(0))
    return _columns(view, inflow_weight * written + ranks(view.probe.readout.sum(0)))


@signal("sir_columns", tier=1)
def sir_columns(view: Tier1View) -> Tensor:
    """``rank(sum over l of S_IR_l(j)) + rank(column_ranks(j))``, the same at all layers.

    Source: ours, after S_IR, for whole columns.
    """
    return _columns(view, ranks(sir(view).sum(0)) + ranks(column_ranks(view)[0]))


@signal("near_and_read", tier=1)
def near_and_read(view: Tier1View, *, near_weight: float = 2.0) -> Tensor:
    """``near_weight * rank(-distance(j)) + rank(sum over l of readout_l(j))``, the same at all layers.

    ``column_ranks`` with the distance to the contamination in place of the inflow: it needs no trace.

    Source: ours; the window of arXiv 2609.17983, and RF's readout.
    """
    near = ranks(-view.prefill.distance.to(torch.float32))
    return _columns(view, near_weight * near + ranks(view.probe.readout.sum(0)))


@signal("contaminated_flow", tier=1)
def contaminated_flow(view: Tier1View) -> Tensor:
    """``E_l(j) * readout_l(j) / sum over j of readout_l(j)``.

    The contaminated share of a cell times the cell's share of what the query read at that layer. Magnitudes, not ranks:
    the sum over a column estimates the contamination that reaches the query through token j.

    Source: ours.
    """
    return inflow_entering(_tier0(view)) * _shares(view.probe.readout)


@signal("flow_discounted", tier=1)
def flow_discounted(view: Tier1View) -> Tensor:
    """``contaminated_flow * (num_layers - l) / num_layers``: what is read late has few blocks left to act on.

    Source: ours; RF, section 7: recovery takes hold in the first third of the stack, and accumulates.
    """
    num_layers = view.probe.shape[0]
    left = torch.arange(num_layers, 0, -1, dtype=torch.float32)[:, None] / num_layers
    return contaminated_flow(view) * left


@signal("flow_both", tier=1)
def flow_both(view: Tier1View) -> Tensor:
    """``E_l(j) * (query's share of the readout + document's share of the attention received)``.

    A cell is read twice: by the query, and by the document's later tokens, which carry it on.

    Source: ours, ``contaminated_flow`` with the readers of ``written_and_read`` added.
    """
    readers = _shares(view.probe.readout) + _shares(view.prefill.attention_received)
    return inflow_entering(_tier0(view)) * readers


@signal("sir_window", tier=1)
def sir_window(view: Tier1View, *, width: int = 7) -> Tensor:
    """S_IR averaged over `width` (odd) neighbouring tokens: chosen columns come in runs.

    A token that is computed again reads its neighbours, so repairing a run leaves fewer stale ones in reach.

    Source: ours; pooling as in Li et al. 2024, SnapKV; the case for contiguity: arXiv 2609.17983.
    """
    return F.avg_pool1d(sir(view), width, stride=1, padding=width // 2, count_include_pad=False)


@signal("sir_diverse", tier=1)
def sir_diverse(view: Tier1View, *, reach: int = 2) -> Tensor:
    """``S_IR / (1 + n)``, with n the tokens within `reach` slots whose column sum is higher: columns spread out.

    Source: ours; the opposite bet to ``sir_window``, a one-step form of diverse (submodular) selection.
    """
    found = sir(view)
    column = found.sum(0)
    around = F.pad(column, (reach, reach), value=-torch.inf).unfold(0, 2 * reach + 1, 1)
    return found / (1 + (around > column[:, None]).sum(1))


def _tier0(view: Tier1View) -> Tier0View:
    return Tier0View(view.prefill)


def _columns(view: Tier1View, values: Tensor) -> Tensor:
    """One value per token ``[num_tokens]``, the same at all layers."""
    return values.expand(view.prefill.shape)


def _shares(values: Tensor) -> Tensor:
    """Each layer divided by its sum over the tokens."""
    return values / values.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
