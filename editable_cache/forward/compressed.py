"""Chunks for models that compress windows of tokens into entries: they fit where windows are cut as they were.

An entry stands for ``compress_rate`` tokens, is rotated at the position of its window's first token, and takes that
position from the number of entries before it (DeepSeek V4's paper, sections 2.3.1 and 2.3.2). So a chunk that was
compiled alone at position 0 can stand wherever a window starts in every layer: its entries and recent keys are rotated
by the distance, and its open windows, which hold projections without a position, are copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from editable_cache.adapters import host
from editable_cache.adapters.compressed import by_head
from editable_cache.adapters.leaves import Path, leaves_of, set_leaves, tensors_of
from editable_cache.cache import LedgeredCache, Segment
from editable_cache.cache.arrange import extend_with_chunk
from editable_cache.chunk import Compressed, KVChunk
from editable_cache.errors import CompatibilityError, LedgerError, SpanError
from editable_cache.forward import run
from editable_cache.ops import rotate_into, rotation
from editable_cache.spec import CompressedLayerSpec, CompressedSpec, ModelSpec

RECENT = ("keys", "values")
"""Attributes with what a layer holds of its last tokens."""


def compile_compressed(cache: LedgeredCache, spec: CompressedSpec, seen: Tensor, ids: Tensor) -> Compressed:
    """Run a chunk alone in an empty cache and take what its layers hold.

    Args:
        seen: ids ``[num_seen]`` that stand before the chunk while it is compiled.
        ids: ids ``[num_tokens]`` of the chunk.

    Raises:
        SpanError: if windows would be cut otherwise than at the chunk's start.
    """
    if len(seen) % spec.alignment:
        raise SpanError(
            "precompile: this model folds windows of tokens into entries, so what stands before a chunk must fill "
            f"whole windows; expected a prefix of a multiple of {spec.alignment} tokens, got {len(seen)}. Compile "
            "without one: prefix=''."
        )
    with cache.operation("precompile"):
        run.extend(cache, torch.cat((seen, ids))[None], Segment("precompiled", 0, 0, "prefilled"))
    found = {}
    for facts in spec.layers:
        tensors = tensors_of(leaves_of(cache.layers[facts.layer_idx]))
        found[facts.layer_idx] = {path: _own(path, t, len(seen), len(ids), facts.rate) for path, t in tensors.items()}
    return Compressed(found)


def _own(path: Path, tensor: Tensor, num_seen: int, num_tokens: int, rate: int | None) -> Tensor:
    """What of a tensor belongs to the chunk, as a copy."""
    if path[0] in RECENT:
        tensor = tensor[..., -min(num_tokens, tensor.shape[-2]) :, :]
    elif path[0] == host.COMPRESSED_ENTRIES and rate is not None:
        tensor = tensor[:, num_seen // rate :]
    return tensor.clone(memory_format=torch.contiguous_format)


def check_windows(spec: CompressedSpec, slot: int) -> None:
    """Refuse a slot where some layer's window would be cut inside of a chunk otherwise than where it was compiled.

    Raises:
        SpanError: with the next slot that fits.
    """
    missing = -slot % spec.alignment
    if missing:
        rates = sorted({layer.rate for layer in spec.layers if layer.rate is not None and slot % layer.rate})
        raise SpanError(
            f"splice: this model folds windows of {rates} tokens into entries, and at slot {slot} such a window is "
            f"still open. The next slot that fits is {slot + missing}: put {missing} tokens in front, or append the "
            "text instead."
        )


def splice_compressed(
    cache: LedgeredCache, spec: ModelSpec, chunk: KVChunk, positions: Tensor, segment: Segment, seam_tokens: int
) -> int:
    """Put a chunk behind the last slot, where a window starts in every layer; call inside an operation.

    Args:
        positions: int64 ``[batch, len(chunk)]``, where the tokens go: those that follow.
        seam_tokens: as many as were asked for; none can be had, so 1, the default of a splice, is taken for none.

    Returns:
        The number of tokens that ran: none.

    Raises:
        CompatibilityError: if the chunk does not say what it leaves in compressed layers.
        SpanError: for a slot where windows are cut otherwise, with the next one that fits; for a seam.
        LedgerError: if a layer holds other numbers of entries than tokens.
    """
    slot = len(cache.ledger)
    if chunk.compressed is None or spec.compressed is None:
        raise CompatibilityError(
            f"splice: this model compresses windows of tokens, and {chunk!r} does not hold their entries; compile it "
            "with Skill.precompile."
        )
    if seam_tokens > 1:
        raise SpanError(
            f"splice: expected seam_tokens=0, got {seam_tokens}: the first tokens of this chunk stand in entries "
            "together with those behind them, so they can't be computed again. Append the text instead."
        )
    check_windows(spec.compressed, slot)
    run.settle(cache)
    cache.mark(slot)
    for facts in spec.compressed.layers:
        _splice_layer(cache, facts, chunk, positions)
    extend_with_chunk(cache, spec, chunk, 0, positions, segment)
    cache.mark(len(cache.ledger))
    return 0


def _splice_layer(cache: LedgeredCache, facts: CompressedLayerSpec, chunk: KVChunk, positions: Tensor) -> None:
    layer: Any = cache.layers[facts.layer_idx]
    slot, rotaries = len(cache.ledger), dict(facts.rotaries)
    before = leaves_of(layer)
    counts = {path: leaf for path, leaf in before.items() if path[0] == host.COMPRESSED_COUNTS}
    if facts.rate is not None and any(count * facts.rate != slot for count in counts.values()):
        raise LedgerError(
            f"splice: layer {facts.layer_idx} holds {sorted(counts.values())} entries of {facts.rate} tokens each, "
            f"expected as many as stand for {slot} tokens; call cache.reset() and start again."
        )
    live = before["keys",]
    device = host.device_of(run.require_model(cache, "splice")) if live is None else live.device
    moved = {}
    assert chunk.compressed is not None
    for path, tensor in chunk.compressed.layers[facts.layer_idx].items():
        moved[path] = tensor.to(device).expand(len(positions), *tensor.shape[1:]).clone()
        if path in rotaries:
            recent = slice(len(chunk) - tensor.shape[-2], len(chunk))
            tokens = recent if path[0] in RECENT else _first_tokens(tensor.shape[1], facts.rate)
            turn = rotation(rotaries[path], chunk.position_ids[tokens], positions[:, tokens], device)
            rotate_into(by_head(moved[path]), by_head(tensor.to(device)), turn)
    keys = moved["keys",]
    layer.update(keys, moved.get(("values",), keys))
    layer.cumulative_length += len(chunk) - keys.shape[-2]
    after = {path: moved.get(path) for path in before if len(path) > 1}
    for path, count in counts.items():
        entries = (host.COMPRESSED_ENTRIES, path[1])
        new, old = moved[entries], before[entries]
        after[entries] = new if old is None else torch.cat((old, new), dim=1)
        after[path] = count + new.shape[1]
    set_leaves(layer, after)


def _first_tokens(num_entries: int, rate: int | None) -> slice:
    """The first token of the window of each entry: the entry is rotated as if it stood there."""
    assert rate is not None
    return slice(0, num_entries * rate, rate)
