"""A Hypothesis state machine: random sequences of all operations, held against a perfect model after each step.

Run it on your own model with::

    class MyMachine(CacheMachine):
        model = my_model

    TestMyMachine = MyMachine.TestCase
"""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from torch import Tensor

from editable_cache.editable import EditableCache
from editable_cache.errors import EditableCacheError, FieldError, SpanError
from editable_cache.forward.sync import Plan
from editable_cache.skill import Skill
from editable_cache.testing import strategies
from editable_cache.testing.cache_model import CacheModel
from editable_cache.testing.contents import generated, logits_after, random_ids, same_bits, shared_model, states_of
from editable_cache.testing.machine_support import TOKENIZER, MachineSupport, ModelFailure, failing

LONGEST = 64
"""Slots from which on nothing is added."""

FARTHEST = 1500
"""Largest position that is asked for: further out the model's own angles cost more than the tolerance."""

NAMES = ("status", "channel")

fractions = st.floats(0, 1)
room = precondition(lambda machine: len(machine.perfect) < LONGEST)
filled = precondition(lambda machine: len(machine.perfect) > 1)
with_field = precondition(lambda machine: bool(machine.cache.fields))


class CacheMachine(MachineSupport):
    """Rules are operations; invariants say what must hold after each of them."""

    @initialize(fields=st.integers(0, 2), errata=st.integers(0, 2))
    def start(self, fields: int, errata: int) -> None:
        """A cache, empty or with fields that have errata, and chunks of more than a tiny window and of one token."""
        self.runs_on = self.model if self.model is not None else shared_model(self.family)
        self.cache, self.perfect = EditableCache(self.runs_on, tokenizer=TOKENIZER), CacheModel()
        self.chunks = [Skill.precompile(self.runs_on, None, random_ids(n, n), name="c") for n in (10, 1)]
        self.cells, self.asides, self.saved, self.steps = {}, [], {}, 0
        for name in NAMES[:fields]:
            self.append_fields(name, "pending", twice=name == NAMES[1])
        for number, name in enumerate(NAMES[: min(errata, fields)]):
            self.attempt(
                lambda name=name, number=number: self.cache.erratum(name, f"{number}"),  # type: ignore[misc]
                lambda name=name, number=number: self.correct(name, f"{number}"),  # type: ignore[misc]
            )

    # -- grow

    @room
    @rule(ids=strategies.tokens())
    def append(self, ids: Tensor) -> None:
        self.cache.append(ids)
        self.perfect.append(ids.tolist())

    @room
    @rule(ids=strategies.tokens(3))
    def call_the_model(self, ids: Tensor) -> None:
        logits_after(self.runs_on, ids, self.cache)
        self.perfect.unfed = []
        self.perfect.append(ids.tolist())

    @room
    @rule(name=st.sampled_from(NAMES), value=strategies.values(), twice=st.booleans())
    def append_fields(self, name: str, value: str, twice: bool) -> None:
        if name in [field.name for field in self.cache.fields]:
            return
        before = f"{name}:" if not twice else f"{name}: {{{name}}} ,"
        self.quietly(lambda: self.cache.append(f"{before} {{{name}}} .\n", fields={name: value}))
        self.append_line(name, value, twice=twice)

    @room
    @rule(which=st.integers(0, 9), at=fractions | st.none(), seam=st.integers(0, 2))
    def splice(self, which: int, at: float | None, seam: int) -> None:
        chunk = self.chunks[which % len(self.chunks)]
        slot = None if at is None else round(at * len(self.perfect))
        name = self.cache.ledger.free_name("spliced")
        self.attempt(
            lambda: self.cache.splice(chunk, slot, seam_tokens=seam, name=name),
            lambda: self.perfect.insert(chunk.token_ids.tolist(), len(self.perfect) if slot is None else slot),
        )

    @room
    @rule(ids=strategies.tokens(), at=fractions)
    def insert(self, ids: Tensor, at: float) -> None:
        slot = round(at * len(self.perfect))
        self.attempt(lambda: self.cache.insert(ids, slot), lambda: self.perfect.insert(ids.tolist(), slot))

    @room
    @filled
    @rule(count=st.integers(1, 3), ids=strategies.tokens(2) | st.just(torch.empty(0, dtype=torch.int64)))
    def generate(self, count: int, ids: Tensor) -> None:
        sequence, _ = generated(self.runs_on, self.cache, ids, count)
        if not len(ids) and not self.perfect.unfed:
            self.perfect.recompute([len(self.perfect) - 1])  # the last token runs again
        self.perfect.unfed = []
        self.perfect.append(sequence[len(self.perfect) : -1].tolist())
        self.perfect.unfed = sequence[-1:].tolist()

    # -- rearrange

    @filled
    @rule(ends=st.tuples(fractions, fractions), close_gap=st.booleans())
    def remove(self, ends: tuple[float, float], close_gap: bool) -> None:
        start, stop = self.span(ends)
        self.attempt(
            lambda: self.cache.remove((start, stop), close_gap=close_gap),
            lambda: self.perfect.remove(start, stop, close_gap=close_gap),
        )

    @filled
    @rule(ends=st.tuples(fractions, fractions), to=fractions)
    def reposition(self, ends: tuple[float, float], to: float) -> None:
        start, stop = self.span(ends)
        slot = round(to * (len(self.perfect) - (stop - start)))
        self.attempt(
            lambda: self.cache.reposition((start, stop), to=slot), lambda: self.perfect.move(start, stop, slot)
        )

    @filled
    @rule(ends=st.tuples(fractions, fractions), position=st.integers(0, FARTHEST))
    def reposition_in_place(self, ends: tuple[float, float], position: int) -> None:
        start, stop = self.span(ends)
        self.cache.reposition((start, stop), position=position)
        self.perfect.shift(start, stop, position)

    @filled
    @rule(ends=st.tuples(fractions, fractions))
    def extract(self, ends: tuple[float, float]) -> None:
        start, stop = self.span(ends)
        chunk = self.cache.extract((start, stop))
        assert chunk.token_ids.tolist() == self.perfect.ids[start:stop]
        assert chunk.position_ids.tolist() == self.perfect.positions[start:stop]
        consecutive = chunk.position_ids.tolist() == list(range(int(chunk.position_ids[0]), stop - start))
        if not chunk.provenance.note and consecutive and self.perfect.positions[:start] == list(range(start)):
            self.chunks = [*self.chunks[:2], chunk]  # one that can be run again, to check it once it is spliced

    @filled
    @rule(count=st.integers(0, 5))
    def crop(self, count: int) -> None:
        count = min(count, len(self.perfect) - 1)
        self.cache.crop(-count)
        self.perfect.crop(count)

    # -- edit

    @with_field
    @rule(which=st.integers(0, 9), value=strategies.values())
    def refresh_field(self, which: int, value: str) -> None:
        name = self.name(which)
        self.attempt(
            lambda: self.cache.refresh_field(name, value), lambda: self.refresh(name, value), may_fail=FieldError
        )

    @room
    @with_field
    @rule(which=st.integers(0, 9), value=strategies.values())
    def erratum(self, which: int, value: str) -> None:
        name = self.name(which)
        self.attempt(lambda: self.cache.erratum(name, value), lambda: self.correct(name, value))

    @room
    @with_field
    @rule(
        which=st.integers(0, 9),
        value=strategies.values(),
        method=st.sampled_from(["field+erratum", "erratum", "in_place", "suffix", "selective", "hoist", "full"]),
    )
    def edit(self, which: int, value: str, method: Any) -> None:
        name = self.name(which)
        field = self.cache.field(name)

        def expected() -> None:
            if method != "in_place":
                self.perfect.append([])
            if field.current == field.value == value and method in ("field+erratum", "erratum", "in_place"):
                return
            if method in ("suffix", "selective", "hoist", "full"):
                self.take_errata(name)
            if method == "hoist":
                self.drop(self.numbers(field.segment))
                self.append_line(name, value, twice=len(field.spans) > 1)
            elif method != "erratum":
                self.refresh(name, value)
            if "erratum" in method:
                self.correct(name, value, always=method != "erratum")
            self.perfect.recompute(range(len(self.perfect)))

        self.attempt(lambda: self.cache.edit(name, value, method=method), expected, may_fail=(FieldError, SpanError))

    @with_field
    @rule()
    def consolidate(self) -> None:
        corrected = [field for field in self.cache.fields if field.errata]

        def expected() -> None:
            if corrected:
                self.perfect.append([])
            for field in corrected:
                self.take_errata(field.name)
                self.refresh(field.name, field.current)
            self.perfect.recompute(range(len(self.perfect)) if corrected else [])

        self.attempt(self.cache.consolidate, expected, may_fail=(FieldError, SpanError))
        assert not corrected or self.failed or not any(field.errata for field in self.cache.fields)

    @filled
    @rule(seed=st.integers(0, 99), share=fractions, by_layer=st.booleans())
    def recompute(self, seed: int, share: float, by_layer: bool) -> None:
        shape = (len(self.cache.layers), len(self.perfect)) if by_layer else (len(self.perfect),)
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
        self.cache.recompute(mask)
        self.perfect.recompute((mask.any(dim=0) if by_layer else mask).nonzero()[:, 0].tolist())

    @rule(ids=strategies.tokens(20), keep=fractions, approximate=st.booleans())
    def sync(self, ids: Tensor, keep: float, approximate: bool) -> None:
        kept = self.perfect.ids[: round(keep * len(self.perfect))]
        behind = self.perfect.ids[len(kept) + 1 :][: LONGEST - len(kept)]
        content = [*kept, *ids.tolist(), *behind]
        plan = self.cache.sync(content, dry_run=True, approximate=approximate)
        assert isinstance(plan, Plan)
        self.cache.sync(content, approximate=approximate)
        if plan.exact:  # the common prefix stays where it is
            pairs = zip(self.perfect.ids, content, strict=False)
            common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            self.perfect.crop(len(self.perfect) - common)
            self.perfect.unfed = []
            self.perfect.append(content[common:])
        else:  # a new list; which fields survive is the cache's to say
            common = len(plan.runs[0]) if plan.runs[0].start == plan.runs[0].old_start else 0
            prefix = [replace(token, field=None) for token in self.perfect.tokens[:common]]
            self.perfect, self.cells = CacheModel(prefix), {}
            self.perfect.append(content[common:])
            tokens = self.perfect.tokens
            for field in self.cache.fields:
                for index, (start, stop) in enumerate(field.spans):
                    tokens[start:stop] = [replace(token, field=(field.name, index)) for token in tokens[start:stop]]

    # -- time

    @rule(stay=st.booleans())
    def fork(self, stay: bool) -> None:
        twin = self.cache.fork()
        aside, self.cache = (twin, self.cache) if stay else (self.cache, twin)
        self.saved = self.saved if stay else {}
        self.asides = [*self.asides[-2:], (aside, states_of(aside), aside.ledger)]

    @rule(name=st.sampled_from(["a", "b"]))
    def checkpoint(self, name: str) -> None:
        self.cache.checkpoint(name)
        self.saved[name] = self.perfect.copy()

    @precondition(lambda machine: bool(machine.saved))
    @rule(which=st.integers(0, 9))
    def rollback(self, which: int) -> None:
        name = sorted(self.saved)[which % len(self.saved)]
        self.cache.rollback(name)
        self.perfect, self.cells = self.saved[name].copy(), {}

    @filled
    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.cache.save_pretrained(folder)
            loaded = EditableCache.from_pretrained(folder, model=self.runs_on, tokenizer=TOKENIZER)
        assert same_bits(states_of(loaded), states_of(self.cache))
        assert loaded.ledger.same(self.cache.ledger)
        self.cache, self.saved = loaded, {}

    @filled
    @rule(token=strategies.tokens(1))
    def equal_futures(self, token: Tensor) -> None:
        twins = [copy.deepcopy(self.cache), self.cache.fork()]
        logits = [logits_after(self.runs_on, token, twin) for twin in twins]
        assert torch.equal(*logits)
        assert same_bits(*map(states_of, twins))
        assert twins[0].ledger.same(twins[1].ledger)

    @rule(which=st.integers(0, 99))
    def fail(self, which: int) -> None:
        """Operations that no cache can carry out."""
        length, cache = len(self.perfect), self.cache
        operations: list[Callable[[], object]] = [
            lambda: cache.remove((length, length + 1)),
            lambda: cache.remove("nobody"),
            lambda: cache.splice(self.chunks[0], length + 1),
            lambda: cache.splice(self.chunks[0], seam_tokens=-1),
            lambda: cache.splice(replace(self.chunks[0], model=replace(self.chunks[0].model, weights="others"))),
            lambda: cache.insert([5], -1),
            lambda: cache.reposition((0, length + 1), to=0),
            lambda: cache.recompute(torch.ones(length + 1, dtype=torch.bool)),
            lambda: cache.refresh_field("nobody", "x"),
            lambda: cache.erratum("nobody", "x"),
            lambda: cache.append("x: {x} .", fields={"y": "1"}),
            lambda: cache.append("the {x}d", fields={"x": "refun"}),
            lambda: cache.sync([]),
            lambda: cache.rollback("nobody"),
            lambda: cache.append([10**6]),
        ]
        self.expect_refusal(operations[which % len(operations)], (EditableCacheError, IndexError))

    @filled
    @rule(which=st.integers(0, 99), at=fractions, value=strategies.values())
    def fail_half_way(self, which: int, at: float, value: str) -> None:
        """The model raises when all layers have been written."""
        cache, slot = self.cache, round(at * (len(self.perfect) - 1))
        mask = torch.zeros(len(self.perfect), dtype=torch.bool)
        mask[slot] = mask[0] = True
        operations: list[Callable[[], object]] = [
            lambda: cache.append([5, 6, 7]),
            lambda: cache.recompute(mask),
            lambda: cache.recompute((slot, len(self.perfect))),
            lambda: cache.insert([5, 6, 7], slot),
            lambda: cache.splice(self.chunks[0], slot),
            lambda: cache.splice(self.chunks[0]),
            lambda: cache.sync([*self.perfect.ids[:slot], 299]),
            lambda: logits_after(self.runs_on, torch.tensor([5, 6]), cache),
            lambda: generated(self.runs_on, cache, torch.tensor([5]), 2),
            lambda: cache.next_token_logits(),
        ]
        for field in cache.fields:
            operations += [
                lambda name=field.name: cache.edit(name, value + " 7", method="suffix"),  # type: ignore[misc]
                lambda name=field.name: cache.edit(name, value + " 7", method="hoist"),  # type: ignore[misc]
                lambda name=field.name: cache.refresh_field(name, value + " 7"),  # type: ignore[misc]
            ]
        with failing(self.runs_on.get_output_embeddings()):
            self.expect_refusal(operations[which % len(operations)], (EditableCacheError, ModelFailure))

    # -- what must hold

    @invariant()
    def ids_and_positions_are_those_of_the_list(self) -> None:
        assert self.cache.token_ids[0].tolist() == self.perfect.ids
        assert self.cache.positions[0].tolist() == self.perfect.positions
        assert {layer.get_seq_length() for layer in self.cache.editable_layers} == {len(self.perfect)}
        assert self.cache.get_seq_length() == len(self.perfect)

    @invariant()
    def segments_cover_everything_once(self) -> None:
        segments, at = self.cache.segments, 0
        assert len({segment.name for segment in segments}) == len(segments)
        for segment in segments:
            assert segment.start == at < segment.stop
            at = segment.stop
        assert at == len(self.perfect)

    @invariant()
    def fields_say_their_value(self) -> None:
        names = {token.field[0] for token in self.perfect.tokens if token.field is not None}
        assert {field.name for field in self.cache.fields} == names
        for field in self.cache.fields:
            assert list(field.spans) == self.perfect.spans_of(field.name)
            for start, stop in field.spans:
                assert str(TOKENIZER.decode(self.perfect.ids[start:stop])).strip() == field.value

    @invariant()
    def cells_follow_their_tokens(self) -> None:
        """What was not computed anew holds what it held, its key turned to its place."""
        cells = self.cells_now()
        now = {token.number: cell for token, cell in zip(self.perfect.tokens, cells, strict=True)}
        for number in now.keys() & self.cells.keys() - self.perfect.computed:
            assert torch.allclose(now[number], self.cells[number], rtol=0, atol=2e-4 * float(now[number].abs().max()))
        self.cells, self.perfect.computed = now, set()

    @invariant()
    def oracles_hold(self) -> None:
        if len(self.perfect):
            verification = self.cache.verify()
            assert verification.ok, str(verification)

    @invariant()
    def forks_stay_as_they_were(self) -> None:
        self.steps += 1
        if self.steps % 3 == 0:  # often, so that every operation meets shared storage
            twin = self.cache.fork()
            self.asides = [*self.asides[-2:], (twin, states_of(twin), twin.ledger)]
        for aside, states, ledger in self.asides:
            assert same_bits(states_of(aside), states)
            assert aside.ledger.same(ledger)
