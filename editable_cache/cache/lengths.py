"""What a change of length means for the cells of a model whose frequencies follow it."""

from __future__ import annotations

from torch import nn

from editable_cache.adapters import length_limit
from editable_cache.cache.ledger import Ledger


def shortened(ledger: Ledger, length: int, model: nn.Module | None) -> Ledger:
    """The first ``length`` slots of ``ledger``.

    Rope types like LongRoPE turn all keys by other frequencies once a text reaches a limit. What is left of such a text
    below the limit was turned otherwise than what will be put behind it: it is stale.
    """
    kept = ledger.truncated(length)
    limit = None if model is None or not len(kept) or length >= len(ledger) else length_limit(model.config)
    if limit is None or not int(ledger.positions.max()) >= limit.value > int(kept.positions.max()):
        return kept
    return kept.marked_stale([(0, len(kept))], f"frequencies beyond position {limit.value}")


def lengthened(ledger: Ledger, before: int, model: nn.Module | None) -> Ledger:
    """``ledger``, which has grown from ``before`` slots.

    Where the new tokens pass the limit of such a rope type, those in front were turned by other frequencies than the
    new queries are, and a prefill of all of them would turn them otherwise: they are stale.
    """
    limit = None if model is None or not 0 < before < len(ledger) else length_limit(model.config)
    if limit is None or not int(ledger.positions.max()) >= limit.value > int(ledger.positions[:, :before].max()):
        return ledger
    return ledger.marked_stale([(0, before)], f"frequencies below position {limit.value}")
