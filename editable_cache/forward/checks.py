"""What is refused before tokens run: padding where it would be counted, and chosen cells of texts beyond a limit."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from editable_cache.adapters import host, length_limit, measured
from editable_cache.adapters.images import placeholders
from editable_cache.cache import Ledger, LedgeredCache
from editable_cache.errors import LedgerError, SpanError, UnsupportedModelError
from editable_cache.spec import ModelSpec


def check_text(model: nn.Module, ids: Tensor, operation: str) -> None:
    """Refuse ids that stand for images where no pixels can come along: the model would read them as words.

    Args:
        ids: ``[batch, num_tokens]`` or ``[num_tokens]``.

    Raises:
        LedgerError: naming the first one.
    """
    found = placeholders(model, ids)
    if bool(found.any()):
        raise LedgerError(
            f"{operation}: token {int(ids[found][0])} stands for a piece of an image, and no pixels come along; "
            "expected text. Splice a VisionChunk, or pass ids and pixels to the model or to generate."
        )


def check_padding(cache: LedgeredCache, valid: Tensor, operation: str) -> None:
    """Refuse padding behind the cache where a sliding window, which counts slots, would count it, and anywhere where it
    would be compressed together with tokens or where slots are positions.

    Raises:
        UnsupportedModelError: naming the window.
    """
    if cache.kept_layers and not bool(valid.all()):
        raise UnsupportedModelError(
            f"{operation}: expected contents of one length for all rows, got padding: this model folds windows of "
            "tokens into entries, padding with them, whatever the mask says. Run rows of different lengths one by one."
        )
    if bool(valid.all()) or cache.model is None or cache.model.training:
        return
    check_slot_padding(measured(cache.model), cache.ledger, operation)
    if not len(cache.ledger):
        return
    if cache.state_layers:
        raise UnsupportedModelError(
            f"{operation}: expected contents of one length for all rows, got padding: behind other tokens it would be "
            "folded into the recurrent state, whatever the mask says. unstack() the cache and run the rows one by one, "
            "or give all rows equally many tokens."
        )
    kinds = host.cache_layout(cache.model.config).masks
    windows = [size for kind in kinds for size in (kind.sliding_window, kind.chunk_size) if size is not None]
    total = len(cache.ledger) + valid.shape[1]
    if windows and total > min(windows):
        raise UnsupportedModelError(
            f"{operation}: expected contents of one length for all rows, got padding in the middle of {total} slots: "
            f"this model's sliding window counts slots ({min(windows)}), so shorter rows would see less than alone. "
            "unstack() the cache and run the rows one by one, or give all rows equally many tokens."
        )


def check_slot_padding(spec: ModelSpec, ledger: Ledger, operation: str) -> None:
    """Refuse padding behind what ``ledger`` holds where the positions of a model are its slots.

    Raises:
        UnsupportedModelError: with what to do.
    """
    if spec.positions == "slots" and not spec.has_states and (spec.counts_slots or len(ledger)):
        raise UnsupportedModelError(
            f"{operation}: expected rows of one length, got padding: the positions of this model are the slots of its "
            "cache, so padding would be counted. Run rows of different lengths one by one."
        )


def check_regime(model: nn.Module, ledger: Ledger, pieces: Sequence[Tensor]) -> None:
    """Refuse chosen cells that would be computed with other frequencies than those of the whole text.

    Args:
        pieces: the slots of each forward.

    Raises:
        SpanError: with the limit.
    """
    limit = length_limit(model.config)
    if limit is None or int(ledger.positions.max()) < limit.value:
        return
    if any(int(ledger.positions[:, part].max()) < limit.value for part in pieces):
        raise SpanError(
            f"recompute: this text reaches position {limit.value} ({limit.name}), from which on the model turns all of "
            "it by other frequencies than it would the chosen tokens; choose everything from a token on: slice(start, "
            "None)."
        )
