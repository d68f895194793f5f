"""Take over what a stock transformers cache holds: its cells are copied, dequantized where they must be, and held
against the model before anything is believed.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from editable_cache.adapters import host
from editable_cache.cache import Ledger, LedgeredCache, Segment
from editable_cache.cache.layer import EditableLayer
from editable_cache.errors import (
    CompatibilityError,
    ContextWarning,
    LedgerError,
    Reason,
    SpanError,
    UnsupportedModelError,
)
from editable_cache.forward import run
from editable_cache.forward.outcome import operating
from editable_cache.ops import LOW_PRECISION, relative_error

CHECKED_TOKENS = 8
"""Tokens at the start that the model computes again, to see whether cache, ids and model belong together."""

QUANTIZED_TOLERANCE = 0.5
"""Relative error that quantization may explain; other ids, positions or weights differ by more."""

QUANTIZED = "quantized cache"
"""The cause that dequantized cells are stale for."""


class _Cells(NamedTuple):
    """Keys and values of one layer, ``[batch, num_heads, seq_len, head_dim]``, and whether they were quantized."""

    keys: Tensor
    values: Tensor
    quantized: bool


@torch.no_grad()
def adopt(
    into: LedgeredCache,
    cache: Cache,
    ids: Tensor | Sequence[int],
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> None:
    """Fill the empty cache ``into`` with a copy of what ``cache`` holds.

    Cells of a quantized cache are dequantized once, and stand in the report as stale ("quantized cache") until
    ``recompute`` computes them exactly. The model computes the first ``CHECKED_TOKENS`` tokens again, and every layer
    must hold the same.

    Args:
        into: an empty cache of the model that filled ``cache``.
        cache: a stock ``DynamicCache`` (offloaded or not), ``StaticCache`` or ``QuantizedCache``; it is not changed.
        ids: int64 ``[seq_len]`` or ``[batch, seq_len]``, the tokens that it holds. One more is taken as the last token
            that ``generate`` returned and did not feed.
        attention_mask: ``[batch, seq_len]`` (or one more), 0 for padding; no padding by default.
        position_ids: int64 ``[batch, seq_len]`` that the model saw; by default consecutive from 0, padding not
            counted, as ``generate`` makes them.

    Raises:
        SpanError: if ``into`` holds tokens already, or ``cache`` is empty.
        LedgerError: if layers hold different numbers of tokens, or not as many as there are ids.
        CompatibilityError: if the model computes other cells for the first tokens, or the cache has other layers,
            another dtype, or values that are not finite.
        UnsupportedModelError: for layers that dropped tokens, or hold something else than keys and values.

    Warns:
        ContextWarning: where cells were dequantized, with the error.
    """
    _check_kinds(into, cache)
    cells = {i: _read(i, layer) for i, layer in enumerate(cache.layers) if host.kind_of(layer) != "empty"}
    batch, length = _common_shape(cells)
    ids, unfed = _split(ids, batch, length)
    valid = torch.ones_like(ids, dtype=torch.bool)
    if attention_mask is not None:
        valid = attention_mask.cpu()[:, :length].bool().expand(batch, -1)
    positions = Ledger.empty(batch).next_positions(valid)
    if position_ids is not None:
        positions = position_ids.cpu().long()[..., :length].expand(batch, -1)
    if valid.shape != ids.shape or positions.shape != ids.shape:
        raise LedgerError(
            f"from_cache: expected mask and positions {[batch, length]} as the ids, got {list(valid.shape)} and "
            f"{list(positions.shape)}."
        )
    error = _check_start(into, cells, ids, positions, valid)
    name = type(cache).__name__
    note = f"from a {name}"
    with operating(into, "from_cache") as tally:
        for i, layer in cells.items():
            mine: Any = into.layers[i]
            mine.append({"keys": layer.keys, "values": layer.values})
        segment = Segment("adopted", 0, 0, "prefilled", note=note)
        into.ledger, into.unfed = Ledger.empty(batch).extended(ids, positions, valid, segment), unfed
        if any(layer.quantized for layer in cells.values()):
            into.ledger = into.ledger.marked_stale([(0, length)], QUANTIZED)
            tally.notes.append(f"dequantized: relative error {error:.1e} in the first tokens")
        tally.pasted, tally.segment = length, "adopted"
    if any(layer.quantized for layer in cells.values()):
        warnings.warn(
            f"The cells of this {name} were dequantized, once: they are off by up to {error:.1e} in the first tokens, "
            "as they were for the model that read them. cache.recompute(slice(None)) computes them exactly.",
            ContextWarning,
            stacklevel=3,
        )


def _check_kinds(into: LedgeredCache, cache: Any) -> None:
    model = run.require_model(into, "from_cache")
    into.adopt()
    into.require_idle("from_cache")
    into.require_editable("from_cache")
    if len(into.ledger):
        raise SpanError(f"from_cache: expected an empty cache to fill, got one of {len(into.ledger)} tokens.")
    if isinstance(cache, LedgeredCache) and cache.model is not None:
        raise CompatibilityError(
            f"from_cache: expected a stock cache, got a {type(cache).__name__}, which is editable as it is; "
            "cache.fork() makes another one of it."
        )
    if not isinstance(cache, Cache) or len(cache.layers) != len(into.layers):
        count = len(cache.layers) if isinstance(cache, Cache) else 0
        raise CompatibilityError(
            f"from_cache: expected a filled cache of {len(into.layers)} layers for this {type(model).__name__}, got a "
            f"{type(cache).__name__} of {count}."
        )
    foreign = {
        i: type(theirs).__name__
        for i, (mine, theirs) in enumerate(zip(into.layers, cache.layers, strict=True))
        if type(mine) is not EditableLayer and host.kind_of(theirs) != "empty"
    }
    if foreign:
        raise UnsupportedModelError(
            f"from_cache: expected keys and values and nothing else in every layer, got {foreign}. Make an "
            "EditableCache(model) and run the text with it."
        )


def _read(layer_idx: int, layer: Any) -> _Cells:
    """What a layer holds, without padding of static storage, and in one piece.

    Raises:
        UnsupportedModelError: for a layer that does not hold every token, or is of an unknown kind.
    """
    length, quantized = int(layer.get_seq_length()), getattr(layer, "_quantized_keys", None) is not None
    if not length:
        raise SpanError(f"from_cache: expected a filled cache, got no tokens in layer {layer_idx}.")
    if quantized:
        keys, values = _dequantized(layer)
    elif isinstance(layer, EditableLayer) or type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        keys, values = layer.keys, layer.values
    elif type(layer) in (StaticLayer, StaticSlidingWindowLayer):
        keys, values = layer.keys[..., :length, :], layer.values[..., :length, :]
    else:
        raise UnsupportedModelError(
            f"from_cache: expected a dynamic, static or quantized layer, got a {type(layer).__name__} at layer "
            f"{layer_idx}. Make an EditableCache(model) and run the text with it."
        )
    held = {int(keys.shape[-2]), int(values.shape[-2])}
    if held != {length} and layer.is_sliding:
        raise UnsupportedModelError(
            f"from_cache: expected every token in every layer, got the last {min(held)} of {length} in layer "
            f"{layer_idx}: its sliding window dropped the others. Use an EditableCache from the start, which keeps "
            "them."
        )
    if held != {length}:
        raise LedgerError(
            f"from_cache: layer {layer_idx} says that it holds {length} tokens, and holds {sorted(held)}"
            + (": crop and batch operations of a quantized layer reach only its residual part." if quantized else ".")
        )
    home = layer.device if getattr(layer, "device", None) is not None else keys.device
    return _Cells(keys.to(home), values.to(home), quantized)


def _dequantized(layer: Any) -> tuple[Tensor, Tensor]:
    """The quantized part and behind it the residual part, which some quantized layers keep as it came."""
    parts = [layer._dequantize(layer._quantized_keys), layer._dequantize(layer._quantized_values)]
    pending = getattr(layer, "_pending_beam_idx", None)  # a reorder of beams that waits for the next update
    if pending is not None:
        parts = [part.index_select(0, pending.to(part.device)) for part in parts]
    rests = [layer.keys, layer.values]
    batches = {part.shape[0] for part in (*parts, *(rest for rest in rests if rest.numel()))}
    if len(batches) > 1:
        raise LedgerError(
            f"from_cache: expected as many rows in the quantized part as in the residual one, got {sorted(batches)}: "
            "batch operations of a quantized layer reach only its residual part."
        )
    keys, values = (
        torch.cat((part, rest.to(part)), dim=-2) if rest.numel() else part
        for part, rest in zip(parts, rests, strict=True)
    )
    return keys, values


def _common_shape(cells: dict[int, _Cells]) -> tuple[int, int]:
    shapes = {(cell.keys.shape[0], cell.keys.shape[-2]) for cell in cells.values()}
    if len(shapes) != 1:
        raise LedgerError(
            f"from_cache: expected as many rows and tokens in every layer, got {sorted(shapes)} (rows, tokens)."
        )
    return shapes.pop()


def _split(ids: Tensor | Sequence[int], batch: int, length: int) -> tuple[Tensor, Tensor | None]:
    ids = torch.as_tensor(ids).detach().cpu().long()
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.shape[0] != batch or ids.shape[1] - length not in (0, 1):
        raise LedgerError(
            f"from_cache: expected the ids of what the cache holds, {[batch, length]} (or one more column, which "
            f"generate returned and did not feed), got {list(ids.shape)}."
        )
    return ids[:, :length], ids[:, length:] if ids.shape[1] > length else None


def _check_start(into: LedgeredCache, cells: dict[int, _Cells], ids: Tensor, positions: Tensor, valid: Tensor) -> float:
    """Let the model compute the first tokens; the largest relative error of what the cache holds of them.

    Raises:
        CompatibilityError: if it is larger than rounding, or quantization, explains.
    """
    model = run.require_model(into, "from_cache")
    run.check_ids(model, ids[valid], "from_cache")
    dtype = host.dtype_of(model)
    count = min(ids.shape[1], int(valid.long().argmax(dim=1).max()) + CHECKED_TOKENS)
    seen = valid[:, :count]
    fresh = DynamicCache()
    mask = None if bool(seen.all()) else seen.long().to(host.device_of(model))
    host.run(
        model,
        ids[:, :count].masked_fill(~seen, 0),
        fresh,
        position_ids=positions[:, :count],
        attention_mask=mask,
        last_logits_only=True,
    )
    worst, reasons = 0.0, []
    for i, cell in cells.items():
        limit = QUANTIZED_TOLERANCE if cell.quantized else (5e-2 if dtype in LOW_PRECISION else 1e-4)
        for name in ("keys", "values"):
            held, expected = getattr(cell, name), getattr(fresh.layers[i], name)
            if held.dtype != dtype or held.shape[1::2] != expected.shape[1::2]:
                wanted, found = f"{dtype} {list(expected.shape)}", f"{held.dtype} {list(held.shape)}"
                reasons.append(Reason(f"layer {i} {name}", wanted, found))
            elif not bool(held.isfinite().all()):
                reasons.append(Reason(f"layer {i} {name}", "finite values", "some that are not (an fp8 overflow?)"))
            else:
                here = seen.to(held.device)[:, None, :, None].expand(-1, held.shape[1], -1, held.shape[-1])
                error = relative_error(held[..., :count, :][here], expected[here])
                worst = max(worst, error)
                if error > limit:
                    reasons.append(Reason(f"layer {i} {name}", f"error up to {limit:.0e}", f"{error:.1e}"))
    if reasons:
        raise CompatibilityError(
            f"from_cache: this {type(model).__name__} computes other cells for the first {count} tokens than the cache "
            "holds: model, ids, positions and cache do not belong together.",
            tuple(reasons),
        )
    return worst
