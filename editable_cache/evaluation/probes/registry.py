"""The probes by name."""

from __future__ import annotations

from collections.abc import Sequence

from editable_cache.errors import TaskError
from editable_cache.evaluation.probes import (
    direction,
    dissociation,
    heads,
    injection,
    knockout,
    locality,
    scrubbing,
    specificity,
    suffix,
    timing,
    writing,
)
from editable_cache.evaluation.probes.bench import Probe

PROBES: dict[str, Probe] = {
    module.PROBE.name: module.PROBE
    for module in (
        locality,
        suffix,
        specificity,
        knockout,
        injection,
        dissociation,
        scrubbing,
        timing,
        heads,
        writing,
        direction,
    )
}
"""In the order in which they are reported."""


def chosen(names: Sequence[str]) -> tuple[Probe, ...]:
    """The probes of these names; all of them for none.

    Raises:
        TaskError: for an unknown name, with those that there are.
    """
    unknown = [name for name in names if name not in PROBES]
    if unknown:
        raise TaskError(f"Unknown probe {unknown[0]!r}; expected one of {', '.join(PROBES)}.")
    return tuple(PROBES[name] for name in names) if names else tuple(PROBES.values())
