"""Types with recurrent layers: THREADED for a composed chunk, FULL for everything that is computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from editable_cache.chunk import KVChunk
from editable_cache.chunk.transition import Transition
from editable_cache.editable import EditableCache
from editable_cache.testing import oracles
from editable_cache.testing.contents import cells_in, recurrent_in, windows_behind
from editable_cache.testing.sweep.findings import Findings, remembered
from editable_cache.testing.sweep.moves import Subject
from editable_cache.testing.sweep.wrong import wrong_specs
from editable_cache.testing.threaded import named_cells, threaded

Check = Callable[[EditableCache, Subject, Tensor, Findings, str], bool]


def examine(subject: Subject, chunk: KVChunk, found: Findings) -> None:
    """All comparisons and controls for a type with recurrent layers whose chunks compose."""
    _threaded(subject, chunk, found)
    full(subject, found)
    edits(subject, found)


def _threaded(subject: Subject, chunk: KVChunk, found: Findings) -> None:
    recurrence, (prefix, ids, tail) = chunk.recurrence, subject.texts
    assert recurrence is not None
    result = threaded(
        subject.model,
        prefix[None],
        ids[None],
        tail[None],
        head=recurrence.head,
        tail=recurrence.tail,
        base=0,
        step=subject.spec.step_tokens,
    )
    expected = {"logits": result.logits[:, -1], **named_cells(result.end)}

    def kept(cells: dict[str, Tensor]) -> dict[str, Tensor]:
        """The cells that a stock cache keeps: sliding layers drop what has left the window."""
        return {n: t[..., -expected[n].shape[-2] :, :] if n in expected else t for n, t in cells.items()}

    def seen(chunk: KVChunk) -> dict[str, Tensor]:
        cache = EditableCache(subject.model)
        cache.append(prefix)
        cache.splice(chunk)
        cache.append(tail)
        return {"logits": cache.next_token_logits(), **kept(_floating(cells_in(cache))), **recurrent_in(cache)}

    found.compare("THREADED", seen(chunk), expected)
    plain = subject.full(subject.texts.joined)
    alike = {"logits": plain.logits[:, -1], **kept(_floating(plain.cells)), **plain.states}
    found.control("plain prefill", alike, expected)
    for name, wrong in _wrong_chunks(chunk, windows_behind(subject.model, prefix, ids[: recurrence.head])):
        found.control(name, seen(wrong), expected)
    for name, spec in wrong_specs(subject.spec, chunk) if subject.spec.rotaries() else ():
        with remembered(subject.model, spec):
            found.control(name, seen(chunk), expected)
    if subject.spec.rotaries():
        found.control("moved one too far", seen(replace(chunk, position_ids=chunk.position_ids - 1)), expected)


def _floating(cells: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in cells.items() if t.is_floating_point() and t.numel()}


def _wrong_chunks(chunk: KVChunk, windows: Mapping[tuple[int, int], Tensor]) -> Iterator[tuple[str, KVChunk]]:
    """Chunks whose map of states is one of those that are tempting: nothing, the chunk's state alone, or the prefix's
    convolution windows kept.
    """
    assert chunk.recurrence is not None
    maps = chunk.recurrence.transitions
    if any(each.factor is not None for each in maps.values()):
        yield "the prefix's states kept", _with_maps(chunk, {slot: _identity(each) for slot, each in maps.items()})
        alone = {slot: replace(each, form="replace", factor=None) for slot, each in maps.items()}
        yield "the chunk's states alone", _with_maps(chunk, alone)
    if any(each.conv is not None for each in maps.values()):
        kept = {slot: each if each.conv is None else replace(each, conv=windows[slot]) for slot, each in maps.items()}
        yield "the prefix's windows kept", _with_maps(chunk, kept)


def _identity(each: Transition) -> Transition:
    if each.offset is None or each.factor is None:
        return each
    ones = torch.ones([1] * each.offset.dim())
    return replace(each, form="diagonal", factor=ones, offset=torch.zeros_like(each.offset))


def _with_maps(chunk: KVChunk, maps: dict[tuple[int, int], Transition]) -> KVChunk:
    assert chunk.recurrence is not None
    return replace(chunk, recurrence=replace(chunk.recurrence, transitions=maps))


def everything(cache: EditableCache) -> dict[str, Tensor]:
    """Cells and states of a cache, and the next token's logits."""
    return {"logits": cache.next_token_logits(), **cells_in(cache), **recurrent_in(cache)}


def reference(subject: Subject, ids: Tensor) -> dict[str, Tensor]:
    """The same from a plain prefill."""
    plain: oracles.OracleResult = subject.full(ids)
    return {"logits": plain.logits[:, -1], **plain.cells, **plain.states}


def full(subject: Subject, found: Findings) -> None:
    """Appended piece by piece, with a checkpoint taken back in between."""
    cache = EditableCache(subject.model)
    cache.append(subject.texts.prefix)
    twin = cache.fork()
    twin.append(subject.texts.tail)
    if worst_of(cache, subject, subject.texts.prefix, found, "FULL, append"):
        cache.append(subject.texts.chunk)
        cache.append(subject.texts.tail)
        worst_of(cache, subject, subject.texts.joined, found, "FULL, append")
        found.operations.append("append")
        expected = reference(subject, subject.texts.joined)
        found.control("FULL, last token missing", everything_but_last(subject), expected)


def everything_but_last(subject: Subject) -> dict[str, Tensor]:
    """What a prefill without the last token leaves, filled up with nothing."""
    cache = EditableCache(subject.model)
    cache.append(subject.texts.joined[:-1])
    cells = {n: torch.nn.functional.pad(t, (0, 0, 0, 1)) for n, t in cells_in(cache).items()}
    return {"logits": cache.next_token_logits(), **cells, **recurrent_in(cache)}


def worst_of(cache: EditableCache, subject: Subject, ids: Tensor, found: Findings, name: str) -> bool:
    """Compare with a plain prefill of ``ids``; returns whether it holds."""
    found.compare(name, everything(cache), reference(subject, ids))
    return name not in found.wrong


def edits(subject: Subject, found: Findings, check: Check | None = None) -> None:
    """Whatever changes tokens computes everything behind them again, so that the result is a plain prefill.

    ``check`` compares with one, as ``worst_of`` does.
    """
    check = worst_of if check is None else check
    ids, three = subject.texts.joined, subject.texts.tail[:3]
    cache = EditableCache(subject.model)
    cache.append(subject.texts.prefix)
    cache.append(ids[len(subject.texts.prefix) :])
    for operation, action, left in (
        ("insert", lambda: cache.insert(three, 20), torch.cat([ids[:20], three, ids[20:]])),
        ("remove", lambda: cache.remove((20, 23)), ids),
        (
            "reposition",
            lambda: cache.reposition((20, 25), to=25),
            torch.cat([ids[:20], ids[25:30], ids[20:25], ids[30:]]),
        ),
        ("recompute from a token on", lambda: cache.recompute((10, len(ids))), None),
        ("sync", lambda: cache.sync(ids), ids),
    ):
        if found.attempt(operation, action):
            expected = cache.token_ids[0] if left is None else left
            if not torch.equal(cache.token_ids[0], expected):
                found.wrong.append(f"{operation}: other ids than expected")
            check(cache, subject, expected, found, "FULL, edits")
    cache.crop(-5)
    check(cache, subject, ids[:-5], found, "FULL, crop")
