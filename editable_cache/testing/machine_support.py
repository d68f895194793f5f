"""What `CacheMachine` is made of besides its rules: attempts, the list's side of field operations, cells by token."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from hypothesis.stateful import RuleBasedStateMachine
from torch import Tensor, nn

from editable_cache.adapters import model_spec
from editable_cache.cache import Ledger
from editable_cache.chunk import KVChunk
from editable_cache.editable import EditableCache
from editable_cache.errors import EditableCacheError
from editable_cache.forward.fields import ERRATUM
from editable_cache.ops import rotate_into, rotation
from editable_cache.testing.cache_model import CacheModel, RefusedError, Span
from editable_cache.testing.contents import same_bits, states_of
from editable_cache.testing.tiny_models import tiny_tokenizer

TOKENIZER = tiny_tokenizer()

Errors = type[Exception] | tuple[type[Exception], ...]


def text_ids(text: str) -> list[int]:
    """Ids of a text in the middle of a context."""
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return ids


class ModelFailure(Exception):  # noqa: N818
    """What `failing` raises."""


@contextmanager
def failing(module: nn.Module) -> Iterator[None]:
    """Let every forward of ``module`` raise, for example that of a model's head, after all layers have run."""

    def fail(*_: Any) -> None:
        raise ModelFailure

    handle = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


class MachineSupport(RuleBasedStateMachine):
    """State and helpers.

    Attributes:
        family: the tiny model to run on, unless ``model`` is given.
        model: any float32 model in evaluation mode with the tiny tokenizer's vocabulary, or None.
        cache: under test.
        perfect: what it should hold.
        before: what it held before the present attempt.
        cells: by number of a token, what its cell held after the last step.
        asides: forks that nobody works on, with what they held.
        saved: the list at each checkpoint of ``cache``.
        steps: how many there were.
        failed: whether the last attempt was refused.
    """

    family: ClassVar[str] = "gemma3"
    model: ClassVar[Any] = None

    runs_on: Any
    cache: EditableCache
    perfect: CacheModel
    before: CacheModel
    chunks: list[KVChunk]
    cells: dict[int, Tensor]
    asides: list[tuple[EditableCache, list[Tensor], Ledger]]
    saved: dict[str, CacheModel]
    steps: int
    failed: bool = False

    def quietly(self, do: Callable[[], object]) -> None:
        """Run without warnings: random edits deserve most of them."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            do()

    def attempt(self, do: Callable[[], object], expected: Callable[[], None], may_fail: Errors = ()) -> None:
        """Let the list say what is right, then let the cache do it, or refuse it and stay as it was.

        Args:
            do: the operation on the cache.
            expected: what it does to the list; it runs first, while the cache is as before.
            may_fail: errors that are right where a segment's text can't be told any more.
        """
        before, self.failed = self.perfect, False
        self.before, self.perfect = before, before.copy()
        try:
            expected()
        except RefusedError:
            self.perfect, self.failed = before, True
            self.expect_refusal(do, EditableCacheError)
            return
        states, ledger = states_of(self.cache), self.cache.ledger
        try:
            self.quietly(do)
        except may_fail:
            self.perfect, self.failed = before, True
            assert same_bits(states_of(self.cache), states)
            assert self.cache.ledger.same(ledger)

    def expect_refusal(self, do: Callable[[], object], errors: Errors) -> None:
        """The operation raises, and the cache stays as it was."""
        states, ledger = states_of(self.cache), self.cache.ledger
        try:
            self.quietly(do)
        except errors:
            pass
        else:
            raise AssertionError("expected a refusal, and the operation was carried out")
        assert same_bits(states_of(self.cache), states)
        assert self.cache.ledger.same(ledger)
        assert self.cache.activity is None

    def span(self, ends: tuple[float, float]) -> Span:
        """A span of slots that is not empty."""
        low, high = sorted(round(end * len(self.perfect)) for end in ends)
        low = min(low, len(self.perfect) - 1)
        return low, max(high, low + 1)

    def name(self, which: int) -> str:
        """One of the fields that the cache has."""
        return self.cache.fields[which % len(self.cache.fields)].name

    # -- the list's side of field operations; the cache is still as before

    def append_line(self, name: str, value: str, *, twice: bool) -> None:
        """``name: value .`` or ``name: value , value .``"""
        self.perfect.append(text_ids(f"{name}:"))
        if twice:
            self.perfect.append(text_ids(f" {value}"), (name, 0))
            self.perfect.append(text_ids(" ,"))
        self.perfect.append(text_ids(f" {value}"), (name, 1))
        self.perfect.append(text_ids(" .\n"))

    def refresh(self, name: str, value: str) -> None:
        """Other tokens for a field, if its value is another."""
        if self.cache.field(name).value != value:
            self.perfect.refresh(name, text_ids(f" {value}"))

    def correct(self, name: str, value: str, *, always: bool = False) -> None:
        """Take trailing errata back; add a line unless the context says the value without it."""
        field = self.cache.field(name)
        self.perfect.append([])  # what was not fed yet stands between an erratum and its successor
        lines = [(erratum.value, self.numbers(erratum.segment)) for erratum in field.errata]
        while lines and lines[-1][1][-1] == self.perfect.tokens[-1].number:
            self.drop(lines.pop()[1])
        current = lines[-1][0] if lines else (value if always else field.value)
        if always or current != value:
            self.perfect.append(text_ids(ERRATUM.replace("{name}", name).replace("{value}", value)))

    def take_errata(self, name: str) -> None:
        """Every correcting line of a field goes."""
        for erratum in self.cache.field(name).errata:
            self.drop(self.numbers(erratum.segment))

    def numbers(self, segment: str) -> list[int]:
        """Numbers of the tokens that a segment of the cache holds, which is still as before the attempt."""
        start, stop = self.cache.segment(segment).span
        return [token.number for token in self.before.tokens[start:stop]]

    def drop(self, numbers: list[int]) -> None:
        """Remove a run of tokens from the list."""
        start = next(slot for slot, token in enumerate(self.perfect.tokens) if token.number == numbers[0])
        assert [token.number for token in self.perfect.tokens[start : start + len(numbers)]] == numbers
        self.perfect.remove(start, start + len(numbers))

    # -- cells

    def cells_now(self) -> list[Tensor]:
        """For each slot its values and its keys turned back to position 0, of all layers, one vector each."""
        if not len(self.perfect):
            return []
        positions = torch.tensor(self.perfect.positions)
        found = []
        for layer, facts in zip(self.cache.editable_layers, model_spec(self.runs_on).layers, strict=True):
            for tensor in facts.tensors:
                states = layer.view()[tensor.name].double()
                if tensor.rotary is not None:
                    out = torch.empty_like(states)
                    rotate_into(out, states, rotation(tensor.rotary, positions, torch.zeros_like(positions)))
                    states = out
                found.append(states[0].transpose(0, 1).flatten(1))
        return list(torch.cat(found, dim=1).unbind(0))
