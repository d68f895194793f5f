"""Who may read what: one view per tier, holding exactly the traces that a signal of that tier may read.

None of them is a kind of another, so a type checker refuses one in place of the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from editable_cache.errors import LedgerError, SpanError
from editable_cache.repair.trace import CleanTrace, PrefillTrace, ProbeTrace


@dataclass(frozen=True, eq=False, slots=True)
class Tier0View:
    """What a tier-0 signal may read: the prefill that happened anyway."""

    prefill: PrefillTrace

    def __post_init__(self) -> None:
        """Raise TypeError or ``LedgerError`` unless it holds that trace itself, of this kind and shape."""
        _require_traces(self)


@dataclass(frozen=True, eq=False, slots=True)
class Tier1View:
    """What a tier-1 signal may read: the prefill, and one forward of a query over the contaminated cache."""

    prefill: PrefillTrace
    probe: ProbeTrace

    def __post_init__(self) -> None:
        """Raise TypeError or ``LedgerError`` unless it holds those traces themselves, of one shape."""
        _require_traces(self)


@dataclass(frozen=True, eq=False, slots=True)
class Tier2View:
    """What a tier-2 signal may read: also how the contaminated cache differs from the clean one. Research only."""

    prefill: PrefillTrace
    probe: ProbeTrace
    clean: CleanTrace

    def __post_init__(self) -> None:
        """Raise TypeError or ``LedgerError`` unless it holds those traces themselves, of one shape."""
        _require_traces(self)


View = Tier0View | Tier1View | Tier2View

VIEWS: tuple[type[View], ...] = (Tier0View, Tier1View, Tier2View)
"""The view of each tier."""

_TRACES: dict[str, type[PrefillTrace | ProbeTrace | CleanTrace]] = {
    "prefill": PrefillTrace,
    "probe": ProbeTrace,
    "clean": CleanTrace,
}
_MISSING = ("a PrefillTrace", "a ProbeTrace: run a query over the cache", "a CleanTrace: compare with a clean cache")


def narrowed(available: View, tier: int) -> View:
    """A new view of `tier` with the traces of `available`, and no way back to what it leaves out.

    Raises:
        SpanError: if a trace that the tier reads is missing.
        TypeError: if `available` is no view.
    """
    if type(available) not in VIEWS:
        raise TypeError(f"A signal reads a Tier0View, Tier1View or Tier2View, got {type(available).__name__}.")
    have = VIEWS.index(type(available))
    if tier > have:
        raise SpanError(f"A signal of tier {tier} needs {_MISSING[have + 1]}; got a view of tier {have}.")
    view = VIEWS[tier]
    return view(*(getattr(available, name) for name in view.__match_args__))


def _require_traces(view: View) -> None:
    kind = type(view).__name__
    for name in type(view).__match_args__:
        trace, wanted = getattr(view, name), _TRACES[name]
        if type(trace) is not wanted:
            raise TypeError(f"{kind}.{name}: expected exactly a {wanted.__name__}, got {type(trace).__name__}.")
        if trace.shape != view.prefill.shape:
            raise LedgerError(
                f"{kind}.{name}: expected {view.prefill.shape} layers and tokens like its prefill, got {trace.shape}; "
                "record both of one span."
            )
