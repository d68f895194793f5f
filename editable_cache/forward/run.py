"""Forwards of the library: new tokens at the end, chosen cells in the middle, and logits without writing anything."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from tqdm import tqdm

from editable_cache.adapters import WeightsState, host, length_limit, measured
from editable_cache.cache import UNKNOWN, EditableLayer, Ledger, LedgeredCache, Segment
from editable_cache.cache.axes import every_axis
from editable_cache.cache.layer import Scatter
from editable_cache.cache.lengths import lengthened, shortened
from editable_cache.errors import ContextWarning, LedgerError, SpanError, UnsupportedModelError
from editable_cache.forward.checks import check_regime
from editable_cache.forward.masks import masks_for
from editable_cache.spec import ModelSpec

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


def require_continuing(cache: LedgeredCache, operation: str, state: WeightsState | None = None) -> None:
    """Refuse ``operation`` where a model does not go on rightly from a cache.

    Raises:
        UnsupportedModelError: with the measurement.
    """
    if cache.model is None or cache.model.training:
        return
    against = measured(cache.model, state=state).against_continuing
    if against:
        raise UnsupportedModelError(
            f"{operation}: this {type(cache.model).__name__} does not go on rightly from a cache (measured), so "
            "nothing is put behind others or changed. It still works as a plain transformers cache.",
            against,
        )


def check_limit(model: nn.Module, last_position: int, operation: str) -> None:
    """Refuse positions that the model was not built for.

    Raises:
        SpanError: naming the limit.
    """
    limit = getattr(host.text_config(model.config), "max_position_embeddings", None)
    if limit is not None and 0 < limit <= last_position:  # some configs say -1 where there is none
        raise SpanError(
            f"{operation}: expected positions below {limit} (max_position_embeddings), got {last_position}; shorten "
            "the context, or remove a segment first."
        )


def check_ids(model: nn.Module, ids: Tensor, operation: str) -> None:
    """Refuse ids that the model has no embedding for (on a GPU they would take the whole process down).

    Raises:
        SpanError: naming the first one.
    """
    size = host.num_embeddings(model)
    wrong = ids[(ids < 0) | (ids >= size)]
    if wrong.numel():
        raise SpanError(
            f"{operation}: expected token ids in [0, {size}), got {int(wrong[0])}; use the tokenizer of this model."
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
    axes: Tensor | None = None,
) -> Tensor:
    """Prefill new tokens behind the last slot; call inside an operation.

    Args:
        ids: int64 ``[batch, num_tokens]``, at least one.
        segment: what they are called.
        valid: bool ``[batch, num_tokens]``, False for padding.
        positions: int64 ``[batch, num_tokens]``; those that follow by default.
        axes: int64 ``[batch, num_tokens, num_axes - 1]``, where tokens have further positions (see ``Ledger``).

    Returns:
        Logits of the last token, ``[batch, vocab]``.
    """
    model = require_model(cache, "append")
    valid = torch.ones(ids.shape, dtype=torch.bool) if valid is None else valid
    positions = cache.ledger.next_positions(valid) if positions is None else positions
    check_ids(model, ids, "append")
    check_limit(model, int(positions.max()), "append")
    settle(cache)
    cache.mark(len(cache.ledger))
    places = positions if axes is None else every_axis(positions, axes)
    logits = forward_at_end(cache, ids, places, torch.cat((cache.ledger.valid, valid), dim=1))
    longer = cache.ledger.extended(ids, positions, valid, segment, axes=axes)
    cache.ledger = lengthened(longer, len(cache.ledger), model)
    cache.mark(len(cache.ledger))
    return logits


def forward_at_end(cache: LedgeredCache, ids: Tensor, positions: Tensor, valid: Tensor) -> Tensor:
    """Run tokens that follow what the layers hold, in pieces; the ledger is the caller's. Returns the last logits.

    Args:
        positions: ``position_ids``, int64 ``[batch, num_tokens]`` or ``[num_axes, batch, num_tokens]``.
        valid: bool ``[batch, length + num_tokens]``.
    """
    model = require_model(cache, "forward")
    length, logits = valid.shape[1] - ids.shape[1], None
    padded = not bool(valid.all()) and not (cache.only_states and length)  # Mamba scales new tokens by any mask
    for start, stop in _pieces(ids.shape[1], _step(cache, model, positions, length), "prefill"):
        mask = valid[:, : length + stop].long().to(host.device_of(model)) if padded else None
        with cache.library_forward():
            logits = host.run(
                model,
                ids[:, start:stop],
                cache,
                position_ids=positions[..., start:stop],
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


def _step(cache: LedgeredCache, model: nn.Module, positions: Tensor, length: int) -> int:
    """Most tokens that one forward of tokens at ``positions``, behind ``length`` others, may have."""
    changing = length_limit(model.config)
    if changing is not None and int(positions.max()) >= changing.value:
        if length and int(cache.ledger.positions.max()) < changing.value:
            warnings.warn(
                f"This context now passes position {changing.value} ({changing.name}): the model turns to other "
                "frequencies, while the cells held so far keep the old ones. A plain transformers cache does the same; "
                "recompute(slice(None)) computes all of them alike.",
                ContextWarning,
                stacklevel=2,
            )
        return int(positions.shape[-1])  # in one forward, as a plain prefill: pieces would use different frequencies
    most = measured(model).step_tokens if cache.state_layers and length else None
    return PREFILL_TOKENS if most is None else most


def settle(cache: LedgeredCache) -> None:
    """With recurrent layers, compute again what changed and everything behind it, from the nearest kept state on."""
    if cache.dirty is None:
        return
    ledger, start = cache.ledger, cache.go_back(min(cache.dirty, len(cache.ledger)))
    cache.dirty = None
    slots = torch.arange(start, len(ledger))
    _require_ids(cache, slots)
    for low, high in _between_marks(ledger, start):
        forward_at_end(cache, ledger.ids[:, low:high], ledger.places(slice(low, high)), ledger.valid[:, :high])
        cache.mark(high)
    cache.ledger = ledger.recomputed(slots, slots[:0])
    cache.settled.append((start, len(slots)))


def rewind(cache: LedgeredCache, length: int) -> None:
    """Go back to the first ``length`` tokens of a cache with recurrent layers: to the nearest kept state, and on.

    Raises:
        LedgerError: if cells on the way were composed or are stale: computed again they would be others.
    """
    kept = max((slot for slot in cache.marks if slot <= length), default=0)
    approximate = (cache.ledger.groups[:, kept:length] != 0).any() or cache.ledger.causes(kept, length)
    if kept < length and bool(approximate):
        raise LedgerError(
            f"The recurrent state after {length} tokens was not kept, and those behind the last one that was (slot "
            f"{kept}) are composed or stale, so that they would not come out the same again. Append at least one token "
            "first, or recompute(slice(None))."
        )
    cache.ledger = shortened(cache.ledger, length, cache.model)
    cache.touch(length)
    settle(cache)


def _between_marks(ledger: Ledger, start: int) -> list[tuple[int, int]]:
    borders = sorted({start, len(ledger), *(s.stop for s in ledger.segments if start < s.stop < len(ledger))})
    return list(itertools.pairwise(borders))


def recompute_slots(
    cache: LedgeredCache, slots: Tensor, rows: Tensor | None = None, *, without: tuple[int, int] | None = None
) -> int:
    """Recompute cells against what now precedes them; call inside an operation.

    Each chosen token runs through the whole model at its recorded position; at the layers where it is selected its
    new cell is written before any query of that layer reads it. This is the CELLS oracle, and CacheBlend's selective
    recompute (Yao et al., 2025, section 4) for any mask.

    Args:
        slots: int64 ``[num_tokens]``, ascending.
        rows: bool ``[num_layers, num_tokens]``, the cells to write; None for all.
        without: slots ``[start, stop)`` that the chosen tokens don't see, none of them chosen; the caller marks the
            cells, which are none of the context as it stands. Only without recurrent layers.

    Returns:
        The number of tokens that ran. With recurrent layers none do yet: everything from the first chosen token on runs
        when the operation ends (``settle``).
    """
    if not len(slots):
        return 0
    ledger = cache.ledger
    _require_ids(cache, slots)
    start = int(slots[0])
    if cache.state_layers:
        cache.touch(start)
        return 0
    if without is None and rows is None and len(slots) == len(ledger) - start:
        for layer in cache.editable_layers:
            layer.truncate(start)
        forward_at_end(cache, ledger.ids[:, start:], ledger.places(slice(start, None)), ledger.valid)
    else:
        check_regime(require_model(cache, "recompute"), ledger, slots.split(SCATTER_TOKENS))
        for low, high in _pieces(len(slots), SCATTER_TOKENS, "recompute"):
            _scatter(cache, slots[low:high], None if rows is None else rows[:, low:high], without)
    whole = torch.ones(len(slots), dtype=torch.bool) if rows is None else rows.all(dim=0)
    for layer in cache.editable_layers:
        if layer.is_initialized:
            layer.settle(slots[~whole].to(layer.device))
    cache.ledger = ledger.recomputed(slots[whole], slots[~whole])
    return len(slots)


def next_token_logits(cache: LedgeredCache) -> Tensor:
    """Logits after the last slot, ``[batch, vocab]``; the last token runs again and nothing is written."""
    if not len(cache.ledger):
        raise SpanError("next_token_logits: expected at least one token in the cache, got none.")
    slots = torch.tensor([len(cache.ledger) - 1])
    _require_ids(cache, slots)
    model, last = require_model(cache, "next_token_logits"), len(cache.ledger) - 1
    if cache.state_layers or measured(model).against_recompute:
        twin = cache.fork()
        if cache.state_layers:
            rewind(twin, last)
        for layer in twin.editable_layers:
            layer.truncate(last)
        return forward_at_end(
            twin, cache.ledger.ids[:, last:], cache.ledger.places(slice(last, None)), cache.ledger.valid
        )
    nothing = torch.zeros((len(cache.layers), 1), dtype=torch.bool)
    return _scatter(cache, slots, nothing)[:, -1]


def require_masks(cache: LedgeredCache, operation: str) -> ModelSpec:
    """The model's spec, if chosen cells of this cache can be recomputed, or everything from a cell on.

    Raises:
        UnsupportedModelError: if they can't, with the measurements.
    """
    model = require_model(cache, operation)
    spec = measured(model)
    if spec.against_recompute and not spec.has_states:
        raise UnsupportedModelError(
            f"{operation}: chosen cells of this {type(model).__name__} can't be recomputed (measured); recompute "
            "everything from a token on instead, for example cache.recompute(slice(start, None)).",
            spec.against_recompute,
        )
    return spec


def _scatter(
    cache: LedgeredCache, slots: Tensor, rows: Tensor | None, without: tuple[int, int] | None = None
) -> Tensor:
    model = require_model(cache, "recompute")
    mask = masks_for(cache, require_masks(cache, "recompute"), slots, without)
    with _scattering(cache, slots, rows), cache.library_forward():
        return host.run(
            model,
            cache.ledger.ids[:, slots],
            cache,
            position_ids=cache.ledger.places(slots),
            attention_mask=mask,
            last_logits_only=True,
        )


@contextmanager
def _scattering(cache: LedgeredCache, slots: Tensor, rows: Tensor | None) -> Iterator[None]:
    for layer_idx, layer in enumerate(cache.layers):
        holders = layer.holders if isinstance(layer, EditableLayer) else ()
        for holder in (one for one in holders if one.is_initialized):
            chosen = None if rows is None else rows[layer_idx].to(holder.device)
            holder.scatter = Scatter(slots.to(holder.device), chosen)
    try:
        yield
    finally:
        for layer in cache.editable_layers:
            layer.scatter = None


def _pieces(count: int, size: int, what: str) -> Sequence[tuple[int, int]] | tqdm[tuple[int, int]]:
    pieces = [(start, min(start + size, count)) for start in range(0, count, size)]
    return tqdm(pieces, desc=what, unit="forward", leave=False) if len(pieces) >= PROGRESS_FROM else pieces


def _require_ids(cache: LedgeredCache, slots: Tensor) -> None:
    images = (cache.ledger.images[:, slots] > 0).any(dim=0)
    if bool(images.any()):
        raise LedgerError(
            f"The tokens at slots {slots[images][:5].tolist()} stand for an image. The cache keeps their cells and the "
            "image's digest, not its pixels, so they can't be run again: choose other cells, or feed the image anew."
        )
    unknown = ((cache.ledger.ids[:, slots] == UNKNOWN) & cache.ledger.valid[:, slots]).any(dim=0)
    if bool(unknown.any()):
        raise LedgerError(
            f"The ids at slots {slots[unknown][:5].tolist()} are unknown: no token made these cells (a trained "
            "prefix), or it reached the cache without passing the watched model's forward (an inner module, "
            "embeddings instead of ids, layers filled by hand). They can't be run again; choose other cells."
        )
