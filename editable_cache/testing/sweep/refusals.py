"""Types whose cells can't be moved: every attempt is refused, and the cache stays what a stock cache is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache

from editable_cache.editable import EditableCache
from editable_cache.skill import Skill
from editable_cache.testing.contents import cells_in, logits_after, recurrent_in
from editable_cache.testing.sweep import moves, states
from editable_cache.testing.sweep.findings import REFUSALS, Findings, worst
from editable_cache.testing.sweep.moves import Subject


def examine(subject: Subject, found: Findings) -> None:
    """Attempts to move cells, then what still works."""
    model, texts = subject.model, subject.texts
    try:
        plain = DynamicCache(config=model.config)
        logits_after(model, texts.prefix, plain)
        stock = _continued(subject, plain)
    except Exception as error:  # whatever a model raises on a cache that is not its own
        found.refused["append"] = f"so does a stock cache: {type(error).__name__}: {' '.join(str(error).split())[:150]}"
        return
    cache = EditableCache(model)
    if not found.attempt("append", lambda: cache.append(texts.prefix)):
        return
    before, ids = {**cells_in(cache), **recurrent_in(cache)}, cache.token_ids.clone()
    attempts: dict[str, Callable[[], object]] = {
        "splice": lambda: cache.splice(cache.extract((2, 8)), seam_tokens=0),
        "precompile": lambda: Skill.precompile(model, None, texts.chunk, name="chunk"),
    }
    if not subject.spec.has_states:  # with states these compute everything behind them again
        attempts |= {
            "insert": lambda: cache.insert(texts.tail[:2], 4),
            "remove": lambda: cache.remove((4, 7)),
            "reposition": lambda: cache.reposition((4, 6), to=8),
        }
    for operation, attempt in attempts.items():
        try:
            attempt()
        except REFUSALS as refusal:
            found.refuse(operation, refusal)
            continue
        found.wrong.append(f"{operation} is carried out")
        return
    after = {**cells_in(cache), **recurrent_in(cache)}
    if not torch.equal(cache.token_ids, ids) or (before and worst(after, before) != 0.0):
        found.wrong.append("a refused operation changed the cache")
    found.compare("a stock cache", {"logits": _continued(subject, cache)}, {"logits": stock})
    if subject.spec.has_states:
        try:
            states.full(subject, found)
            states.edits(subject, found)
        except REFUSALS as refusal:
            found.refuse("edits", refusal)
    elif before and not cache.has_foreign_layers:
        _disturb(cache, len(texts.prefix))
        moves.recompute(subject, cache, found)


def _continued(subject: Subject, cache: Cache) -> torch.Tensor:
    """Logits of the chunk and one more token behind the prefix, by plain forwards as large as the model takes them."""
    more = torch.cat([subject.texts.chunk, subject.texts.tail[:1]])
    parts = more.split(subject.spec.step_tokens or len(subject.texts.chunk))
    return torch.cat([logits_after(subject.model, part, cache) for part in parts], dim=1)


def _disturb(cache: EditableCache, start: int) -> None:
    """Make the cells from slot ``start`` on wrong, so that computing them again can be seen."""
    generator = torch.Generator().manual_seed(6)
    for holder in (holder for holder in cache.editable_layers if holder.length):
        cells = holder.view(start)
        noise = {n: t + torch.randn(t.shape, generator=generator) for n, t in cells.items() if t.is_floating_point()}
        holder.overwrite(slice(start, holder.length), {**cells, **noise})
