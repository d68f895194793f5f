"""Which cells to repair: traces, signals by tier, geometries, budgets, search."""

from editable_cache.repair import baselines, signals_clean, signals_prefill, signals_probe  # noqa: F401  they register
from editable_cache.repair.geometry import Geometry, mask_of
from editable_cache.repair.search import Evaluate, SearchResult, beam_search, exhaustive_search, greedy_search
from editable_cache.repair.selector import Signal, get_signal, list_signals, ranks, scores, signal
from editable_cache.repair.trace import CleanTrace, PrefillTrace, ProbeTrace, pooled
from editable_cache.repair.view import Tier0View, Tier1View, Tier2View, View, narrowed

__all__ = [
    "CleanTrace",
    "Evaluate",
    "Geometry",
    "PrefillTrace",
    "ProbeTrace",
    "SearchResult",
    "Signal",
    "Tier0View",
    "Tier1View",
    "Tier2View",
    "View",
    "beam_search",
    "exhaustive_search",
    "get_signal",
    "greedy_search",
    "list_signals",
    "mask_of",
    "narrowed",
    "pooled",
    "ranks",
    "scores",
    "signal",
]
