"""The self-test of models that compress windows of tokens: how what they keep depends on where the tokens stand.

Such a model takes the position of an entry from the number of entries before it, so the tokens are run alone with that
number set, and with ``position_ids`` to match. Without those entries the model's own mask, which numbers them from 0,
would let a token see the entry of a window that closes later in the same forward. So most tokens run with the inputs
of all attention layers frozen to those at position 0, where nobody's sight matters, and the last ones live, those that
close a window in forwards of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from editable_cache.adapters import host
from editable_cache.adapters.classify import classify, frequency_tables
from editable_cache.adapters.leaves import Path, leaves_of, tensors_of
from editable_cache.adapters.mixers import find_mixers, recording, replaying
from editable_cache.adapters.sample import NUM_TOKENS, random_ids
from editable_cache.errors import Reason
from editable_cache.ops import relative_error
from editable_cache.spec import CompressedLayerSpec, CompressedSpec, RotarySpec

OPEN_TOKENS = 3
"""Tokens of the test behind the longest window, which run live; some windows stay open."""


class CompressedFinding(NamedTuple):
    """What the self-test found; ``reasons`` speak against composing."""

    spec: CompressedSpec
    reasons: tuple[Reason, ...]
    worst_error: float


class _Alone(NamedTuple):
    """Logits of the live tokens ``[1, n, vocab]`` and, for each layer, its tensors of one row by path."""

    logits: Tensor
    layers: tuple[dict[Path, Tensor], ...]


def rate_of(layer: Any) -> int | None:
    """Tokens in a window of a stock layer, or None where it compresses nothing."""
    return int(vars(layer)[host.COMPRESS_RATE]) if host.compresses(layer) else None


def examine_compressed(model: nn.Module, offsets: Sequence[int], maximum: int, tolerance: float) -> CompressedFinding:
    """Run some tokens alone at position 0 and further on, and compare everything that the layers keep.

    Args:
        offsets: distances to look at; each is raised to the next one at which windows are cut alike.
        maximum: number of positions that the model was built for.
        tolerance: largest relative error that counts as equal.
    """
    layers = host.full_cache(model.config).layers
    kinds = host.kinds_of(layers)
    rates = [rate_of(layer) for layer in layers]
    kept = [i for i, kind in enumerate(kinds) if kind == "kept"]
    spec = CompressedSpec(tuple(CompressedLayerSpec(i, rates[i], ()) for i in kept))
    others = sorted({kind for kind in kinds if kind not in ("kept", "empty")})
    if others:
        return CompressedFinding(spec, (Reason("layers beside compressed ones", "none", ", ".join(others)),), 0.0)
    count = max(NUM_TOKENS, max(rate for rate in rates if rate is not None) + OPEN_TOKENS)
    aligned = [-(-offset // spec.alignment) * spec.alignment for offset in offsets]
    aligned = [offset for offset in dict.fromkeys(aligned) if offset + count <= maximum]
    if not aligned:
        return CompressedFinding(spec, (Reason("positions", f"room for {count}", str(maximum)),), 0.0)
    ids = random_ids(model, count, seed=2)
    try:
        mixers = find_mixers(model, ids[:, :NUM_TOKENS], None, host.full_cache(model.config))
        with recording(model, mixers) as inputs:
            cache = _body(model, ids, 0)
        base = _live(model, ids, 0, cache, rates)
        samples = {}
        for offset in aligned:
            with replaying(model, mixers, inputs):
                cache = _body(model, ids, offset)
            samples[offset] = _live(model, ids, offset, cache, rates)
    except Exception as error:  # whatever a model raises on a cache that was filled by hand
        why = Reason("tokens behind as many entries as position", "a forward", f"{type(error).__name__}: {error}"[:200])
        return CompressedFinding(spec, (why,), 0.0)
    return _explained(model, spec, base, samples, tolerance)


def _body(model: nn.Module, ids: Tensor, offset: int) -> Any:
    """A stock cache with as many entries counted as stand for ``offset`` tokens, behind all ids but the last few."""
    cache = host.full_cache(model.config)
    for layer in cache.layers:
        rate = rate_of(layer)
        if rate is not None:
            counts = vars(layer)[host.COMPRESSED_COUNTS]
            counts.update(dict.fromkeys(counts, offset // rate))
    count = ids.shape[1] - OPEN_TOKENS
    host.run(model, ids[:, :count], cache, position_ids=torch.arange(offset, offset + count)[None])
    return cache


def _live(model: nn.Module, ids: Tensor, offset: int, cache: Any, rates: Sequence[int | None]) -> _Alone:
    """Run the last few ids behind the others; one that closes a window alone."""
    first, count = ids.shape[1] - OPEN_TOKENS, ids.shape[1]
    closing = [i for i in range(first, count) if any(rate is not None and (i + 1) % rate == 0 for rate in rates)]
    borders = sorted({first, count, *closing, *(i + 1 for i in closing)})
    logits = []
    for start, stop in itertools.pairwise(borders):
        places = torch.arange(offset + start, offset + stop)[None]
        logits.append(host.run(model, ids[:, start:stop], cache, position_ids=places))
    return _Alone(torch.cat(logits, dim=1), tuple(tensors_of(leaves_of(layer)) for layer in cache.layers))


def _explained(
    model: nn.Module, spec: CompressedSpec, base: _Alone, samples: dict[int, _Alone], tolerance: float
) -> CompressedFinding:
    configs = {id(config): config for config in (host.text_config(model.config), model.config)}
    tables = frequency_tables(model, configs.values())
    likely: dict[RotarySpec, None] = {}
    layers, reasons, worst = [], [], 0.0
    for layer in spec.layers:
        rotaries = []
        for path, stored in base.layers[layer.layer_idx].items():
            name = f"layer {layer.layer_idx} {'.'.join(path)}"
            moved = {offset: sample.layers[layer.layer_idx].get(path) for offset, sample in samples.items()}
            found = {offset: tensor for offset, tensor in moved.items() if tensor is not None}
            if len(found) < len(moved) or any(tensor.shape != stored.shape for tensor in found.values()):
                reasons.append(Reason(name, "one size at every aligned position", "another"))
                continue
            if len(path) == 1 and path[0] not in ("keys", "values"):
                reasons.append(Reason(name, "recent keys, entries, or an open window", "another tensor"))
                continue
            if not stored.numel():
                continue
            if path[0] in ("keys", "values", host.COMPRESSED_ENTRIES):
                every = {offset: by_head(tensor) for offset, tensor in found.items()}
                one, error = classify(name, by_head(stored), every, tables, tuple(likely), tolerance)
                if one.rotary is not None:
                    likely[one.rotary] = None
                    rotaries.append((path, one.rotary))
            else:
                error = max(relative_error(tensor, stored) for tensor in found.values())
            worst = max(worst, error)
            if error > tolerance:
                reasons.append(Reason(name, "unchanged, or rotated by the model's frequencies", f"error {error:.1e}"))
        layers.append(CompressedLayerSpec(layer.layer_idx, layer.rate, tuple(rotaries)))
    for offset, sample in samples.items():
        drift = relative_error(sample.logits, base.logits)
        if drift > 2 * tolerance:
            reasons.append(Reason(f"logits at offset {offset}", "those at offset 0", f"drift {drift:.1e}"))
    return CompressedFinding(CompressedSpec(tuple(layers)), tuple(reasons), worst)


def by_head(tensor: Tensor) -> Tensor:
    """``[batch, num_heads, n, head_dim]``: entries have no axis of heads."""
    return tensor if tensor.dim() == 4 else tensor[:, None]
