"""What holds of any folder: it loads into something whole, or a library error says why not; nothing else happens."""

from __future__ import annotations

import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from cache_support import Snapshot
from hostile_bases import Base

from editable_cache import EditableCache, EditableCacheError, KVChunk
from editable_cache.published import PublishedChunk

SECONDS = 30.0
"""Far more than any example takes: beyond it something hangs."""

LONGEST_MESSAGE = 20_000


def check(base: Base, files: dict[str, bytes]) -> str:
    """Load ``files`` and use what comes out; returns how far it got: ``"refused"``, ``"loaded"`` or ``"spliced"``."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parent = Path(scratch)
        folder = parent / "skill"
        base._replace(files=files).write(folder)
        before = _tree(parent)
        reached = _check_cache(base, folder) if base.kind is EditableCache else _check_skill(base, folder, parent)
        assert _tree(parent) == before, "something was written"
    assert time.perf_counter() - started < SECONDS
    return reached


def _check_skill(base: Base, folder: Path, parent: Path) -> str:
    reached, kept = "refused", Snapshot(base.context)
    for model in (None, base.model):
        try:
            chunk = base.kind.from_pretrained(folder, model=model)
        except EditableCacheError as error:
            _check_message(error)
            continue
        _check_whole(chunk)
        for at, seam in ((None, 1), (None, 0), (0, 0)):
            cache = base.context.fork()
            cells = Snapshot(cache)
            reached = "loaded" if reached == "refused" else reached
            try:
                cache.splice(chunk, at=at, seam_tokens=seam, name="hostile")
            except EditableCacheError as error:
                _check_message(error)
                cells.check(cache)
                continue
            reached = "spliced"
            _check_usable(cache)
        kept.check(base.context)
    return reached


def _check_cache(base: Base, folder: Path) -> str:
    try:
        cache = EditableCache.from_pretrained(folder, model=base.model)
    except EditableCacheError as error:
        _check_message(error)
        return "refused"
    _check_usable(cache)
    return "loaded"


def _check_whole(chunk: PublishedChunk) -> None:
    assert repr(chunk)
    assert chunk.digest
    assert chunk.extent >= 0
    assert chunk.steps.shape == chunk.image_numbers.shape == chunk.token_ids.shape == (len(chunk),)
    assert chunk.nbytes >= 0
    assert all(part.stop <= len(chunk) for part in chunk.parts)
    with tempfile.TemporaryDirectory() as scratch:
        chunk.save_pretrained(scratch)
        again = type(chunk).from_pretrained(scratch)
        assert again.digest == chunk.digest
        assert _bits(again) == _bits(chunk)


def _bits(chunk: KVChunk) -> list[Any]:
    """Every stored cell as bytes: not a number is equal to itself here."""
    cells = [tensor for states in chunk.layers for tensor in states.values()]
    return [tensor.contiguous().reshape(-1).view(torch.uint8).tolist() for tensor in cells]


def _check_usable(cache: EditableCache) -> None:
    """Whatever its numbers are, the cache is one: a library error at most."""
    cache.adopt()
    assert str(cache.report())
    for use in (cache.next_token_logits, lambda: cache.append([5, 6], name="more"), lambda: cache.extract((0, 1))):
        try:
            use()
        except EditableCacheError as error:
            _check_message(error)


def _check_message(error: EditableCacheError) -> None:
    message = str(error)
    assert len(message) < LONGEST_MESSAGE, f"{len(message)} characters: {message[:200]}"
    assert message.replace("\n", "").isprintable(), ascii(message[:500])


def _tree(folder: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for path in folder.rglob("*"):
        facts = path.lstat()
        found[path.as_posix()] = (facts.st_size, facts.st_mtime_ns)
    return found
