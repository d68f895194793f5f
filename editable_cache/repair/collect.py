"""Recording traces: what a prefill shows of a document, and what a query reads from it.

Attention weights are computed a second time, from the queries and keys that pass by, ``CHUNK_QUERIES`` queries and one
layer at a time: ``[num_heads, CHUNK_QUERIES, total]`` float32 at once, and the arithmetic of one further product of
queries and keys. What stays are a few numbers per layer and token.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from editable_cache.adapters import host, measured
from editable_cache.adapters.attention import AttentionCall, tracing
from editable_cache.cache import EditableLayer, LedgeredCache, Segment
from editable_cache.errors import CompatibilityError, LedgerError, SpanError, UnsupportedModelError
from editable_cache.forward import checks, run
from editable_cache.repair.trace import CleanTrace, PrefillTrace, ProbeTrace

CHUNK_QUERIES = 128
"""Queries whose attention is held at once, for one layer."""

LEAST_NORM = 1e-6
"""Of the largest norm of the residual stream: what a smaller one counts as, where shares of it are told."""

Span = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Traced:
    """A trace and what it is of.

    Attributes:
        contamination, document: spans of slots when it was recorded.
        contamination_ids: int64 ``[stop - start]`` of the contamination.
        trace: the trace; its ``token_ids`` are the document's.
    """

    contamination: Span
    document: Span
    contamination_ids: Tensor
    trace: PrefillTrace


@dataclass(frozen=True, eq=False)
class _Piece:
    """What one forward showed at one layer of its tokens, from slot ``start`` on; ``received`` is by document token."""

    start: int
    inflow: Tensor
    to_contamination: Tensor
    hidden: Tensor
    received: Tensor

    @property
    def stop(self) -> int:
        return self.start + len(self.hidden)


class PrefillTracer:
    """Records a ``PrefillTrace`` while ``append`` runs.

    Args:
        cache: of one row, with its model; what is appended from now on is the document.
        contamination: span of slots ``(start, stop)`` before it.
        tokenizer: tells delimiters; without one only special tokens count as such.

    Raises:
        SpanError: for a cache of several rows, or a span that is empty or beyond the cache.
        UnsupportedModelError: if a layer holds something else than cells per token, or without a model.
    """

    def __init__(self, cache: LedgeredCache, contamination: Span, tokenizer: Any = None) -> None:
        require_traceable(cache, "tracing")
        start, stop = contamination
        if not 0 <= start < stop <= len(cache.ledger):
            raise SpanError(f"tracing: expected 0 <= start < stop <= {len(cache.ledger)}, got ({start}, {stop}).")
        self.contamination, self._first = (start, stop), len(cache.ledger)
        self._contamination_ids = cache.ledger.ids[0, start:stop].clone()
        self._cache, self._tokenizer, self._done = cache, tokenizer, len(cache.history)
        self._pieces: dict[int, list[_Piece]] = {}

    @contextmanager
    def recording(self) -> Iterator[PrefillTracer]:
        """Record what ``append`` runs until the context ends."""
        model = run.require_model(self._cache, "tracing")
        measured(model)  # forwards of its own: before anything is recorded
        with tracing(model, self._record):
            yield self

    def finish(self) -> Traced:
        """The trace, after the prefill.

        Raises:
            LedgerError: if the document is empty, or some of it was not seen (taken back, or no ``append`` made it).
            UnsupportedModelError: if the attention of some layer was not seen.
        """
        ledger, num_layers = self._cache.ledger, len(self._cache.layers)
        start, stop = self._first, len(ledger)
        if stop <= start:
            raise LedgerError("tracing: expected an append inside the context, got none that stayed.")
        others = {outcome.operation for outcome in self._cache.history[self._done :]} - {"append"}
        if others:
            raise LedgerError(
                f"tracing: expected nothing but append inside the context, got {', '.join(sorted(others))}; edit the "
                "cache before or behind it."
            )
        missing = sorted(set(range(num_layers)) - self._pieces.keys())
        if missing:
            raise UnsupportedModelError(
                f"tracing: the attention of layers {missing[:5]} was not seen; this model does not pass transformers' "
                "attention interface there, or the tokens came otherwise than by append."
            )
        columns = [self._whole(layer_idx, stop) for layer_idx in range(num_layers)]
        inflow, to_contamination, hidden, received = (torch.stack(each).cpu() for each in zip(*columns, strict=True))
        ids = ledger.ids[0, start:stop].clone()
        keys, values = cell_norms(self._cache, (start, stop))
        trace = PrefillTrace(
            inflow=inflow,
            attention_to_contamination=to_contamination,
            attention_received=received,
            key_norm=keys,
            value_norm=values,
            hidden_norm=hidden,
            token_ids=ids,
            distance=torch.arange(start, stop) - self.contamination[1],
            is_delimiter=delimiters(self._cache, ids, self._tokenizer),
        )
        return Traced(self.contamination, (start, stop), self._contamination_ids, trace)

    def _whole(self, layer_idx: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        pieces, num_tokens = self._pieces[layer_idx], stop - self._first
        borders = [piece.start for piece in pieces] + [stop]
        if borders[0] != self._first or any(p.stop != after for p, after in zip(pieces, borders[1:], strict=True)):
            raise LedgerError("tracing: not all of the document was seen; append all of it inside one context.")
        received = torch.zeros(num_tokens, dtype=torch.float32, device=pieces[0].received.device)
        for piece in pieces:
            received[: len(piece.received)] += piece.received
        later = torch.arange(num_tokens - 1, -1, -1, device=received.device).clamp_min(1)
        joined = (torch.cat([getattr(p, n) for p in pieces]) for n in ("inflow", "to_contamination", "hidden"))
        inflow, to_contamination, hidden = joined
        return inflow, to_contamination, hidden, received / later

    def _record(self, call: AttentionCall) -> None:
        cache, start = self._cache, call.total - call.num_queries
        layer = cache.layers[call.layer_idx]
        if cache.activity != "append" or not isinstance(layer, EditableLayer) or layer.length != call.total:
            return  # another cache of this model, or a forward that appends nothing
        if layer.scatter is not None or start < self._first:
            return
        hidden = torch.linalg.vector_norm(call.hidden[0].float(), dim=-1)
        low, high = self.contamination
        inflow, mass = [], []
        received = torch.zeros(call.total - self._first, dtype=torch.float32, device=hidden.device)
        for first in range(0, call.num_queries, CHUNK_QUERIES):
            last = min(first + CHUNK_QUERIES, call.num_queries)
            weights, begin = call.seen_weights(first, last)
            end = begin + weights.shape[-1]
            left, right = max(low, begin), max(min(high, end), begin)
            taken = weights[..., max(low - begin, 0) : max(high - begin, 0)]
            inflow.append(torch.linalg.vector_norm(call.projected(call.mixed(taken, left, right)), dim=-1))
            mass.append(taken.sum(-1).mean(0))
            given = weights.mean(0)
            rows = torch.arange(last - first, device=given.device)
            given[rows, rows + start + first - begin] = 0  # a token's attention to itself
            into = max(begin, self._first)
            received[into - self._first : end - self._first] += given[:, into - begin :].sum(0)
        least = (LEAST_NORM * hidden.amax()).clamp_min(torch.finfo(torch.float32).tiny)  # a padding row is all zeros
        share = torch.cat(inflow) / hidden.clamp_min(least)
        pieces = self._pieces.setdefault(call.layer_idx, [])
        pieces[:] = [piece for piece in pieces if piece.start < start]  # what was taken back ran in vain
        pieces.append(_Piece(start, share, torch.cat(mass).clamp(0, 1), hidden, received))


def probe(cache: LedgeredCache, query_ids: Tensor, document: Span) -> ProbeTrace:
    """Run a query over a fork of the cache and record what it reads from the document. The cache does not change.

    Costs the prefill of the query.

    Args:
        cache: of one row, with its model.
        query_ids: int64 ``[num_tokens]``.
        document: span of slots ``(start, stop)``.

    Raises:
        SpanError: for an empty query, one that is longer than the model allows, a cache of several rows, or a span out
            of range.
        UnsupportedModelError: as ``PrefillTracer``.
        LedgerError: for ids that stand for images.
    """
    require_traceable(cache, "probe")
    start, stop = document
    if not 0 <= start < stop <= len(cache.ledger):
        raise SpanError(f"probe: expected 0 <= start < stop <= {len(cache.ledger)}, got ({start}, {stop}).")
    if query_ids.dim() != 1 or not len(query_ids):
        raise SpanError(f"probe: expected ids of at least one token [n], got shape {list(query_ids.shape)}.")
    model, num_layers = run.require_model(cache, "probe"), len(cache.layers)
    checks.check_text(model, query_ids, "probe")
    measured(model)
    twin, expected = cache.fork(), 0
    mass: dict[int, Tensor] = {}
    reading: dict[int, Tensor] = {}

    def record(call: AttentionCall) -> None:
        for first in range(0, call.num_queries, CHUNK_QUERIES):
            weights = call.weights(first, min(first + CHUNK_QUERIES, call.num_queries))[..., start:stop].sum(1)
            mass[call.layer_idx] = mass.get(call.layer_idx, 0) + weights  # [num_heads, document]
        if call.total == expected:  # the last piece of the query
            mixed = call.weighted(mass[call.layer_idx], start, stop)
            reading[call.layer_idx] = torch.linalg.vector_norm(call.projected(mixed), dim=-1)

    with twin.operation("probe"):
        run.feed_unfed(twin)  # as whatever comes next would
        expected = len(twin.ledger) + len(query_ids)
        with tracing(model, record):
            run.extend(twin, query_ids[None], Segment("", 0, 0, "probe", grows=True))
    missing = sorted(set(range(num_layers)) - reading.keys())
    if missing:
        raise UnsupportedModelError(
            f"probe: the attention of layers {missing[:5]} was not seen; this model does not pass transformers' "
            "attention interface there."
        )
    order = range(num_layers)
    attention = torch.stack([mass[i].mean(0) / len(query_ids) for i in order]).clamp(0, 1).cpu()
    return ProbeTrace(attention, torch.stack([reading[i] for i in order]).cpu())


def compare(cache: LedgeredCache, clean: LedgeredCache, query_ids: Tensor, document: Span) -> CleanTrace:
    """How a document's cells differ from those of a clean cache, and what a query reads there. For research.

    Args:
        clean: holds the document's tokens at the same positions, one after the other, without the contamination (taken
            out with ``remove(close_gap=False)``); not changed.

    Raises:
        As ``probe`` and ``slots_in``.
    """
    require_traceable(cache, "compare")
    source = slots_in(cache, clean, document)
    start, stop = int(source[0]), int(source[-1]) + 1
    if stop - start != len(source):
        raise SpanError("compare: expected the document without gaps in the clean cache.")
    attention = probe(clean, query_ids, (start, stop)).attention
    found = []
    for name in ("keys", "values"):
        pairs = zip(_cells(cache, name, document), _cells(clean, name, (start, stop)), strict=True)
        found.append(torch.stack([_norms(mine - theirs.to(mine.device)) for mine, theirs in pairs]))
    return CleanTrace(attention, *found)


def slots_in(cache: LedgeredCache, other: LedgeredCache, document: Span) -> Tensor:
    """Slots of another cache where the document's tokens stand at the same positions: int64 ``[num_tokens]``.

    Raises:
        CompatibilityError: if it belongs to another model, or does not hold all of them.
    """
    other.require_idle("slots_in")
    other.adopt()
    if other.model is not cache.model:
        raise CompatibilityError("Clean cells: expected another cache of the same model, got one of another.")
    start, stop = document
    ledger = other.ledger
    positions, ids = cache.ledger.positions[0, start:stop], cache.ledger.ids[0, start:stop]
    if ledger.batch != 1 or not len(ledger):
        raise CompatibilityError(
            f"Clean cells: expected another cache of one row with tokens, got {ledger.batch} rows of {len(ledger)}."
        )
    order = ledger.positions[0].sort(stable=True)
    found = order.indices[torch.searchsorted(order.values, positions).clamp_max(len(ledger) - 1)]
    wrong = (ledger.positions[0, found] != positions) | (ledger.ids[0, found] != ids) | ~ledger.valid[0, found]
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0, 0])
        raise CompatibilityError(
            f"Clean cells: the other cache does not hold token {int(ids[first])} at position {int(positions[first])} "
            f"(slot {start + first} here); expected the same tokens at the same positions."
        )
    return found


def require_traceable(cache: LedgeredCache, operation: str) -> None:
    """Refuse caches that can't be traced: several rows, no model, layers without cells per token."""
    cache.require_idle(operation)
    cache.adopt()
    model = run.require_model(cache, operation)
    cache.require_cells_only(operation, "repair and its traces are for layers that keep cells per token")
    if cache.ledger.batch != 1:
        raise SpanError(f"{operation}: expected a cache of one row, got {cache.ledger.batch}; unstack() it first.")
    other = [i for i, layer in enumerate(cache.layers) if not isinstance(layer, EditableLayer)]
    if other:
        raise UnsupportedModelError(
            f"{operation}: layers {other[:5]} of this {type(model).__name__} keep no cells of their own per token."
        )


def cell_norms(cache: LedgeredCache, document: Span) -> tuple[Tensor, Tensor]:
    """Norms of the keys and values of a span as they stand in the cache, float32 ``[num_layers, num_tokens]`` on the
    CPU, over all key-value heads together.
    """
    found = (torch.stack(list(map(_norms, _cells(cache, name, document)))) for name in ("keys", "values"))
    return next(found), next(found)


def _cells(cache: LedgeredCache, name: str, span: Span) -> list[Tensor]:
    """Keys or values of a span, for each layer float32 ``[num_heads, num_tokens, head_dim]``."""
    layers = [layer for layer in cache.layers if isinstance(layer, EditableLayer)]
    return [layer.view()[name][0, :, span[0] : span[1]].float() for layer in layers]


def _norms(cells: Tensor) -> Tensor:
    return cells.square().sum((0, -1)).sqrt().cpu()


def delimiters(cache: LedgeredCache, ids: Tensor, tokenizer: Any = None) -> Tensor:
    """Which of ``ids [n]`` are special, or (with a tokenizer) punctuation or a line break: bool ``[n]``."""
    model = run.require_model(cache, "tracing")
    special = set(host.special_ids(model)) | set(getattr(tokenizer, "all_special_ids", None) or ())
    known: dict[int, bool] = {}
    for token in ids.unique().tolist():
        text = "" if tokenizer is None or token < 0 else str(tokenizer.decode([token]))
        stripped = text.strip()
        marks = bool(stripped) and all(unicodedata.category(char)[0] == "P" for char in stripped)
        known[token] = token in special or marks or (not stripped and "\n" in text)
    return torch.tensor([known[token] for token in ids.tolist()], dtype=torch.bool)
