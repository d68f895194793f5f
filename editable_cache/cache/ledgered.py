"""`LedgeredCache`: a transformers cache that knows what it holds and can be rearranged. It never runs the model
itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from editable_cache.adapters import WeightsState, same_weights, weights_state
from editable_cache.adapters.wrappers import inner_model
from editable_cache.cache.ledger import UNKNOWN, Ledger, Segment
from editable_cache.cache.lengths import shortened
from editable_cache.cache.passage import Passage, require_own
from editable_cache.cache.stored import Contents, StoredCache
from editable_cache.cache.twins import editable_twin
from editable_cache.cache.undo import Undo
from editable_cache.cache.watch import watch
from editable_cache.errors import BusyError, CompatibilityError, LedgerError, SpanError

if TYPE_CHECKING:
    from typing_extensions import Self


class Snapshot(NamedTuple):
    """A state of the cache by reference: storage shared from now on, the ledger, and what was not fed yet."""

    contents: Contents
    ledger: Ledger
    unfed: Tensor | None
    computed_by: WeightsState | None


class LedgeredCache(StoredCache):
    """Storage, ledger and the checks at each entry.

    Args:
        model: the model whose forwards this cache watches; without it the cache is a plain drop-in that does not see
            ids.
        config: layout for a cache without a model.

    Attributes:
        model: as given, or None.
        ledger: what the cache holds; a value, replaced by each change.
        activity: name of the operation that is using the cache now, or None.
        unfed: ids ``[batch, num_tokens]`` that the last ``generate`` returned and has not fed: its last token. What
            is put behind the cache next is put behind them. None if there are none.
        computed_by: state of the weights that computed the cells, or None while there are none.
        history: outcomes of the operations so far, oldest first; each cache keeps its own.
    """

    def __init__(self, model: nn.Module | None = None, *, config: Any = None) -> None:
        model = None if model is None else inner_model(model)
        config = config if config is not None or model is None else model.config
        super().__init__(config=config)
        self.model = model
        self.ledger = Ledger.empty()
        self.activity: str | None = None
        self.unfed: Tensor | None = None
        self.computed_by: WeightsState | None = None
        self._passage = Passage()
        self._checkpoints: dict[str, Snapshot] = {}
        self.history: list[Any] = []
        if model is not None:
            watch(model, self)

    # -- transformers' contract

    def reset(self) -> None:
        """Forget everything; the model stays attached."""
        self.require_idle("reset")
        super().reset()  # type: ignore[no-untyped-call]
        self.ledger, self.unfed, self.marks, self.dirty = Ledger.empty(), None, {}, None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens held; where nothing is stored by token, as the ledger counts them."""
        if self.only_states and self.model is not None:
            return len(self.ledger)
        return int(super().get_seq_length(layer_idx))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens from the end (a number <= 0, as in transformers).

        Raises:
            SpanError: for a number > 0.
            BusyError: during a forward.
            CompatibilityError: if tokens have to be computed again, and the model's weights were changed.
        """
        self._require_still("crop")
        if tokens_to_remove > 0:
            raise SpanError(
                f"crop: expected a count of tokens to remove as a number <= 0, got {tokens_to_remove}; call "
                f"crop(-{tokens_to_remove}) to remove {tokens_to_remove} tokens from the end."
            )
        self.adopt()
        length = max(len(self.ledger) + tokens_to_remove, 0)
        if self.state_layers and length < len(self.ledger):
            if length and length not in self.marks and self.activity != "generate":
                self.require_same_weights("crop")
            with nullcontext() if self.activity == "generate" else self.operation("crop"):
                self.rewind(length)
        else:
            super().crop(tokens_to_remove)
            self.ledger = shortened(self.ledger, length, self.model)
        self.unfed = None if tokens_to_remove else self.unfed

    def rewind(self, length: int) -> None:
        """Go back to the first ``length`` tokens where recurrent layers can't be cut by token.

        Raises:
            LedgerError: if no state was kept at that token; a cache with a model computes it again instead.
        """
        if length and length not in self.marks:
            raise LedgerError(
                f"crop: expected a number of tokens at which the recurrent state was kept, {[0, *sorted(self.marks)]}, "
                f"got {length}; make the cache with its model (EditableCache(model)), and it computes the rest again."
            )
        self.go_back(length)
        self.ledger = self.ledger.truncated(length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Pick rows of the batch, as beam search does."""
        self._require_still("reorder_cache")
        self.adopt()
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self.marks_of_rows(beam_idx)
        self.ledger = self.ledger.rows(beam_idx.cpu())
        self.unfed = None if self.unfed is None else self.unfed[beam_idx.cpu()]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times."""
        self.adopt()
        self.batch_select_indices(torch.arange(self.ledger.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows (indices or a bool mask), in this order."""
        self._require_still("batch_select_indices")
        self.adopt()
        super().batch_select_indices(indices)
        self.marks_of_rows(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)
        self.ledger = self.ledger.rows(indices.cpu())
        self.unfed = None if self.unfed is None else self.unfed[indices.cpu()]

    @property
    def is_croppable(self) -> bool:
        """Whether ``crop`` can take back any number of tokens; recurrent layers need the model for it."""
        return bool(super().is_croppable) and (self.model is not None or not self.state_layers)

    def activate_past_recording(self) -> None:
        """Layers of transformers begin to keep their past; all others do anyway."""
        if self.has_foreign_layers:
            super().activate_past_recording()  # type: ignore[no-untyped-call]

    def __copy__(self) -> Self:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> LedgeredCache:
        """A copy that shares no storage, detached from autograd, attached to the same model."""
        self.require_idle("deepcopy")
        twin = self.empty_twin()
        self.copy_contents_to(twin, memo)
        twin.ledger, twin.unfed, twin.computed_by = self.ledger, self.unfed, self.computed_by
        return twin

    def __reduce__(self) -> Any:
        raise TypeError(
            f"A {type(self).__name__} is never pickled: use save_pretrained(folder) and from_pretrained(folder, "
            f"model=model)."
        )

    # -- state

    def snapshot(self) -> Snapshot:
        """The present state in O(1): storage is shared until one side writes.

        Raises:
            UnsupportedModelError: if a layer holds state that is not per-token cells.
        """
        self.adopt()
        self.require_editable("snapshot")
        return Snapshot(self.contents(), self.ledger, self.unfed, self.computed_by)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to ``snapshot``; it stays valid."""
        self.require_idle("restore")
        self.set_contents(snapshot.contents)
        self.ledger, self.unfed, self.computed_by = snapshot.ledger, snapshot.unfed, snapshot.computed_by

    def fork(self) -> Self:
        """A second cache with the same contents, in O(1): storage is shared until one of the two writes.

        Segments, fields and positions go along; checkpoints do not.
        """
        self.require_idle("fork")
        snapshot, twin = self.snapshot(), self.empty_twin()
        twin.restore(snapshot)
        return twin

    def checkpoint(self, name: str = "checkpoint") -> str:
        """Remember the present state under a name, in O(1); a later checkpoint of the same name replaces it."""
        self.require_idle("checkpoint")
        self._checkpoints[name] = self.snapshot()
        return name

    def rollback(self, name: str = "checkpoint") -> None:
        """Go back to a checkpoint, in O(1). It stays, and can be gone back to again.

        Raises:
            SpanError: if there is no checkpoint of that name.
        """
        if name not in self._checkpoints:
            raise SpanError(f"rollback: unknown checkpoint {name!r}; this cache has {list(self._checkpoints)}.")
        self.restore(self._checkpoints[name])

    def require_idle(self, operation: str) -> None:
        """Refuse ``operation`` while a forward or another operation uses the cache.

        Raises:
            BusyError: naming both.
        """
        running = self.activity or ("a forward" if self._passage.busy else None)
        if running is not None:
            raise BusyError(
                f"{operation}: the cache is in use by {running}; wait until it returns, or work on a fork made "
                "before. If a forward was interrupted from the keyboard, call cache.recover()."
            )

    @property
    def _is_moving(self) -> bool:
        """Whether a forward or an operation is changing the layers now (between the steps of ``generate`` none is)."""
        return self._passage.busy or self.activity not in (None, "generate")

    def _require_still(self, operation: str) -> None:
        if self._is_moving:
            self.require_idle(operation)

    def require_same_weights(self, operation: str, state: WeightsState | None = None) -> None:
        """Refuse ``operation`` if the model's weights or adapters changed since the cells were computed.

        ``state`` is the model's ``weights_state`` where the caller has it already.

        Raises:
            CompatibilityError: with the next move.
        """
        if self.model is None:
            return
        state = weights_state(self.model) if state is None else state
        if not len(self.ledger) or self.computed_by is None:
            self.computed_by = state
        elif not same_weights(self.model, self.computed_by, state):
            raise CompatibilityError(
                f"{operation}: the weights or adapters of this {type(self.model).__name__} were changed after the "
                "cells of this cache were computed, so old and new ones do not belong together. Compute all of them "
                "again with cache.recompute(slice(None)), or start anew with cache.reset()."
            )

    def recover(self) -> None:
        """After an interrupt in the middle of a bare ``model(...)`` call: put the cache back to before that call."""
        self._passage.abandon(self)
        self._passage.forget()
        self.activity = None

    def adopt(self) -> None:
        """Bring the ledger up to what the layers hold: tokens that arrived unseen are recorded as unknown.

        Raises:
            LedgerError: if the layers do not hold the same number of tokens.
        """
        if self._is_moving:
            return  # layers run ahead of the ledger until the forward or operation ends
        counting = [*self.editable_layers, *self.kept_layers]
        lengths = {layer.get_seq_length() for layer in counting if layer.is_initialized}
        if len(lengths) > 1:
            raise LedgerError(
                f"The layers hold different numbers of tokens: {sorted(lengths)}. Every layer must be filled or "
                "cropped alike; call cache.reset() and start again."
            )
        length = lengths.pop() if lengths else (0 if self.editable_layers else len(self.ledger))
        if self.state_layers and length < len(self.ledger) and (length or self.has_states):
            raise LedgerError(
                f"Keys and values of {length} tokens stand beside a recurrent state of {len(self.ledger)}: a layer was "
                "cropped by hand. Crop the whole cache with cache.crop(), or call cache.reset() and start again."
            )
        if length < len(self.ledger):
            self.ledger, self.marks = self.ledger.truncated(length), {}
        batch = self._stored_batch()
        if batch is not None and batch != self.ledger.batch:
            self.ledger, self.marks = Ledger.empty(batch), {}
        if length > len(self.ledger):
            valid = torch.ones((self.ledger.batch, length - len(self.ledger)), dtype=torch.bool)
            ids = torch.full(valid.shape, UNKNOWN)
            positions = self.ledger.next_positions(valid)
            self.ledger = self.ledger.extended(ids, positions, valid, Segment("", 0, 0, "unseen", grows=True))

    # -- operations

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Run an operation whole or not at all.

        On any exception every layer and the ledger are put back bit for bit.

        Raises:
            BusyError: if the cache is in use.
        """
        self.require_idle(name)
        self.adopt()
        ledger, layers, unfed = self.ledger, list(self.layers), self.unfed
        foreign = [(layer, copy.deepcopy(layer.__dict__)) for layer in self.foreign_layers()]
        undo, marks = Undo(self.editable_layers, self.state_layers), dict(self.marks)
        self.activity = name
        try:
            with torch.no_grad():
                yield
        except BaseException:
            undo.restore()
            for layer, state in foreign:
                layer.__dict__.clear()
                layer.__dict__.update(state)
            self.layers[:] = layers
            self.ledger, self.unfed, self.marks, self.dirty = ledger, unfed, marks, None
            raise
        finally:
            undo.detach()
            self._passage.forget()
            self.activity = None

    @contextmanager
    def generating(self, model: nn.Module, ids: Any, mask: Any, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Check a prompt and hold the cache for the time of one ``generate``.

        Raises:
            LedgerError: if the prompt is not a continuation of the cache.
            BusyError: if the cache is in use.
        """
        if self.model is None:
            yield arguments
            return
        self.require_idle("generate")
        require_own(self, model)
        self.adopt()
        self.require_same_weights("generate")
        with self._passage.generating(self, ids, mask, arguments) as completed:
            yield completed

    def note_returned(self, sequences: Any) -> None:
        """Remember what a ``generate`` returned and did not feed: sequences ``[batch, length]``."""
        self.adopt()
        length, self.unfed = len(self.ledger), None
        if isinstance(sequences, Tensor) and sequences.shape[0] == self.ledger.batch and length < sequences.shape[1]:
            sequences = sequences.detach().cpu()
            if torch.equal(sequences[:, :length], self.ledger.ids):
                self.unfed = sequences[:, length:]

    def library_forward(self) -> AbstractContextManager[None]:
        """Let one forward of the library pass the hooks; the caller keeps the ledger."""
        return self._passage.library_forward()

    # -- called by the hooks

    def begin_forward(self, model: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
        """Check and complete the arguments of a forward; remember how to take it back."""
        if self.model is None:
            return arguments
        require_own(self, model)
        return self._passage.begin(self, arguments)

    def end_forward(self, *, succeeded: bool) -> None:
        """Record the tokens of a forward, or take it back."""
        self._passage.end(self, succeeded=succeeded)

    def _stored_batch(self) -> int | None:
        for layer in self.editable_layers:
            if layer.is_initialized and layer.length:
                return int(next(iter(layer.view().values())).shape[0])
        return next((layer.num_rows for layer in self.kept_layers if layer.num_rows is not None), None)

    def empty_twin(self) -> Self:
        """An empty cache of the same kind, model and layout."""
        twin = type(self).__new__(type(self))
        twin._init_like(self)
        return twin

    def _init_like(self, other: LedgeredCache) -> None:
        """Initialise as an empty cache of the same model and layout."""
        LedgeredCache.__init__(self, other.model)
        if other.model is None:
            self.layer_class_to_replicate = other.layer_class_to_replicate
            self.layers = []
        self.layers += [
            editable_twin(layer) for layer in other.layers[len(self.layers) :]
        ]  # a model may have added some
