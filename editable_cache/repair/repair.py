"""The one call: find what to repair, score its cells, choose as many as the budget allows, compute them again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from editable_cache.cache import LedgeredCache
from editable_cache.errors import LedgerError, SpanError
from editable_cache.forward import run
from editable_cache.forward.outcome import operating
from editable_cache.forward.spans import Where, resolve
from editable_cache.forward.text import TextOrIds, encode
from editable_cache.repair.collect import PrefillTracer, Span, Traced, cell_norms, delimiters, probe, require_traceable
from editable_cache.repair.geometry import Geometry, mask_of
from editable_cache.repair.known import Known, known_of
from editable_cache.repair.patch import recompute_masked
from editable_cache.repair.reads import reads_trace
from editable_cache.repair.selector import Signal, get_signal
from editable_cache.repair.target import Target, find_target
from editable_cache.repair.trace import TRACED_ONLY, PrefillTrace, ProbeTrace, pooled
from editable_cache.repair.view import Tier0View, Tier1View

TRACED, TRACED_AND_ASKED, ASKED = "inflow_accumulated", "sir", "readout"
"""The signal by default: with a trace of the prefill, with a query too, with a query alone."""

TRACED_AND_ASKED_COLUMNS, ASKED_COLUMNS = "sir_columns", "near_and_read"
"""In place of the last two, for whole columns; but an isolated chunk has no writer to be near to."""

MOST_TRACES = 8
"""Traces that a cache keeps; the oldest go first."""

Query = TextOrIds | Sequence[str]
"""One query, or a bank of them whose readings are pooled."""


@dataclass(frozen=True, eq=False)
class RepairOutcome:
    """Report of one repair.

    Attributes:
        mask: the cells that were computed again, bool ``[num_layers, num_tokens of the document]``.
        document: span of slots ``(start, stop)``.
        without: span of slots that the new cells don't see, or None: they see what stands before them.
        reason: what the repair was against, for people.
        cells: number of cells computed again.
        share: the same as a share of the document's cells, in (0, 1].
        tokens_run: tokens that ran through the whole model, the query's included.
        seconds_selection: wall time of the query, scores and choice.
        seconds_recompute: wall time of computing the cells.
        signal, geometry: what chose them.
        traced: whether a trace of the document's prefill was at hand.
        untraced: tokens of the document that no trace tells of.
    """

    mask: Tensor
    document: Span
    without: Span | None
    reason: str
    cells: int
    share: float
    tokens_run: int
    seconds_selection: float
    seconds_recompute: float
    signal: str
    geometry: Geometry
    traced: bool
    untraced: int

    def __str__(self) -> str:
        return (
            f"repair of slots {self.document[0]} to {self.document[1] - 1} ({self.reason}): {self.cells} cells "
            f"({self.share:.1%}) by {self.signal} in {self.geometry}, {self.tokens_run} tokens run, "
            f"{f'{self.untraced} tokens not traced, ' if self.traced and self.untraced else ''}"
            f"{self.seconds_selection * 1e3:.1f} ms to choose, {self.seconds_recompute * 1e3:.1f} ms to compute"
        )


@contextmanager
def traced(
    cache: LedgeredCache, tokenizer: Any, contamination: Where, earlier: Sequence[Traced]
) -> Iterator[list[Traced]]:
    """Record a trace of what is appended meanwhile; afterwards the list holds it behind ``earlier`` ones."""
    require_traceable(cache, "tracing")
    tracer, found = PrefillTracer(cache, resolve(cache.ledger, contamination, "tracing"), tokenizer), list(earlier)
    with tracer.recording():
        yield found
    found.append(tracer.finish())
    del found[:-MOST_TRACES]


def repair(
    cache: LedgeredCache,
    tokenizer: Any,
    budget: float,
    *,
    traces: Sequence[Traced] = (),
    query: Query | None = None,
    document: Where | None = None,
    contamination: Where | None = None,
    signal: str | None = None,
    geometry: Geometry = "columns",
    from_layer: int = 0,
) -> RepairOutcome:
    """Repair a share of a document's cells; see ``EditableCache.repair``."""
    started = time.perf_counter()
    require_traceable(cache, "repair")
    run.require_masks(cache, "repair")
    target = find_target(cache, traces, document, contamination)
    shape = (len(cache.layers), target.document[1] - target.document[0])
    mask_of(torch.zeros(shape), budget, geometry, from_layer=from_layer)  # refuses budgets before anything runs
    asked = _queries(tokenizer, query)
    known = known_of(cache.ledger, target.document, target.writer, target.field, traces)
    chooser = _signal(signal, known is not None, bool(asked), geometry, isolated=target.isolated)
    scores = _scores(cache, tokenizer, target, chooser, known, asked)
    scores[:, ~target.pending] -= scores.max() - scores.min() + 1  # what is right already comes last
    mask = mask_of(scores, budget, geometry, from_layer=from_layer)
    chosen = time.perf_counter()
    with operating(cache, "repair") as tally:
        recompute_masked(cache, tally, mask, target.document, target.without)
        tally.notes.append(f"{chooser.name} in {geometry}, {target.reason}")
    outcome = tally.done()
    return RepairOutcome(
        mask=mask,
        document=target.document,
        without=target.without,
        reason=target.reason,
        cells=int(mask.sum()),
        share=int(mask.sum()) / mask.numel(),
        tokens_run=outcome.tokens_computed + (sum(map(len, asked)) if chooser.tier else 0),
        seconds_selection=chosen - started,
        seconds_recompute=time.perf_counter() - chosen,
        signal=chooser.name,
        geometry=geometry,
        traced=known is not None,
        untraced=len(target.pending) if known is None else int((~known.covered).sum()),
    )


def _signal(name: str | None, has_trace: bool, has_query: bool, geometry: Geometry, *, isolated: bool) -> Signal:
    if name is None:
        if not has_trace and not has_query:
            raise LedgerError(_no_trace("A repair without a query"))
        columns = geometry == "columns"
        with_both = TRACED_AND_ASKED_COLUMNS if columns else TRACED_AND_ASKED
        with_query = ASKED_COLUMNS if columns and not isolated else ASKED
        name = TRACED if not has_query else with_both if has_trace else with_query
    found = get_signal(name)
    if found.tier > 1:
        raise SpanError(
            f"repair: signal {name!r} is of tier {found.tier} and reads the clean cache, which a repair does not have; "
            "expected one of tier 0 or 1."
        )
    if found.tier == 1 and not has_query:
        raise SpanError(f"repair: signal {name!r} reads what a query takes from the cache; pass query=text_or_ids.")
    return found


def _queries(tokenizer: Any, query: Query | None) -> list[Tensor]:
    """Ids of each query: of one text or list of ids, or of several texts."""
    if query is None:
        return []
    bank = isinstance(query, (list, tuple)) and len(query) > 0 and all(isinstance(each, str) for each in query)
    found = [encode(tokenizer, each, first=False) for each in (query if bank else [query])]  # type: ignore[arg-type]
    if not all(map(len, found)):
        raise SpanError("repair: expected a query of at least one token, or several of them, got one that is empty.")
    return found


def _no_trace(what: str) -> str:
    return (
        f"{what} needs a trace of the document's prefill, and this cache has none: append the document inside "
        "'with cache.tracing(contamination): ...'. Without a trace pass query= and no signal=, or "
        "signal='window', which needs neither."
    )


def _scores(
    cache: LedgeredCache,
    tokenizer: Any,
    target: Target,
    chooser: Signal,
    known: Known | None,
    asked: Sequence[Tensor],
) -> Tensor:
    """Scores of all cells.

    A signal that reads a trace scores what is covered. Tokens before that, between the contamination and what was
    traced, come first, from the contamination on; other tokens without a trace come last.
    """
    reading = pooled([probe(cache, ids, target.document) for ids in asked]) if chooser.tier else None
    if not reads_trace(chooser):
        return _scored(chooser, _untraced(cache, tokenizer, target), reading)
    if known is None:
        raise LedgerError(_no_trace(f"Signal {chooser.name!r}"))
    covered = known.covered
    if reading is not None:
        reading = ProbeTrace(reading.attention[:, covered], reading.readout[:, covered])
    found = _scored(chooser, known.trace, reading)
    scores = (found.min() - 1).expand(len(found), len(covered)).clone()
    scores[:, covered] = found
    gap = int(covered.nonzero()[0, 0])
    scores[:, :gap] = found.max() + torch.arange(gap, 0, -1)
    return scores


def _scored(chooser: Signal, prefill: PrefillTrace, reading: ProbeTrace | None) -> Tensor:
    return chooser(Tier0View(prefill) if reading is None else Tier1View(prefill, reading))


def _untraced(cache: LedgeredCache, tokenizer: Any, target: Target) -> PrefillTrace:
    """What the cache itself knows of a document, and zeros for the rest."""
    start, stop = target.document
    keys, values = cell_norms(cache, target.document)
    ids = cache.ledger.ids[0, start:stop].clone()
    behind = target.writer[1] if target.writer is not None and target.writer[1] <= start else start
    unknown = dict.fromkeys(TRACED_ONLY, torch.zeros_like(keys))
    return PrefillTrace(
        key_norm=keys,
        value_norm=values,
        token_ids=ids,
        distance=torch.arange(start, stop) - behind,
        is_delimiter=delimiters(cache, ids, tokenizer),
        **unknown,
    )
