"""`RepairableCache`: recompute the cells that something before them spoiled most, and record what tells them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from editable_cache.cache import LedgeredCache
from editable_cache.forward.spans import Where
from editable_cache.holding import HoldingCache
from editable_cache.repair.collect import Traced
from editable_cache.repair.geometry import Geometry
from editable_cache.repair.repair import Query, RepairOutcome, repair, traced


class RepairableCache(HoldingCache):
    """The repair half of ``EditableCache``."""

    _traces: tuple[Traced, ...] = ()

    @contextmanager
    def tracing(self, contamination: Where) -> Iterator[None]:
        """Record what ``repair`` needs to choose cells without a query, while a document is appended.

        Everything that ``append`` computes inside the context is the document. Costs a second product of queries and
        keys at each layer, and a few numbers per layer and token; nothing outside the context. The last few traces are
        kept, and go along with forks.

        Args:
            contamination: the span before the document whose influence may have to go: a segment, its name, a slice,
                or ``(start, stop)``.

        Raises:
            SpanError: for a span out of range or a cache of several rows.
            LedgerError: at the end of the context, if nothing was appended in it, or something else was done.
            UnsupportedModelError: if the model's attention can't be watched, or a layer keeps no cells per token.
        """
        with traced(self, self.tokenizer, contamination, self._traces) as found:
            yield
        self._traces = tuple(found)

    def repair(
        self,
        budget: float = 0.1,
        *,
        query: Query | None = None,
        document: Where | None = None,
        contamination: Where | None = None,
        signal: str | None = None,
        geometry: Geometry = "columns",
        from_layer: int = 0,
    ) -> RepairOutcome:
        """Recompute the share of a document's cells that something before it spoiled most.

        With ``contamination`` the chosen cells are computed as if that span were not there, and marked as such; it
        stays in the cache. Without, the ledger says what is wrong: one cause of stale cells, or one isolated chunk;
        then cells are computed against what stands before them now, and whole columns are fresh afterwards.

        Args:
            budget: share of the document's cells, in (0, 1].
            query: text or ids that the cache will be asked next; it runs once over a fork and is not kept. Where it is
                not known yet, several texts: a bank of generic queries, whose readings are averaged.
            document: span to repair. By default everything from the contamination or the stale field to the end of what
                was traced behind it, or of all; of an isolated chunk, its cells that are still isolated. Tokens before
                what was traced (the rest of a field's template) are chosen first, others without a trace last, and what
                the ledger calls fresh behind all.
            contamination: span before it whose influence is to go.
            signal: name of what scores cells (``editable_cache.repair.list_signals()``), of tier 0 or 1; by default
                ``"inflow_accumulated"`` with a trace, and for whole columns ``"sir_columns"`` with trace and query,
                ``"near_and_read"`` with a query (for other shapes ``"sir"`` and ``"readout"``; the latter for isolated
                chunks too).
            geometry: ``"columns"``, ``"cells"``, ``"prefixes"`` or ``"suffixes"``; a token with a chosen cell runs
                through the whole model, so columns cost least for a share.
            from_layer: lowest layer of ``"suffixes"``.

        Raises:
            SpanError: for a budget outside (0, 1], a span that is empty or out of range, a document that begins before
                its contamination ends, an empty query or one beyond the model's positions, a cache of several rows,
                an unknown signal, or if the ledger does not know exactly one cause.
            LedgerError: if the signal needs a trace and there is none (see ``tracing``), or ids are unknown.
            UnsupportedModelError: if chosen cells of this model can't be recomputed, or its attention not watched.
        """
        return repair(
            self,
            self.tokenizer,
            budget,
            traces=self._traces,
            query=query,
            document=document,
            contamination=contamination,
            signal=signal,
            geometry=geometry,
            from_layer=from_layer,
        )

    def _init_like(self, other: LedgeredCache) -> None:
        super()._init_like(other)
        self._traces = getattr(other, "_traces", ())
