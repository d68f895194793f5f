"""What was recorded about a span that may need repair: one value per layer and token of the span, no cells.

The *document* is the span to be repaired, the *contamination* the span of slots whose influence is to be removed, and
a *layer* is one that keeps cells per token, in the order of the stack. Arrays are on the CPU and share nothing with
the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from editable_cache.errors import LedgerError


@dataclass(frozen=True, eq=False)
class PrefillTrace:
    """Tier 0: what the prefill of contamination and document left behind, before any query is known.

    float32 ``[num_layers, num_tokens]``, without units unless said otherwise. ``alpha_ij`` is the attention of token i
    to token j, ``I`` the slots of the contamination.

    Attributes:
        inflow: norm of ``sum over j in I of alpha_ij v_j W_O`` (all heads through the output projection), over the norm
            of the residual stream that enters the block.
        attention_to_contamination: ``sum over j in I of alpha_ij``, mean over heads; in [0, 1].
        attention_received: ``sum over i of alpha_ij`` over the later tokens of the document, mean over heads, divided
            by the number of those tokens; in [0, 1]; 0 for the last token.
        key_norm: norm of the cell's key as it stands in the cache, over all key-value heads together.
        value_norm: norm of the cell's value, over all key-value heads together.
        hidden_norm: norm of the residual stream that enters the block.
        token_ids: int64 ``[num_tokens]``.
        distance: int64 ``[num_tokens]``, slots behind the end of the contamination: 0 for the first one behind it.
        is_delimiter: bool ``[num_tokens]``: the token is punctuation, a line break or special.
    """

    inflow: Tensor
    attention_to_contamination: Tensor
    attention_received: Tensor
    key_norm: Tensor
    value_norm: Tensor
    hidden_norm: Tensor
    token_ids: Tensor
    distance: Tensor
    is_delimiter: Tensor

    def __post_init__(self) -> None:
        """Raise ``LedgerError`` if an array has another shape or dtype than the rest, is not finite or negative."""
        per_token = {"token_ids": torch.int64, "distance": torch.int64, "is_delimiter": torch.bool}
        _require_arrays(self, per_token)
        if bool((self.distance < 0).any()):
            raise LedgerError("PrefillTrace.distance: expected slots behind the contamination, got a negative number.")

    @property
    def shape(self) -> tuple[int, int]:
        """Number of layers and of tokens."""
        return self.inflow.shape[0], self.inflow.shape[1]


@dataclass(frozen=True, eq=False)
class ProbeTrace:
    """Tier 1: what one forward of a query over the contaminated cache read from it.

    Attributes:
        attention: ``alpha_qj``, mean over heads and over the tokens q of the query; float32
            ``[num_layers, num_tokens]``, in [0, 1].
        readout: norm of ``sum over q of alpha_qj v_j W_O`` (all heads through the output projection): how much of the
            attention output of the query comes from the cell; float32 ``[num_layers, num_tokens]``.
    """

    attention: Tensor
    readout: Tensor

    def __post_init__(self) -> None:
        """Raise ``LedgerError`` if an array has another shape or dtype than the rest, is not finite or negative."""
        _require_arrays(self, {})

    @property
    def shape(self) -> tuple[int, int]:
        """Number of layers and of tokens."""
        return self.attention.shape[0], self.attention.shape[1]


@dataclass(frozen=True, eq=False)
class CleanTrace:
    """Tier 2: what the clean cache tells. For research only: who has that cache has nothing to repair.

    Attributes:
        attention: like ``ProbeTrace.attention``, of the same query over the clean cache.
        key_deviation: L2 norm of the cell's key here minus its key in the clean cache, at the same position, over all
            key-value heads together; float32 ``[num_layers, num_tokens]``.
        value_deviation: the same for the value.
    """

    attention: Tensor
    key_deviation: Tensor
    value_deviation: Tensor

    def __post_init__(self) -> None:
        """Raise ``LedgerError`` if an array has another shape or dtype than the rest, is not finite or negative."""
        _require_arrays(self, {})

    @property
    def shape(self) -> tuple[int, int]:
        """Number of layers and of tokens."""
        return self.attention.shape[0], self.attention.shape[1]


TRACED_ONLY = ("inflow", "attention_to_contamination", "attention_received", "hidden_norm")
"""Arrays of a ``PrefillTrace`` that nothing but a trace tells; the cache knows the others."""


def pooled(probes: Sequence[ProbeTrace], how: Literal["mean", "max"] = "mean") -> ProbeTrace:
    """One trace of several queries over the same document: the mean of each cell's attention and readout, or the most.

    A bank of generic queries stands in for a request that is not known yet.

    Raises:
        LedgerError: for no trace, or traces of different shapes.
    """
    shapes = sorted({trace.shape for trace in probes})
    if len(shapes) != 1:
        raise LedgerError(f"pooled: expected one or more traces of one document, got shapes {shapes}.")
    stacked = (torch.stack([getattr(trace, name) for trace in probes]) for name in ("attention", "readout"))
    return ProbeTrace(*(each.mean(0) if how == "mean" else each.amax(0) for each in stacked))


def _require_arrays(trace: PrefillTrace | ProbeTrace | CleanTrace, per_token: dict[str, torch.dtype]) -> None:
    """Every field is an array ``[num_layers, num_tokens]`` like the first one, or one per token of the dtype given."""
    kind, names = type(trace).__name__, [field.name for field in fields(trace)]
    first = getattr(trace, names[0])
    shape = tuple(first.shape) if isinstance(first, Tensor) else ()
    if len(shape) != 2 or 0 in shape:
        raise LedgerError(
            f"{kind}: expected arrays [num_layers, num_tokens] with a layer and a token, got {list(shape)}."
        )
    for name in names:
        array = getattr(trace, name)
        dtype, wanted = per_token.get(name, torch.float32), shape[1:] if name in per_token else shape
        if not isinstance(array, Tensor):
            raise LedgerError(f"{kind}.{name}: expected a tensor, got {type(array).__name__}.")
        if array.dtype != dtype or tuple(array.shape) != wanted or array.device.type != "cpu":
            raise LedgerError(
                f"{kind}.{name}: expected {dtype} {list(wanted)} on the CPU, got {array.dtype} "
                f"{list(array.shape)} on {array.device}."
            )
        if dtype == torch.float32 and not bool(((array >= 0) & array.isfinite()).all()):
            raise LedgerError(f"{kind}.{name}: expected finite numbers of at least 0; record the trace again.")
