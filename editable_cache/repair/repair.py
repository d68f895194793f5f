"""The one call: find what to repair, score its cells, choose as many as the budget allows, compute them again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from editable_cache.repair.patch import recompute_masked, require_apart, span_name
from editable_cache.repair.selector import Signal, get_signal
from editable_cache.repair.trace import PrefillTrace, ProbeTrace, pooled
from editable_cache.repair.view import Tier0View, Tier1View

TRACED, TRACED_AND_ASKED, ASKED = "inflow_accumulated", "sir", "readout"
"""The signal by default: with a trace of the prefill, with a query too, with a query alone."""

TRACED_AND_ASKED_COLUMNS, ASKED_COLUMNS = "sir_columns", "near_and_read"
"""In place of the last two, for whole columns."""

MOST_TRACES = 8
"""Traces that a cache keeps; the oldest go first."""

_FIELD = "field {}:"

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

    def __str__(self) -> str:
        return (
            f"repair of slots {self.document[0]} to {self.document[1] - 1} ({self.reason}): {self.cells} cells "
            f"({self.share:.1%}) by {self.signal} in {self.geometry}, {self.tokens_run} tokens run, "
            f"{self.seconds_selection * 1e3:.1f} ms to choose, {self.seconds_recompute * 1e3:.1f} ms to compute"
        )


class Target(NamedTuple):
    """What to repair: the document, what the new cells don't see, what wrote the old ones (if known), and why."""

    document: Span
    without: Span | None
    writer: Span | None
    reason: str


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
    known = _trace_of(cache, target, traces)
    chooser = _signal(signal, known is not None, bool(asked), geometry)
    scores = _scores(cache, tokenizer, target, chooser, known, asked)
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
    )


def find_target(
    cache: LedgeredCache, traces: Sequence[Traced], document: Where | None, contamination: Where | None
) -> Target:
    """What is to be repaired, as said by the caller or, for what was not said, by the ledger.

    Raises:
        SpanError: if the ledger does not know exactly one thing, or spans don't fit.
    """
    ledger = cache.ledger
    span = None if document is None else resolve(ledger, document, "repair")
    if contamination is not None:
        cause = resolve(ledger, contamination, "repair")
        span = span or _traced_document(cache, cause, traces, (cause[1], len(ledger))) or (cause[1], len(ledger))
        if span[0] >= span[1]:
            raise SpanError(f"repair: nothing stands behind the contamination {cause}; expected a document there.")
        require_apart(cache, span, cause, "repair")
        return Target(span, cause, cause, f"without {span_name(cache, cause)}")
    low, high = span or (0, len(ledger))
    stale = [s for s in ledger.stale if s.start < high and low < s.stop]
    causes = list(dict.fromkeys(s.cause for s in stale))
    isolated = (ledger.groups[0, low:high] != 0).nonzero()[:, 0] + low
    groups = ledger.groups[0, isolated].unique().tolist()
    if len(causes) == 1 and not groups:
        found = (max(low, min(s.start for s in stale)), min(high, max(s.stop for s in stale)))
        fields = [field for field in ledger.fields if causes[0].startswith(_FIELD.format(field.name))]
        writer = fields[0].spans[0] if fields else None
        if span is None and writer is not None:
            found = _traced_document(cache, writer, traces, found) or found
        return Target(found, None, writer, f"stale: {causes[0]}")
    if len(groups) == 1 and not causes and int(isolated[0]) > 0:
        found = (int(isolated[0]), int(isolated[-1]) + 1)
        return Target(found, None, (0, found[0]), "isolated: it never saw what precedes it")
    known = causes + [f"isolated chunk {number}" for number in groups]
    raise SpanError(
        "repair: expected exactly one cause that the ledger knows, got "
        f"{known or 'none'}. Pass contamination= (the span whose influence is to go), or document= (the span to "
        "repair, with one stale cause or one isolated chunk in it)."
    )


def _signal(name: str | None, has_trace: bool, has_query: bool, geometry: Geometry) -> Signal:
    if name is None:
        if not has_trace and not has_query:
            raise LedgerError(_no_trace("A repair without a query"))
        columns = geometry == "columns"
        with_both = TRACED_AND_ASKED_COLUMNS if columns else TRACED_AND_ASKED
        name = TRACED if not has_query else with_both if has_trace else ASKED_COLUMNS if columns else ASKED
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
    several = not isinstance(query, str) and len(query) and all(isinstance(each, str) for each in query)
    texts: Any = query if several else [query]
    return [encode(tokenizer, each, first=False) for each in texts]


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
    known: tuple[int, PrefillTrace] | None,
    asked: Sequence[Tensor],
) -> Tensor:
    """Scores of all cells.

    Where no trace covers the document, what only a trace knows is filled with two different draws of noise: a signal
    whose scores are the same reads none of it. One that reads a trace scores what is covered; tokens before that, which
    stand between the contamination and what was traced, come first, from the contamination on.
    """
    reading = pooled([probe(cache, ids, target.document) for ids in asked]) if chooser.tier else None
    gap, trace = known or (0, None)
    if trace is None or gap:
        first, second = (_scored(chooser, _untraced(cache, tokenizer, target, seed), reading) for seed in (0, 1))
        if torch.equal(first, second):
            return first
    if trace is None:
        raise LedgerError(_no_trace(f"Signal {chooser.name!r}"))
    if reading is not None:
        reading = ProbeTrace(reading.attention[:, gap:], reading.readout[:, gap:])
    covered = _scored(chooser, trace, reading)
    ahead = covered.max() + torch.arange(gap, 0, -1, dtype=covered.dtype)
    return torch.cat([ahead.expand(len(covered), gap), covered], dim=1)


def _scored(chooser: Signal, prefill: PrefillTrace, reading: ProbeTrace | None) -> Tensor:
    return chooser(Tier0View(prefill) if reading is None else Tier1View(prefill, reading))


def _untraced(cache: LedgeredCache, tokenizer: Any, target: Target, seed: int) -> PrefillTrace:
    """What the cache itself knows of a document, and noise for the rest."""
    start, stop = target.document
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand((4, len(cache.layers), stop - start), generator=generator)
    keys, values = cell_norms(cache, target.document)
    ids = cache.ledger.ids[0, start:stop].clone()
    behind = target.writer[1] if target.writer is not None and target.writer[1] <= start else start
    return PrefillTrace(
        inflow=noise[0],
        attention_to_contamination=noise[1],
        attention_received=noise[2],
        key_norm=keys,
        value_norm=values,
        hidden_norm=noise[3],
        token_ids=ids,
        distance=torch.arange(start, stop) - behind,
        is_delimiter=delimiters(cache, ids, tokenizer),
    )


def _trace_of(cache: LedgeredCache, target: Target, traces: Sequence[Traced]) -> tuple[int, PrefillTrace] | None:
    """The latest trace of the same writer that covers the document, cut to it, or all of it but its first tokens; and
    the number of those.
    """
    start, stop = target.document
    ids = cache.ledger.ids[0]
    for each in reversed(traces):
        if not _same_writer(cache, target.writer, each):
            continue
        standing = _found(ids, each.trace.token_ids, each.document[0])
        gap = standing - start if standing is not None and start < standing < stop else 0
        at = _offset(each, start + gap, ids[start + gap : stop])
        if at is not None:
            cut = slice(at, at + stop - start - gap)
            arrays = {name: value[..., cut].clone() for name, value in vars(each.trace).items()}
            return gap, PrefillTrace(**arrays)
    return None


def _same_writer(cache: LedgeredCache, writer: Span | None, each: Traced) -> bool:
    """Whether a trace tells of what wrote to the document: the same slots, or a span that begins there (a field whose
    value has changed since), or the same tokens elsewhere.
    """
    if writer is None or writer == each.contamination:
        return True
    return writer[0] == each.contamination[0] or torch.equal(
        cache.ledger.ids[0, slice(*writer)], each.contamination_ids
    )


def _offset(each: Traced, start: int, ids: Tensor) -> int | None:
    """Where in a traced document these tokens stand: at the same slots, or the one place where they are found."""
    return _found(each.trace.token_ids, ids, start - each.document[0])


def _traced_document(cache: LedgeredCache, writer: Span, traces: Sequence[Traced], within: Span) -> Span | None:
    """From the start of ``within`` to where the document of the latest trace of this writer ends now."""
    for each in reversed(traces):
        if _same_writer(cache, writer, each):
            at = _found(cache.ledger.ids[0], each.trace.token_ids, each.document[0])
            if at is not None:
                stop = min(at + len(each.trace.token_ids), within[1])
                if max(at, within[0]) < stop:
                    return within[0], stop
    return None


def _found(held: Tensor, ids: Tensor, expected: int) -> int | None:
    """Where ``ids [m]`` stand in ``held [n]``: where they are expected, else the one place where they are found."""
    if len(ids) > len(held):
        return None
    if 0 <= expected <= len(held) - len(ids) and torch.equal(held[expected : expected + len(ids)], ids):
        return expected
    places = (held[: len(held) - len(ids) + 1] == ids[0]).nonzero()[:, 0].tolist()
    places = [at for at in places if torch.equal(held[at : at + len(ids)], ids)]
    return places[0] if len(places) == 1 else None
