"""Types that fold windows of tokens into entries: FROZEN for a splice where windows start, FULL for all the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from editable_cache.chunk import KVChunk
from editable_cache.editable import EditableCache
from editable_cache.spec import CompressedLayerSpec, ModelSpec, RotarySpec
from editable_cache.testing import compressed
from editable_cache.testing.sweep import states
from editable_cache.testing.sweep.findings import Findings, remembered
from editable_cache.testing.sweep.moves import Subject
from editable_cache.testing.sweep.wrong import OTHER_LAYOUT, one_too_far


def examine(subject: Subject, chunk: KVChunk, found: Findings) -> None:
    """All comparisons and controls."""
    _frozen(subject, chunk, found)
    cache = EditableCache(subject.model)
    for part in subject.texts:
        cache.append(part)
    check(cache, subject, subject.texts.joined, found, "FULL, append")
    found.operations.append("append")
    states.edits(subject, found, check)


def check(cache: EditableCache, subject: Subject, ids: Tensor, found: Findings, name: str) -> bool:
    """Compare everything in a cache with a plain prefill of ``ids``; returns whether it holds."""
    model = subject.model
    plain = compressed.prefilled(model)
    logits = compressed.forward(model, plain, ids)[:, -1]
    expected = {"logits": logits, **compressed.contents(plain)}
    found.compare(name, {"logits": cache.next_token_logits(), **compressed.contents(cache)}, expected)
    return name not in found.wrong


def _frozen(subject: Subject, chunk: KVChunk, found: Findings) -> None:
    model, (prefix, ids, tail) = subject.model, subject.texts
    stock = compressed.frozen_behind(model, compressed.prefilled(model, prefix), ids)
    after = compressed.contents(stock)
    expected = {**after, "logits": compressed.forward(model, stock, tail)}

    def seen(chunk: KVChunk) -> dict[str, Tensor]:
        cache = subject.composed(chunk)
        return {**compressed.contents(cache), "logits": compressed.forward(model, cache, tail)}

    found.compare("FROZEN", seen(chunk), expected)
    plain = compressed.prefilled(model, torch.cat((prefix, ids)))
    alike = {**compressed.contents(plain), "logits": compressed.forward(model, plain, tail)}
    found.control("plain prefill", alike, expected)
    found.control("moved one too far", seen(one_too_far(chunk)), expected)
    for name, spec in _wrong_specs(subject.spec):
        with remembered(model, spec):
            found.control(name, seen(chunk), expected)


def _wrong_specs(spec: ModelSpec) -> Iterator[tuple[str, ModelSpec]]:
    assert spec.compressed is not None
    layers = spec.compressed.layers
    paths = {path for layer in layers for path, _ in layer.rotaries if path != ("values",)}
    yield "other layout", _changed(spec, [replace(layer, rotaries=_other_layout(layer)) for layer in layers])
    for gone in sorted(paths):
        left = [replace(layer, rotaries=tuple(each for each in layer.rotaries if each[0] != gone)) for layer in layers]
        yield f"{'.'.join(gone)} not rotated", _changed(spec, left)


def _other_layout(layer: CompressedLayerSpec) -> tuple[tuple[tuple[str, ...], RotarySpec], ...]:
    return tuple((path, replace(rotary, layout=OTHER_LAYOUT[rotary.layout])) for path, rotary in layer.rotaries)


def _changed(spec: ModelSpec, layers: list[CompressedLayerSpec]) -> ModelSpec:
    assert spec.compressed is not None
    return replace(spec, compressed=replace(spec.compressed, layers=tuple(layers)))
