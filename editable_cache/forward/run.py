"""Forwards of the library: new tokens at the end, chosen cells in the middle, and logits without writing anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from editable_cache.adapters import host, model_spec
from editable_cache.cache import UNKNOWN, LedgeredCache, Segment
from editable_cache.cache.layer import Scatter
from editable_cache.errors import LedgerError, SpanError, UnsupportedModelError
from editable_cache.spec import LayerSpec, ModelSpec

PREFILL_TOKENS = 1024
"""New tokens in one forward; longer texts are prefilled piece by piece, which is exact and bounds memory."""

SCATTER_TOKENS = 512
"""Chosen tokens in one forward; their mask has this many rows."""

PROGRESS_FROM = 4
"""A progress bar is shown from this many forwards on."""


def require_model(cache: LedgeredCache, operation: str) -> nn.Module:
    """The cache's model, or an error that says how to give one."""
    if cache.model is not None and cache.model.training:
        raise UnsupportedModelError(
            f"{operation}: expected the model in evaluation mode, got training mode, in which dropout would enter the "
            "cells; call model.eval()."
        )
    if cache.model is None:
        raise UnsupportedModelError(
            f"{operation}: expected a cache with a model, got none; make it with EditableCache(model)."
        )
    return cache.model


def check_limit(model: nn.Module, last_position: int, operation: str) -> None:
    """Refuse positions that the model was not built for.

    Raises:
        SpanError: naming the limit.
    """
    limit = getattr(host.text_config(model.config), "max_position_embeddings", None)
    if limit is not None and last_position >= limit:
        raise SpanError(
            f"{operation}: expected positions below {limit} (max_position_embeddings), got {last_position}; shorten "
            "the context, or remove a segment first."
        )


def check_ids(model: nn.Module, ids: Tensor, operation: str) -> None:
    """Refuse ids that the model has no embedding for (on a GPU they would take the whole process down).

    Raises:
        SpanError: naming the first one.
    """
    size = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    wrong = ids[(ids < 0) | (ids >= size)]
    if wrong.numel():
        raise SpanError(
            f"{operation}: expected token ids in [0, {size}), got {int(wrong[0])}; use the tokenizer of this model."
        )


def check_padding(cache: LedgeredCache, valid: Tensor, operation: str) -> None:
    """Refuse padding behind the cache where a sliding window, which counts slots, would count it.

    Raises:
        UnsupportedModelError: naming the window.
    """
    if not len(cache.ledger) or bool(valid.all()) or cache.model is None:
        return
    windows = [window for window in host.cache_layout(cache.model.config).windows if window is not None]
    total = len(cache.ledger) + valid.shape[1]
    if windows and total > min(windows):
        raise UnsupportedModelError(
            f"{operation}: expected contents of one length for all rows, got padding in the middle of {total} slots: "
            f"this model's sliding window counts slots ({min(windows)}), so shorter rows would see less than alone. "
            "unstack() the cache and run the rows one by one, or give all rows equally many tokens."
        )


def feed_unfed(cache: LedgeredCache) -> int:
    """Feed what the last ``generate`` returned and did not run: its last token. Call inside an operation that puts
    something behind the cache. Returns the number of tokens.
    """
    unfed, cache.unfed = cache.unfed, None
    if unfed is None:
        return 0
    extend(cache, unfed, Segment("", 0, 0, "generated", grows=True))
    return int(unfed.shape[1])


def extend(
    cache: LedgeredCache,
    ids: Tensor,
    segment: Segment,
    *,
    valid: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Prefill new tokens behind the last slot; call inside an operation.

    Args:
        ids: int64 ``[batch, num_tokens]``, at least one.
        segment: what they are called.
        valid: bool ``[batch, num_tokens]``, False for padding.
        positions: int64 ``[batch, num_tokens]``; those that follow by default.

    Returns:
        Logits of the last token, ``[batch, vocab]``.
    """
    model = require_model(cache, "append")
    valid = torch.ones(ids.shape, dtype=torch.bool) if valid is None else valid
    positions = cache.ledger.next_positions(valid) if positions is None else positions
    check_ids(model, ids, "append")
    check_limit(model, int(positions.max()), "append")
    logits = forward_at_end(cache, ids, positions, torch.cat((cache.ledger.valid, valid), dim=1))
    cache.ledger = cache.ledger.extended(ids, positions, valid, segment)
    return logits


def forward_at_end(cache: LedgeredCache, ids: Tensor, positions: Tensor, valid: Tensor) -> Tensor:
    """Run tokens that follow what the layers hold, in pieces; the ledger is the caller's. Returns the last logits.

    Args:
        valid: bool ``[batch, length + num_tokens]``.
    """
    model = require_model(cache, "forward")
    length, logits = valid.shape[1] - ids.shape[1], None
    padded = not bool(valid.all())
    for start, stop in _pieces(ids.shape[1], PREFILL_TOKENS, "prefill"):
        mask = valid[:, : length + stop].long().to(host.device_of(model)) if padded else None
        with cache.library_forward():
            logits = host.run(
                model,
                ids[:, start:stop],
                cache,
                position_ids=positions[:, start:stop],
                attention_mask=mask,
                last_logits_only=True,
            )
        held = {layer.length for layer in cache.editable_layers if layer.is_initialized}
        if held - {length + stop}:
            raise LedgerError(
                f"forward: expected {length + stop} tokens in every layer afterwards, got {sorted(held)}."
            )
    if logits is None:
        raise SpanError("forward: expected at least one token, got none.")
    return logits[:, -1]


def recompute_slots(cache: LedgeredCache, slots: Tensor, rows: Tensor | None = None) -> int:
    """Recompute cells against what now precedes them; call inside an operation.

    Each chosen token runs through the whole model at its recorded position; at the layers where it is selected its
    new cell is written before any query of that layer reads it. This is the CELLS oracle, and CacheBlend's selective
    recompute (Yao et al., 2025, section 4) for any mask.

    Args:
        slots: int64 ``[num_tokens]``, ascending.
        rows: bool ``[num_layers, num_tokens]``, the cells to write; None for all.

    Returns:
        The number of tokens that ran.
    """
    if not len(slots):
        return 0
    ledger = cache.ledger
    _require_ids(cache, slots)
    start = int(slots[0])
    if rows is None and len(slots) == len(ledger) - start:
        for layer in cache.editable_layers:
            layer.truncate(start)
        forward_at_end(cache, ledger.ids[:, start:], ledger.positions[:, start:], ledger.valid)
    else:
        for low, high in _pieces(len(slots), SCATTER_TOKENS, "recompute"):
            _scatter(cache, slots[low:high], None if rows is None else rows[:, low:high])
    whole = torch.ones(len(slots), dtype=torch.bool) if rows is None else rows.all(dim=0)
    for layer in cache.editable_layers:
        layer.settle(slots[~whole].to(layer.device))
    cache.ledger = ledger.recomputed(slots[whole], slots[~whole])
    return len(slots)


def next_token_logits(cache: LedgeredCache) -> Tensor:
    """Logits after the last slot, ``[batch, vocab]``; the last token runs again and nothing is written."""
    if not len(cache.ledger):
        raise SpanError("next_token_logits: expected at least one token in the cache, got none.")
    slots = torch.tensor([len(cache.ledger) - 1])
    _require_ids(cache, slots)
    nothing = torch.zeros((len(cache.layers), 1), dtype=torch.bool)
    return _scatter(cache, slots, nothing)[:, -1]


def spec_for_masks(model: nn.Module, operation: str) -> ModelSpec:
    """The model's spec, if it takes masks over chosen cells.

    Raises:
        UnsupportedModelError: if it does not.
    """
    spec = model_spec(model)
    if spec.mask_form == "none":
        raise UnsupportedModelError(
            f"{operation}: {type(model).__name__} does not honour a mask over chosen cells (measured); recompute a "
            f"whole suffix instead."
        )
    return spec


def _scatter(cache: LedgeredCache, slots: Tensor, rows: Tensor | None) -> Tensor:
    model = require_model(cache, "recompute")
    spec = spec_for_masks(model, "recompute")
    mask = _masks(cache, spec, slots)
    with _scattering(cache, slots, rows), cache.library_forward():
        return host.run(
            model,
            cache.ledger.ids[:, slots],
            cache,
            position_ids=cache.ledger.positions[:, slots],
            attention_mask=mask,
            last_logits_only=True,
        )


@contextmanager
def _scattering(cache: LedgeredCache, slots: Tensor, rows: Tensor | None) -> Iterator[None]:
    for layer_idx, layer in enumerate(cache.editable_layers):
        where = slots.to(layer.device)
        layer.scatter = Scatter(where, None if rows is None else rows[layer_idx].to(layer.device))
    try:
        yield
    finally:
        for layer in cache.editable_layers:
            layer.scatter = None


def _masks(cache: LedgeredCache, spec: ModelSpec, slots: Tensor) -> Any:
    """Additive float masks ``[batch, 1, num_rows, length]``: one, or one for each layer type, with the window inside.

    Additive because eager attention adds whatever it is given: a bool mask would be silently wrong.
    """
    model = require_model(cache, "recompute")
    dtype, device = host.dtype_of(model), host.device_of(model)
    columns = torch.arange(len(cache.ledger))
    seen = (columns <= slots[:, None]) & cache.ledger.valid[:, None, None, :]
    made: dict[int | None, Tensor] = {}

    def additive(layer: LayerSpec) -> Tensor:
        window = layer.sliding_window
        if window not in made:
            inside = seen if window is None else seen & (columns > slots[:, None] - window)
            low = torch.tensor(torch.finfo(dtype).min, dtype=dtype)
            made[window] = torch.where(inside, torch.zeros((), dtype=dtype), low).to(device)
        return made[window]

    if spec.mask_form == "tensor":
        return additive(spec.layers[0])
    return {layer.layer_type: additive(layer) for layer in spec.layers}


def _pieces(count: int, size: int, what: str) -> Sequence[tuple[int, int]] | tqdm[tuple[int, int]]:
    pieces = [(start, min(start + size, count)) for start in range(0, count, size)]
    return tqdm(pieces, desc=what, unit="forward", leave=False) if len(pieces) >= PROGRESS_FROM else pieces


def _require_ids(cache: LedgeredCache, slots: Tensor) -> None:
    unknown = ((cache.ledger.ids[:, slots] == UNKNOWN) & cache.ledger.valid[:, slots]).any(dim=0)
    if bool(unknown.any()):
        raise LedgerError(
            f"The ids at slots {slots[unknown][:5].tolist()} are unknown: these tokens reached the cache without "
            "passing the watched model's forward (an inner module, embeddings instead of ids, layers filled by "
            "hand). They can't be run again."
        )
