"""A forward's way through a cache: checked at its entry, recorded at its end, taken back if it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from editable_cache.adapters import measured
from editable_cache.cache import entry
from editable_cache.cache.ledger import Ledger, Segment
from editable_cache.cache.lengths import lengthened, shortened
from editable_cache.cache.sight import Opening, open_generate
from editable_cache.cache.undo import Undo
from editable_cache.errors import LedgerError, UnsupportedModelError

if TYPE_CHECKING:
    from editable_cache.cache.ledgered import LedgeredCache
    from editable_cache.cache.stored import States


class _Running(NamedTuple):
    """A forward under way: what will be recorded, and how to take it back."""

    checked: entry.Entry
    undo: Undo
    before: _Before


class _Before(NamedTuple):
    """What a cache knew beside its layers before a forward that repeats its rows."""

    ledger: Ledger
    unfed: Tensor | None
    marks: dict[int, States]

    @classmethod
    def of(cls, cache: LedgeredCache) -> _Before:
        return cls(cache.ledger, cache.unfed, dict(cache.marks))

    def restore(self, cache: LedgeredCache) -> None:
        cache.ledger, cache.unfed, cache.marks = self.ledger, self.unfed, self.marks


class Passage:
    """What one cache knows about the forward, or the ``generate``, that is using it.

    It keeps no reference to its cache, which must be free to die as soon as its last user lets go.
    """

    def __init__(self) -> None:
        self._running: _Running | None = None
        self._library_next = False  # the next forward is the library's own
        self._library_runs = False
        self._refused = False  # the hook after a refused forward must not end the one that is running
        self._opening: Opening | None = None
        self._prompt: Tensor | None = None  # of a generate that was given the whole sequence
        self._again: Ledger | None = None  # up to the end of a prompt that the cache covers: its last token runs again
        self._steps = 0

    @property
    def busy(self) -> bool:
        """Whether a forward is changing the layers now."""
        return self._running is not None or self._library_runs

    def forget(self) -> None:
        """Drop every mark; nothing is taken back."""
        self._running = None
        self._refused = self._library_next = self._library_runs = False

    @contextmanager
    def library_forward(self) -> Iterator[None]:
        """Let one forward of the library pass unrecorded; the caller keeps the ledger."""
        self._library_next = True
        try:
            yield
        finally:
            self._library_next = self._library_runs = False

    @contextmanager
    def generating(
        self, cache: LedgeredCache, ids: Any, mask: Any, arguments: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Check a prompt and hold the cache for the time of one ``generate``; on an exception all of it is taken back.

        Yields:
            The arguments to call it with: images that the cache covers are left out.

        Raises:
            LedgerError: if the prompt is not a continuation of the cache, or has other images.
        """
        self._prompt, self._again = None, None
        before, prompt = _Before.of(cache), None
        if isinstance(ids, Tensor) and len(cache.ledger):
            entry.check_batch(cache.ledger, ids.shape[0])
            prompt = entry.check_prompt(cache.ledger, ids, mask if isinstance(mask, Tensor) else None)
        opening = Opening(arguments, None, 0, own_positions=arguments.get("position_ids") is None)
        if isinstance(ids, Tensor) and cache.model is not None:
            keep = 0 if prompt is None else prompt.keep
            whole = prompt is None or prompt.length is not None
            opening = open_generate(cache.model, cache.ledger, ids, arguments, keep, whole=whole)
        undo = Undo(*([], []) if cache.has_foreign_layers else (cache.editable_layers, cache.state_layers))
        cache.activity, self._opening, self._steps = "generate", opening, 0
        try:
            cache.mark(len(cache.ledger))
            if prompt is not None:
                if prompt.keep < min(len(cache.ledger), ids.shape[1]):
                    self._again = shortened(cache.ledger, ids.shape[1], cache.model)
                cache.crop(prompt.keep - len(cache.ledger))
                self._prompt = ids.detach().cpu() if prompt.length is not None else None
            yield opening.arguments
        except BaseException:
            self.abandon(cache)
            if not cache.has_foreign_layers:
                undo.restore()
                before.restore(cache)
                cache.dirty = None
            raise
        finally:
            undo.detach()
            cache.activity, self._again, self._opening = None, None, None

    def begin(self, cache: LedgeredCache, arguments: dict[str, Any]) -> dict[str, Any]:
        """Check and complete the arguments of a forward.

        Raises:
            BusyError: if another forward or operation is using the cache.
            LedgerError: if ids, mask or batch disagree with the cache.
        """
        cache.own_states()
        if self._library_next:
            self._library_next, self._library_runs = False, True  # for this forward only, not for one inside it
            return arguments
        generating = cache.activity == "generate"
        if self.busy or not (generating or cache.activity is None):
            self._refused = True
            cache.require_idle("forward")
        cache.adopt()
        given = arguments.get("input_ids")
        given = given if given is not None else arguments.get("inputs_embeds")
        if not len(cache.ledger) and not generating:
            cache.require_same_weights("forward")
        # within generate, the whole of it is taken back
        alone = not generating or cache.has_foreign_layers
        undo, before = Undo(*(cache.editable_layers, cache.state_layers) if alone else ([], [])), _Before.of(cache)
        first = generating and not self._steps
        try:
            if given is not None:
                repeats = entry.check_batch(cache.ledger, given.shape[0])
                if repeats > 1:
                    cache.batch_repeat_interleave(repeats)
                elif len(cache.ledger) == 0:
                    cache.ledger = replace(Ledger.empty(given.shape[0]), open_gap=cache.ledger.open_gap)
            checked = entry.prepare(
                cache.ledger,
                arguments,
                own_positions=self._opening is not None and self._opening.own_positions,
                prompt_length=self._prompt.shape[1] if first and self._prompt is not None else None,
                again=self._again if first else None,
                model=cache.model,
                opening=self._opening,
            )
            if generating and self._prompt is not None:
                entry.check_continuation(cache.ledger, checked.ids, self._prompt)
            require_steps(cache, int(checked.ids.shape[1]))
        except BaseException:
            undo.restore()
            undo.detach()
            before.restore(cache)
            raise
        self._running = _Running(checked, undo, before)
        if cache.only_states and len(cache.ledger) and bool(checked.valid.all()):
            return {**checked.arguments, "attention_mask": None}  # Mamba scales the new tokens by any mask
        return checked.arguments

    def end(self, cache: LedgeredCache, *, succeeded: bool) -> None:
        """Record the tokens of a forward, or take it back.

        Raises:
            LedgerError: if the layers did not grow by exactly the new tokens.
        """
        if self._refused:
            self._refused = False
            return
        if self._library_runs or self._running is None:
            self._library_runs = False
            return
        if not succeeded:
            self.abandon(cache)
            return
        checked = self._running.checked
        length = len(cache.ledger) + checked.ids.shape[1]
        lengths = {layer.get_seq_length() for layer in cache.editable_layers if layer.is_initialized}
        if lengths - {length}:
            self.abandon(cache)
            raise LedgerError(
                f"forward: expected every layer to hold {length} tokens afterwards, got {sorted(lengths)}; this model "
                "does not fill its cache token by token, and the cache was put back."
            )
        self._running.undo.detach()
        self._running = None
        cache.ledger, cache.unfed = self._recorded(cache, checked), None
        self._steps += 1

    def abandon(self, cache: LedgeredCache) -> None:
        """Take back the forward that is under way, if there is one."""
        if self._running is not None:
            _, undo, before = self._running
            undo.restore()
            undo.detach()
            self._running = None
            before.restore(cache)

    def _recorded(self, cache: LedgeredCache, checked: entry.Entry) -> Ledger:
        ledger, first = cache.ledger, 0
        if self._again is not None:  # the last token of the prompt ran again: it keeps its segment and fields
            ledger, first = self._again.with_last(checked.ids[:, :1], checked.positions[:, :1]), 1
            self._again = None
        ids, positions, valid = checked.ids[:, first:], checked.positions[:, first:], checked.valid[:, first:]
        if not ids.shape[1]:
            return ledger
        axes, images = checked.axes[:, first:], checked.images[:, first:]
        origin = "generated" if cache.activity == "generate" and self._steps else "prefilled"
        segment = Segment("", 0, 0, origin, grows=True)
        longer = ledger.extended(ids, positions, valid, segment, axes=axes, images=images, digests=checked.digests)
        return lengthened(longer, len(ledger), cache.model)


def require_steps(cache: LedgeredCache, count: int) -> None:
    """Refuse a forward of more tokens than the model continues a recurrent state with rightly.

    Raises:
        UnsupportedModelError: with the number that it can take.
    """
    if not cache.state_layers or not len(cache.ledger) or count <= 1 or cache.model is None:
        return
    most = measured(cache.model).step_tokens
    if most is not None and count > most:
        raise UnsupportedModelError(
            f"forward: this {type(cache.model).__name__} continues a recurrent state wrongly when it is fed {count} "
            f"tokens at once (measured; {most} at a time is right). Feed them with cache.append(text), which goes step "
            "by step, and generate from cache.inputs()."
        )


def require_own(cache: LedgeredCache, model: nn.Module) -> None:
    """Refuse a forward of another model.

    Raises:
        LedgerError: naming both.
    """
    if cache.model is not model:
        raise LedgerError(
            f"This cache belongs to another {type(cache.model).__name__}, got a forward of a {type(model).__name__}: "
            "keys and values of one model mean nothing to another. Make a cache for each model."
        )
