"""Types whose cells move: ISO, FROZEN, CELLS and FULL, each with wrong answers that must be seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from editable_cache.chunk import KVChunk
from editable_cache.editable import EditableCache
from editable_cache.errors import SpanError, UnsupportedModelError
from editable_cache.skill import Skill
from editable_cache.spec import ModelSpec
from editable_cache.testing import oracles, parts
from editable_cache.testing.contents import cells_in, layers_of, logits_after
from editable_cache.testing.sweep import wrong
from editable_cache.testing.sweep.findings import Findings, Texts, remembered, worst
from editable_cache.testing.sweep.row import TOLERANCE

PLACES = (37, 523)
FAR = 100_000


@dataclass(frozen=True)
class Subject:
    """A model under examination, with what its self-test found."""

    model: PreTrainedModel
    spec: ModelSpec
    texts: Texts

    @property
    def given(self) -> bool:
        """Whether positions are given to the model, not read off its slots."""
        return self.spec.positions == "given"

    def composed(self, chunk: KVChunk, *, position: int | None = None) -> EditableCache:
        """Prefix and spliced chunk, without a seam."""
        cache = EditableCache(self.model)
        cache.append(self.texts.prefix)
        cache.splice(chunk, seam_tokens=0, position=position)
        return cache

    def full(self, ids: Tensor) -> oracles.OracleResult:
        """FULL of ``ids``."""
        return oracles.full(self.model, ids, torch.arange(len(ids)) if self.given else None)


def examine(subject: Subject, chunk: KVChunk, found: Findings) -> None:
    """All comparisons and controls for a type whose cells move."""
    _iso(subject, chunk, found)
    cache = _frozen(subject, chunk, found)
    recompute(subject, cache, found)
    _rearrange(subject, found)
    _beyond_the_limit(subject, chunk, found)


def _iso(subject: Subject, chunk: KVChunk, found: Findings) -> None:
    if not subject.given:
        return  # positions are slots: FROZEN compares the cells at the only slots there are
    first = len(subject.texts.prefix)
    ids = subject.texts.chunk
    for place in (*PLACES, FAR):
        limits = [subject.spec.max_positions, *([subject.spec.limit.value] if subject.spec.limit else [])]
        if place + len(ids) > min(limits):
            continue
        cells = cells_in(subject.composed(chunk, position=place), first)
        expected = oracles.iso(subject.model, ids, torch.arange(len(ids)) + place).cells
        if place != FAR:
            found.compare(f"ISO +{place}", cells, expected)
            continue
        # Far away the model itself rounds angles, so that a stock prefill there and one at 0 differ below layer 0.
        first_layer = f"layer {min(layer.layer_idx for layer in subject.spec.layers if layer.tensors)} "
        near, there = ({n: t for n, t in c.items() if n.startswith(first_layer)} for c in (cells, expected))
        found.compare(f"ISO +{FAR}, first layer", near, there)
        home = oracles.iso(subject.model, ids, torch.arange(len(ids))).cells
        still = _still(subject.spec, expected)
        drift = worst({n: home[n] for n in still}, {n: expected[n] for n in still}) if still else 0.0
        found.errors[f"drift of the model itself at +{FAR}"] = drift
        found.compare(f"ISO +{FAR}", cells, expected, max(TOLERANCE, 3 * drift))


def _still(spec: ModelSpec, cells: dict[str, Tensor]) -> list[str]:
    """Names of the stored tensors that do not depend on the position."""
    names = (
        f"layer {layer.layer_idx} {tensor.name}"
        for layer in spec.layers
        for tensor in layer.tensors
        if tensor.rotary is None and not tensor.counter
    )
    return [name for name in names if name in cells]


def _frozen(subject: Subject, chunk: KVChunk, found: Findings) -> EditableCache:
    """FROZEN and its controls; returns the cache with prefix, chunk and tail."""
    model, (_, _, tail) = subject.model, subject.texts
    expected = parts.frozen(model, subject.texts, given=subject.given)
    wanted = {"logits": expected.logits[:, -len(tail) :], **expected.cells}

    def seen(cache: EditableCache) -> dict[str, Tensor]:
        return {"logits": logits_after(model, tail, cache), **cells_in(cache)}

    cache = subject.composed(chunk)
    found.compare("FROZEN", seen(cache), wanted)
    plain = subject.full(subject.texts.joined)
    found.control("plain prefill", {"logits": plain.logits[:, -len(tail) :], **plain.cells}, wanted)
    for name, spec in wrong.wrong_specs(subject.spec, chunk):
        with remembered(model, spec):
            found.control(name, seen(subject.composed(chunk)), wanted)
    if subject.spec.rotaries():
        found.control("moved one too far", seen(subject.composed(wrong.one_too_far(chunk))), wanted)
    found.control("values in the opposite order", seen(subject.composed(wrong.shuffled(chunk))), wanted)
    return cache


def recompute(subject: Subject, cache: EditableCache, found: Findings) -> None:
    """CELLS by token and by layer, and FULL after everything behind the prefix was computed again.

    Args:
        cache: holds cells that differ from a plain prefill from the end of the prefix on.
    """
    start, stale = len(subject.texts.prefix), cells_in(cache)
    length = cache.token_ids.shape[1]
    for name, shape in (("CELLS", (length,)), ("CELLS by layer", (len(cache.layers), length))):
        if not _cells(subject, cache.fork(), found, name, shape):
            break
    if worst(cells_in(cache), stale) != 0.0:
        found.wrong.append("recompute on a fork, or a refused one, changed the cache")
    if found.attempt("recompute from a token on", lambda: cache.recompute((start, length))):
        compare_full(subject, cache, found, "FULL")
        if cells_in(cache).keys() == stale.keys():
            found.control("FULL, nothing recomputed", stale, subject.full(cache.token_ids[0]).cells)


def _cells(subject: Subject, cache: EditableCache, found: Findings, name: str, shape: tuple[int, ...]) -> bool:
    """Compare a recompute of chosen cells; returns whether it was carried out."""
    ids, start, cells, layers = cache.token_ids[0], len(subject.texts.prefix), cells_in(cache), layers_of(cache)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.3
    mask[..., start : start + 2] = True  # cells that the chunk's isolation made wrong
    done = found.attempt("recompute of chosen cells", lambda: cache.recompute(mask))
    if done:
        positions = cache.positions[0] if subject.given else None
        expected = oracles.layer_cells(subject.model, ids, positions, layers, mask).cells
        found.compare(name, cells_in(cache), expected)
        found.control(f"{name}, nothing recomputed", cells, expected)
    elif worst(cells_in(cache), cells) != 0.0:
        found.wrong.append("a refused recompute changed the cache")
    return done


def compare_full(subject: Subject, cache: EditableCache, found: Findings, name: str) -> None:
    """Cells, and the logits after one more token, against a plain prefill."""
    ids, more = cache.token_ids[0], subject.texts.prefix[:1]
    expected = subject.full(torch.cat([ids, more]))
    got = {"logits": logits_after(subject.model, more, cache.fork()), **cells_in(cache)}
    found.compare(name, got, {"logits": expected.logits[:, -1:], **expected.span(0, len(ids)).cells})


def _rearrange(subject: Subject, found: Findings) -> None:
    """Insert and take out again: the cells behind must be what they were, and in between those further on."""
    cache = EditableCache(subject.model)
    cache.append(subject.texts.joined)
    before, three = cells_in(cache), subject.texts.tail[:3]
    if not found.attempt("insert", lambda: cache.insert(three, 8)):
        return
    if subject.given and not subject.spec.chunk_sizes:
        shifted = oracles.iso(subject.model, subject.texts.joined, torch.arange(len(subject.texts.joined)) + 3)
        found.compare("cells behind an insertion", cells_in(cache, 11), shifted.span(8).cells)
    if found.attempt("remove", lambda: cache.remove((8, 11))):
        found.compare("insert and remove", cells_in(cache), before)
    if found.attempt("reposition", lambda: cache.reposition((20, 25), to=30)):
        cache.reposition((30, 35), to=20)
        found.compare("reposition and back", cells_in(cache), before)


def _beyond_the_limit(subject: Subject, chunk: KVChunk, found: Findings) -> None:
    limit = subject.spec.limit
    if limit is None or not subject.given or limit.value >= subject.spec.max_positions:
        return
    try:
        subject.composed(chunk, position=limit.value)
    except (SpanError, UnsupportedModelError):
        return
    found.wrong.append(f"a splice beyond {limit.name}")


def compiled(subject: Subject) -> KVChunk:
    """The chunk, compiled alone."""
    return Skill.precompile(subject.model, None, subject.texts.chunk, name="chunk")
