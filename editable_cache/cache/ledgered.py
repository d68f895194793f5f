"""`LedgeredCache`: a transformers cache that knows what it holds and can be rearranged. It never runs the model
itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from editable_cache.adapters import host
from editable_cache.cache import entry
from editable_cache.cache.layer import EditableLayer, LayerState
from editable_cache.cache.ledger import UNKNOWN, Ledger, Segment
from editable_cache.cache.undo import Undo
from editable_cache.cache.watch import watch
from editable_cache.errors import BusyError, LedgerError, SpanError, UnsupportedModelError


class Snapshot(NamedTuple):
    """A state of the cache by reference: storage shared from now on, and the ledger."""

    layers: tuple[LayerState, ...]
    ledger: Ledger


class _Pending(NamedTuple):
    checked: entry.Entry
    undo: Undo
    ledger: Ledger


class LedgeredCache(DynamicCache):
    """Storage, ledger and the checks at each entry.

    Args:
        model: the model whose forwards this cache watches; without it the cache is a plain drop-in that does not see
            ids.
        config: layout for a cache without a model.

    Attributes:
        model: as given, or None.
        ledger: what the cache holds; a value, replaced by each change.
        activity: name of the operation that is using the cache now, or None.
        history: outcomes of the operations so far, oldest first; each cache keeps its own.
    """

    def __init__(self, model: nn.Module | None = None, *, config: Any = None) -> None:
        config = config if config is not None or model is None else model.config
        super().__init__(config=config)
        if config is None:
            self.layer_class_to_replicate = EditableLayer
        else:
            self.layers = [EditableLayer() if host.is_plain(layer) else layer for layer in self.layers]
        self.model = model
        self.ledger = Ledger.empty()
        self.activity: str | None = None
        self._pending: _Pending | None = None
        self._library_forward = False
        self._library_runs = False
        self._refused = False
        self._own_positions = False
        self._prompt_length: int | None = None
        self._again: Ledger | None = None
        self._steps = 0
        self.history: list[Any] = []
        if model is not None:
            watch(model, self)

    # -- transformers' contract

    def __len__(self) -> int:
        return len(self.layers)

    def reset(self) -> None:
        """Forget everything; the model stays attached."""
        self.require_idle("reset")
        super().reset()  # type: ignore[no-untyped-call]
        self.ledger = Ledger.empty()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens from the end (a number <= 0, as in transformers).

        Raises:
            SpanError: for a number > 0.
            BusyError: during a forward.
        """
        self._require_still("crop")
        if tokens_to_remove > 0:
            raise SpanError(
                f"crop: expected a count of tokens to remove as a number <= 0, got {tokens_to_remove}; call "
                f"crop(-{tokens_to_remove}) to remove {tokens_to_remove} tokens from the end."
            )
        self.adopt()
        super().crop(tokens_to_remove)
        self.ledger = self.ledger.truncated(max(len(self.ledger) + tokens_to_remove, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Pick rows of the batch, as beam search does."""
        self._require_still("reorder_cache")
        self.adopt()
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]  # not by batch_select_indices, which leaves recurrent state where it is
        self.ledger = self.ledger.rows(beam_idx.cpu())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times."""
        self.adopt()
        self.batch_select_indices(torch.arange(self.ledger.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows (indices or a bool mask), in this order."""
        self._require_still("batch_select_indices")
        self.adopt()
        super().batch_select_indices(indices)
        self.ledger = self.ledger.rows(indices.cpu())

    def activate_past_recording(self) -> None:
        """Nothing to do: every layer keeps its past."""

    def __copy__(self) -> LedgeredCache:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> LedgeredCache:
        """A copy that shares no storage, detached from autograd, attached to the same model."""
        self.require_idle("deepcopy")
        twin = self._empty_twin()
        for mine, theirs in zip(self.layers, twin.layers, strict=True):
            if not isinstance(mine, EditableLayer) or not isinstance(theirs, EditableLayer):
                theirs.__dict__.update(copy.deepcopy(mine.__dict__, memo))
            elif mine.length:
                theirs.append({name: tensor.detach() for name, tensor in mine.view().items()})
                theirs.pristine = {name: tensor.clone() for name, tensor in mine.pristine.items()}
        twin.ledger = self.ledger
        return twin

    def __reduce__(self) -> Any:
        raise TypeError(
            f"A {type(self).__name__} is never pickled: use save_pretrained(folder) and from_pretrained(folder, "
            f"model=model)."
        )

    # -- state

    @property
    def editable_layers(self) -> list[EditableLayer]:
        """The layers with per-token cells that this library can edit."""
        return [layer for layer in self.layers if isinstance(layer, EditableLayer)]

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the stored cells, or None while there are none."""
        return next((layer.dtype for layer in self.editable_layers if layer.is_initialized), None)

    def snapshot(self) -> Snapshot:
        """The present state in O(1): storage is shared until one side writes.

        Raises:
            UnsupportedModelError: if a layer holds state that is not per-token cells.
        """
        self.adopt()
        self.require_editable("snapshot")
        return Snapshot(tuple(layer.share() for layer in self.editable_layers), self.ledger)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to ``snapshot``; it stays valid."""
        self.require_idle("restore")
        layers = self.editable_layers
        for layer, state in zip(layers, snapshot.layers, strict=False):
            layer.set_state(state)
        for layer in layers[len(snapshot.layers) :]:  # made by a first forward after the snapshot
            layer.reset()
        self.ledger = snapshot.ledger

    def fork(self) -> LedgeredCache:
        """A second cache with the same contents, in O(1): storage is shared until one of the two writes.

        Segments, fields and positions go along; checkpoints do not.
        """
        self.require_idle("fork")
        snapshot, twin = self.snapshot(), self._empty_twin()
        twin.restore(snapshot)
        return twin

    def require_editable(self, operation: str) -> None:
        """Refuse ``operation`` where a layer holds something else than per-token keys and values.

        Raises:
            UnsupportedModelError: naming the layers.
        """
        foreign = {
            i: type(layer).__name__ for i, layer in enumerate(self.layers) if not isinstance(layer, EditableLayer)
        }
        if foreign:
            raise UnsupportedModelError(
                f"{operation}: expected per-token keys and values in every layer, got {foreign}. This cache still "
                "works as a plain transformers cache: append by running the model, and recompute from the start "
                "after an edit."
            )

    def require_idle(self, operation: str) -> None:
        """Refuse ``operation`` while a forward or another operation uses the cache.

        Raises:
            BusyError: naming both.
        """
        running = self.activity or ("a forward" if self._pending is not None or self._library_runs else None)
        if running is not None:
            raise BusyError(
                f"{operation}: the cache is in use by {running}; wait until it returns, or work on a fork made "
                "before. If a forward was interrupted from the keyboard, call cache.recover()."
            )

    @property
    def _has_foreign_layers(self) -> bool:
        return len(self.editable_layers) != len(self.layers)

    @property
    def _is_moving(self) -> bool:
        """Whether a forward or an operation is changing the layers now (between the steps of ``generate`` none is)."""
        return self._pending is not None or self._library_runs or self.activity not in (None, "generate")

    def _require_still(self, operation: str) -> None:
        if self._is_moving:
            self.require_idle(operation)

    def recover(self) -> None:
        """After an interrupt in the middle of a bare ``model(...)`` call: put the cache back to before that call."""
        self._abandon_pending()
        self._refused = self._library_forward = self._library_runs = False
        self.activity = None

    def adopt(self) -> None:
        """Bring the ledger up to what the layers hold: tokens that arrived unseen are recorded as unknown.

        Raises:
            LedgerError: if the layers do not hold the same number of tokens.
        """
        if self._is_moving:
            return  # layers run ahead of the ledger until the forward or operation ends
        lengths = {layer.get_seq_length() for layer in self.editable_layers if layer.is_initialized}
        if len(lengths) > 1:
            raise LedgerError(
                f"The layers hold different numbers of tokens: {sorted(lengths)}. Every layer must be filled or "
                "cropped alike; call cache.reset() and start again."
            )
        length = lengths.pop() if lengths else (0 if self.editable_layers else len(self.ledger))
        if length < len(self.ledger):
            self.ledger = self.ledger.truncated(length)
        batch = self._stored_batch()
        if batch is not None and batch != self.ledger.batch:
            self.ledger = Ledger.empty(batch)
        if length > len(self.ledger):
            valid = torch.ones((self.ledger.batch, length - len(self.ledger)), dtype=torch.bool)
            ids = torch.full(valid.shape, UNKNOWN)
            positions = self.ledger.next_positions(valid)
            self.ledger = self.ledger.extended(ids, positions, valid, Segment("", 0, 0, "unseen"))

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
        ledger, layers = self.ledger, list(self.layers)
        foreign = [(layer, copy.deepcopy(layer.__dict__)) for layer in layers if not isinstance(layer, EditableLayer)]
        undo = Undo(self.editable_layers)
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
            self.ledger = ledger
            raise
        finally:
            undo.detach()
            self._library_forward = False
            self._pending = None
            self.activity = None

    @contextmanager
    def generating(self, model: nn.Module, ids: Any, mask: Any, *, own_positions: bool) -> Iterator[None]:
        """Check a prompt and hold the cache for the time of one ``generate``.

        Raises:
            LedgerError: if the prompt is not a continuation of the cache.
            BusyError: if the cache is in use.
        """
        if self.model is None:
            yield
            return
        self.require_idle("generate")
        self._require_own(model)
        self.adopt()
        self._prompt_length, self._again = None, None
        ledger, undo = self.ledger, Undo([] if self._has_foreign_layers else self.editable_layers)
        if isinstance(ids, Tensor) and len(self.ledger):
            entry.check_batch(self.ledger, ids.shape[0])
            prompt = entry.check_prompt(self.ledger, ids, mask if isinstance(mask, Tensor) else None)
            if prompt.keep < min(len(self.ledger), ids.shape[1]):
                self._again = self.ledger.truncated(ids.shape[1])
            self.crop(prompt.keep - len(self.ledger))
            self._prompt_length = prompt.length
        self.activity, self._own_positions, self._steps = "generate", own_positions, 0
        try:
            yield
        except BaseException:
            self._abandon_pending()
            if not self._has_foreign_layers:
                undo.restore()
                self.ledger = ledger
            raise
        finally:
            undo.detach()
            self.activity, self._again = None, None

    @contextmanager
    def library_forward(self) -> Iterator[None]:
        """Let a forward of the library pass the hooks; the caller keeps the ledger."""
        self._library_forward = True
        try:
            yield
        finally:
            self._library_forward = self._library_runs = False

    # -- called by the hooks

    def begin_forward(self, model: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
        """Check and complete the arguments of a forward; remember how to take it back."""
        if self.model is None:
            return arguments
        if self._library_forward:
            self._library_forward, self._library_runs = False, True  # for this forward only, not for one inside it
            return arguments
        self._require_own(model)
        if self._pending is not None or self._library_runs or self.activity not in (None, "generate"):
            self._refused = True  # the hook after this call must not end the forward that is running
            self.require_idle("forward")
        self.adopt()
        given = arguments.get("input_ids")
        given = given if given is not None else arguments.get("inputs_embeds")
        # within generate, the whole of it is taken back
        alone = self.activity is None or self._has_foreign_layers
        undo, ledger = Undo(self.editable_layers if alone else []), self.ledger
        try:
            if given is not None:
                repeats = entry.check_batch(self.ledger, given.shape[0])
                if repeats > 1:
                    self.batch_repeat_interleave(repeats)
                elif len(self.ledger) == 0:
                    self.ledger = Ledger.empty(given.shape[0])
            generating = self.activity == "generate"
            checked = entry.prepare(
                self.ledger,
                arguments,
                own_positions=self._own_positions and generating,
                prompt_length=self._prompt_length if generating and not self._steps else None,
                again=self._again if generating and not self._steps else None,
            )
        except BaseException:
            undo.restore()
            undo.detach()
            self.ledger = ledger
            raise
        self._pending = _Pending(checked, undo, ledger)
        return checked.arguments

    def end_forward(self, *, succeeded: bool) -> None:
        """Record the tokens of a forward, or take it back."""
        if self._refused:
            self._refused = False
            return
        if self._library_runs or self._pending is None:
            self._library_runs = False
            return
        if not succeeded:
            self._abandon_pending()
            return
        checked, undo, _ = self._pending
        length = len(self.ledger) + checked.ids.shape[1]
        lengths = {layer.get_seq_length() for layer in self.editable_layers if layer.is_initialized}
        if lengths - {length}:
            self._abandon_pending()
            raise LedgerError(
                f"forward: expected every layer to hold {length} tokens afterwards, got {sorted(lengths)}; this model "
                "does not fill its cache token by token, and the cache was put back."
            )
        undo.detach()
        self._pending = None
        origin = "generated" if self.activity == "generate" and self._steps else "prefilled"
        self._steps += 1
        first = 0
        if self._again is not None:  # the last token of the prompt ran again: it keeps its segment and fields
            first, self.ledger = 1, self._again.with_last(checked.ids[:, :1], checked.positions[:, :1])
            self._again = None
        ids, positions, valid = checked.ids[:, first:], checked.positions[:, first:], checked.valid[:, first:]
        if ids.shape[1]:
            self.ledger = self.ledger.extended(ids, positions, valid, Segment("", 0, 0, origin))

    def _abandon_pending(self) -> None:
        if self._pending is not None:
            _, undo, ledger = self._pending
            undo.restore()
            undo.detach()
            self._pending, self.ledger = None, ledger

    def _require_own(self, model: nn.Module) -> None:
        if self.model is not model:
            raise LedgerError(
                f"This cache belongs to another {type(self.model).__name__}, got a forward of a "
                f"{type(model).__name__}: keys and values of one model mean nothing to another. Make a cache for each "
                "model."
            )

    def _stored_batch(self) -> int | None:
        for layer in self.editable_layers:
            if layer.is_initialized and layer.length:
                return int(next(iter(layer.view().values())).shape[0])
        return None

    def _empty_twin(self) -> LedgeredCache:
        twin = type(self).__new__(type(self))
        twin._init_like(self)
        return twin

    def _init_like(self, other: LedgeredCache) -> None:
        """Initialise as an empty cache of the same model and layout."""
        LedgeredCache.__init__(self, other.model)
        if other.model is None:
            self.layer_class_to_replicate = other.layer_class_to_replicate
            self.layers = [
                type(layer)() if isinstance(layer, EditableLayer) else copy.copy(layer) for layer in other.layers
            ]
