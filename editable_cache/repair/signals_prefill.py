"""Signals of tier 0: they read the trace of the prefill, and know neither the query nor the clean cache.

``RF`` is short for "What Must a KV-Cache Repair Know to Choose?", the study with 36 layers. In the formulas l is a
layer and j a token of the document; a cell of layer l was computed from the residual stream that *enters* block l.
"""

from __future__ import annotations

import torch
from torch import Tensor

from editable_cache.repair.selector import ranks, signal
from editable_cache.repair.view import Tier0View

DECAY = 0.8
"""What a block passes on of the inflow that it received (RF, section 3)."""


@signal("inflow", tier=0)
def inflow(view: Tier0View) -> Tensor:
    """``inflow_l(j)``: what the contamination adds to token j at block l, over the residual stream's norm.

    Source: RF, section 3, the term under the sum.
    """
    return view.prefill.inflow


@signal("inflow_accumulated", tier=0)
def inflow_accumulated(view: Tier0View, *, decay: float = DECAY) -> Tensor:
    """``A_l = inflow_l + decay * A_(l-1)``, down the stack.

    Source: RF, section 3, its winner of tier 0.
    """
    rows = list(view.prefill.inflow)
    for layer in range(1, len(rows)):
        rows[layer] = rows[layer] + decay * rows[layer - 1]
    return torch.stack(rows)


@signal("inflow_entering", tier=0)
def inflow_entering(view: Tier0View, *, decay: float = DECAY) -> Tensor:
    """``E_l = A_(l-1)``, ``E_0 = 0``: only what the blocks *before* l added can be in a cell of layer l.

    A cell of layer 0 depends on its token and position alone, so it is clean in any cache.

    Source: ours, after ``inflow_accumulated``.
    """
    accumulated = inflow_accumulated(view, decay=decay)
    return torch.cat([torch.zeros_like(accumulated[:1]), accumulated[:-1]])


@signal("inflow_carried", tier=0)
def inflow_carried(view: Tier0View) -> Tensor:
    """``sum over k < l of inflow_k * h_k / h_l``, with h the norm of the residual stream.

    The residual stream keeps what was added to it, so nothing decays; its share falls as the stream grows. This bounds
    the directly contaminated share of what entered block l.

    Source: ours, from the residual form of the block.
    """
    added = view.prefill.inflow * view.prefill.hidden_norm
    before = added.cumsum(0) - added
    return before / view.prefill.hidden_norm.clamp_min(torch.finfo(torch.float32).tiny)


@signal("inflow_absolute", tier=0)
def inflow_absolute(view: Tier0View) -> Tensor:
    """``inflow_l(j) * h_l(j)``: the norm of what was added, not its share.

    Source: RF, section 3, without the denominator.
    """
    return view.prefill.inflow * view.prefill.hidden_norm


@signal("inflow_delimiter", tier=0)
def inflow_delimiter(view: Tier0View) -> Tensor:
    """``rank(A) * rank(is_delimiter)``: delimiters that the contamination wrote to come first.

    Source: ours; delimiters as aggregators: Wang et al. 2023, "Label Words are Anchors"; Chen et al. 2024, SepLLM.
    """
    return ranks(inflow_accumulated(view)) * ranks(delimiter(view))


@signal("written_and_read", tier=0)
def written_and_read(view: Tier0View) -> Tensor:
    """``rank(A) * rank(attention_received)``: S_IR with the document's own later tokens in place of the query.

    Source: ours, after RF, section 3, for the query-independent selection that its section 9 leaves open.
    """
    return ranks(inflow_accumulated(view)) * ranks(view.prefill.attention_received)


@signal("attention_to_contamination", tier=0)
def attention_to_contamination(view: Tier0View) -> Tensor:
    """Attention mass that token j gave to the contamination at block l, mean over heads.

    Source: RF, section 3: its inflow without values and output projection.
    """
    return view.prefill.attention_to_contamination


@signal("attention_received", tier=0)
def attention_received(view: Tier0View) -> Tensor:
    """Attention mass that cell (l, j) got from the document's later tokens, mean over heads and over them.

    Source: Zhang et al. 2023, H2O ("heavy hitters").
    """
    return view.prefill.attention_received


@signal("value_attention", tier=0)
def value_attention(view: Tier0View) -> Tensor:
    """``attention_received * value_norm``: attention to a cell counts by what it hands over.

    Source: Guo et al. 2024, "Attention Score is not All You Need for Token Importance Indicator" (VATP; there L1 norm).
    """
    return view.prefill.attention_received * view.prefill.value_norm


@signal("key_norm", tier=0)
def key_norm(view: Tier0View) -> Tensor:
    """Norm of the cell's key.

    Source: the opposite of Devoto et al. 2024, as its control.
    """
    return view.prefill.key_norm


@signal("inverse_key_norm", tier=0)
def inverse_key_norm(view: Tier0View) -> Tensor:
    """``-key_norm``: keys of small norm attract attention.

    Source: Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression".
    """
    return -view.prefill.key_norm


@signal("value_norm", tier=0)
def value_norm(view: Tier0View) -> Tensor:
    """Norm of the cell's value.

    Source: Guo et al. 2024 (VATP), its second factor alone.
    """
    return view.prefill.value_norm


@signal("hidden_norm", tier=0)
def hidden_norm(view: Tier0View) -> Tensor:
    """Norm of the residual stream that enters block l: very large at attention sinks.

    Source: Sun et al. 2024, "Massive Activations in Large Language Models".
    """
    return view.prefill.hidden_norm


@signal("recency", tier=0)
def recency(view: Tier0View) -> Tensor:
    """``distance(j)``: the farther behind the contamination, that is the nearer to the query, the sooner.

    Source: Xiao et al. 2023, StreamingLLM: the recent window.
    """
    return _per_token(view, view.prefill.distance)


@signal("seam_distance", tier=0)
def seam_distance(view: Tier0View) -> Tensor:
    """``-min(j, num_tokens - 1 - j)``: the nearer to one of the document's two ends, the sooner.

    Source: ours: a spliced chunk has a seam at either end; ``window`` takes the first one only.
    """
    slots = torch.arange(view.prefill.shape[1])
    return _per_token(view, -torch.minimum(slots, slots.flip(0)))


@signal("delimiter", tier=0)
def delimiter(view: Tier0View) -> Tensor:
    """1 for punctuation, line breaks and special tokens, 0 for words.

    Source: Wang et al. 2023, "Label Words are Anchors"; Chen et al. 2024, SepLLM: delimiters gather their segment.
    """
    return _per_token(view, view.prefill.is_delimiter)


def _per_token(view: Tier0View, values: Tensor) -> Tensor:
    """One value per token ``[num_tokens]``, the same at all layers."""
    return values.to(torch.float32).expand(view.prefill.shape)
