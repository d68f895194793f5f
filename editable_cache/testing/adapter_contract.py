"""The adapter contract: inherit, say which model, and get the tests.

    class TestMyModel(AdapterContract):
        @pytest.fixture
        def model(self):
            return load_my_model()  # float32, evaluation mode, eager or sdpa attention; each test asks: keep it

For a model that must be refused inherit `RefusalContract` instead. Needs pytest (the `testing` extra).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from editable_cache.adapters import host, identify, model_spec
from editable_cache.chunk import KVChunk
from editable_cache.editable import EditableCache
from editable_cache.errors import CompatibilityError, UnsupportedModelError
from editable_cache.skill import Skill
from editable_cache.spec import ModelSpec
from editable_cache.testing import oracles
from editable_cache.testing.contents import (
    generated,
    halves,
    logits_after,
    must_differ,
    same_bits,
    states_in,
    states_of,
)


class _Given:
    """What a contract is given: a model, and ids that it knows."""

    num_ids: ClassVar[int] = 40
    """How many ids the tests may use; more than twice the sliding window, at least 40."""

    @pytest.fixture
    def model(self) -> PreTrainedModel:
        """The model under contract, float32, in evaluation mode; no test changes it."""
        raise NotImplementedError("give the contract a model: override the fixture `model`")

    @pytest.fixture
    def ids(self, model: PreTrainedModel) -> Tensor:
        """Random ids, int64 ``[num_ids]``."""
        size = int(model.config.get_text_config().vocab_size)
        return torch.randint(5, size, (self.num_ids,), generator=torch.Generator().manual_seed(3))


class AdapterContract(_Given):
    """What the library promises for a supported model. Override ``model``, and where needed ``ids``."""

    tolerance: ClassVar[float] = 1e-4

    @pytest.fixture
    def spec(self, model: PreTrainedModel) -> ModelSpec:
        """What the self-test proves."""
        return model_spec(model)

    @pytest.fixture
    def parts(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids of a prefix, a chunk that is longer than the tail, and a tail."""
        cut = len(ids) // 4
        return ids[:cut], ids[cut : 3 * cut], ids[3 * cut :]

    @pytest.fixture
    def chunk(self, model: PreTrainedModel, parts: tuple[Tensor, Tensor, Tensor]) -> KVChunk:
        """The chunk, compiled alone."""
        return Skill.precompile(model, None, parts[1], name="chunk")

    @pytest.fixture
    def cache(self, model: PreTrainedModel, parts: tuple[Tensor, Tensor, Tensor], chunk: KVChunk) -> EditableCache:
        """Prefix and chunk, no seam."""
        cache = EditableCache(model)
        cache.append(parts[0])
        cache.splice(chunk, seam_tokens=0)
        return cache

    def test_self_test_proves_every_layer(self, model: PreTrainedModel, spec: ModelSpec) -> None:
        assert len(spec.layers) == len(EditableCache(model).layers)
        assert spec.worst_error <= self.tolerance
        assert spec.mask_form != "none"
        assert spec.rotaries()

    def test_unedited_it_is_a_dynamic_cache(self, model: PreTrainedModel, ids: Tensor) -> None:
        cache, stock = EditableCache(model), DynamicCache(config=model.config)
        got, expected = [], []
        for part in (ids[:-3], ids[-3:-2], ids[-2:]):
            got.append(logits_after(model, part, cache))
            expected.append(logits_after(model, part, stock))
        oracles.check(torch.cat(got, dim=1), torch.cat(expected, dim=1), 1e-5)
        prompt, options = ids[None, :9], {"max_new_tokens": 12, "do_sample": False}
        name = host.cache_argument(model)
        caches = EditableCache(model), DynamicCache(config=model.config)
        mine, theirs = (
            model.generate(prompt, attention_mask=torch.ones_like(prompt), **{name: one}, **options)  # type: ignore[operator]
            for one in caches
        )
        assert mine.tolist() == theirs.tolist()
        assert caches[0].token_ids.tolist() == mine[:, :-1].tolist()

    def test_iso(self, model: PreTrainedModel, parts: tuple[Tensor, Tensor, Tensor], cache: EditableCache) -> None:
        prefix, chunk, _ = parts
        for first in (len(prefix), 600):
            cache.reposition("chunk", position=first)
            places = torch.arange(len(chunk)) + first
            oracles.check(states_of(cache, len(prefix)), states_in(oracles.iso(model, chunk, places)), self.tolerance)
            must_differ(states_of(cache, len(prefix)), states_in(oracles.iso(model, chunk, places + 1)))

    def test_frozen(self, model: PreTrainedModel, ids: Tensor, parts: tuple[Tensor, ...], cache: EditableCache) -> None:
        prefix, chunk, tail = parts
        groups = torch.zeros(len(ids))
        groups[len(prefix) : len(prefix) + len(chunk)] = 1
        expected = oracles.frozen(model, ids, torch.arange(len(ids)), groups)
        got = logits_after(model, tail, cache)
        oracles.check(got, expected.logits[:, -len(tail) :], self.tolerance)
        oracles.check(states_of(cache), states_in(expected), self.tolerance)
        must_differ(got, oracles.full(model, ids).logits[:, -len(tail) :])

    def test_frozen_through_generate(
        self, model: PreTrainedModel, parts: tuple[Tensor, ...], cache: EditableCache
    ) -> None:
        prefix, chunk, tail = parts
        sequence, logits = generated(model, cache, tail, 4)
        groups = torch.zeros(len(sequence))
        groups[len(prefix) : len(prefix) + len(chunk)] = 1
        expected = oracles.frozen(model, sequence, torch.arange(len(sequence)), groups)
        oracles.check(logits, expected.logits[:, -5:-1], self.tolerance)

    @pytest.mark.parametrize("by_layer", [False, True], ids=["tokens", "layers"])
    def test_cells(self, model: PreTrainedModel, cache: EditableCache, by_layer: bool) -> None:
        cache.append(cache.token_ids[0, :5].flip(0))
        length, layers = len(cache.token_ids[0]), len(cache.layers)
        before, shape = states_of(cache), (layers, length) if by_layer else (length,)
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.3
        mask[..., length // 4 : length // 4 + 3] = True  # where the chunk did not see what precedes it
        expected = oracles.cells(model, cache.token_ids[0], cache.positions[0], *halves(before), mask)
        cache.recompute(mask)
        oracles.check(states_of(cache), states_in(expected), self.tolerance)
        must_differ(states_of(cache), before)
        for now, then in zip(halves(states_of(cache)), halves(before), strict=True):
            for layer, (a, e) in enumerate(zip(now, then, strict=True)):
                outside = ~(mask[layer] if by_layer else mask)
                assert torch.equal(a[..., outside, :], e[..., outside, :])

    def test_full(self, model: PreTrainedModel, ids: Tensor, parts: tuple[Tensor, ...], cache: EditableCache) -> None:
        cache.append(parts[2])
        expected = oracles.full(model, ids)
        must_differ(states_of(cache), states_in(expected))
        cache.recompute((0, len(ids)))
        oracles.check(states_of(cache), states_in(expected), self.tolerance)
        oracles.check(cache.next_token_logits(), expected.logits[:, -1], self.tolerance)
        cache.sync(ids[: len(ids) // 2])
        cache.sync(ids)
        oracles.check(states_of(cache), states_in(expected), self.tolerance)

    def test_removal_and_insertion_keep_contents(self, model: PreTrainedModel, ids: Tensor) -> None:
        cache = EditableCache(model)
        cache.append(ids)
        before = states_of(cache)
        cache.insert(ids[:3], 10)
        shifted = oracles.iso(model, ids, torch.arange(len(ids)) + 3)
        oracles.check(states_of(cache, 13), states_in(shifted, 10), self.tolerance)
        cache.remove((10, 13))
        oracles.check(states_of(cache), before, self.tolerance)
        assert same_bits(halves(states_of(cache))[1], halves(before)[1])

    def test_verify_judges(self, model: PreTrainedModel, cache: EditableCache) -> None:
        assert cache.verify().ok
        cache.append(cache.token_ids[0, :4])
        assert cache.verify().ok
        for slot in (1, 12, -1):  # live, isolated, last
            broken = copy.deepcopy(cache)
            for name in ("keys", "values"):
                broken.editable_layers[-1].view()[name][..., slot, :] += 1.0
            assert not broken.verify().ok, slot

    def test_a_fork_goes_its_own_way(self, cache: EditableCache, parts: tuple[Tensor, ...]) -> None:
        before, fork = states_of(cache), cache.fork()
        fork.append(parts[2])
        fork.recompute((0, 3))
        fork.remove((6, 9))
        assert same_bits(states_of(cache), before)
        twin = copy.deepcopy(cache)
        assert cache.model is not None
        assert torch.equal(logits_after(cache.model, parts[2], twin), logits_after(cache.model, parts[2], cache))  # type: ignore[arg-type]

    def test_other_weights_are_refused(self, model: PreTrainedModel, chunk: KVChunk) -> None:
        other = copy.deepcopy(model)
        with torch.no_grad():
            next(other.parameters()).mul_(1.01)
        cache = EditableCache(other)
        cache.append(chunk.token_ids[:3])
        before = states_of(cache)
        with pytest.raises(CompatibilityError) as refusal:
            cache.splice(chunk)
        assert [reason.what for reason in refusal.value.reasons] == ["weights"]
        assert same_bits(states_of(cache), before)

    def test_other_frequencies_are_another_model(self, model: PreTrainedModel, chunk: KVChunk) -> None:
        """A table that was changed in place: the chunk is refused, and the changed model is measured anew."""
        other = copy.deepcopy(model)
        for name, buffer in other.named_buffers():
            if name.endswith("inv_freq"):
                buffer.mul_(0.5)
        assert identify(other).rotary != identify(model).rotary
        cache = EditableCache(other)
        cache.append(chunk.token_ids[:3])
        with pytest.raises(CompatibilityError) as refusal:
            cache.splice(chunk)
        assert "rotary" in [reason.what for reason in refusal.value.reasons]
        assert model_spec(other).rotaries() != model_spec(model).rotaries()

    def test_frequencies_that_are_not_the_models_own_are_caught(
        self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The tables say one thing and the forward does another: nothing may be moved by the tables."""
        other = copy.deepcopy(model)
        patched = 0
        for module in other.modules():
            if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
                forward = module.forward
                monkeypatch.setattr(module, "forward", _doubled(forward), raising=True)
                patched += 1
        assert patched
        with pytest.raises(UnsupportedModelError) as refusal:
            model_spec(other)
        assert any("keys" in reason.what for reason in refusal.value.reasons)
        cache = EditableCache(other)
        with pytest.raises(UnsupportedModelError):
            Skill.precompile(other, None, [5, 6, 7], name="x")
        assert len(cache.token_ids[0]) == 0


def _doubled(forward: object) -> object:
    """A rotary module's forward at twice the positions, which is twice every frequency."""

    def doubled(x: Tensor, position_ids: Tensor, *args: object, **kwargs: object) -> object:
        return forward(x, 2 * position_ids, *args, **kwargs)  # type: ignore[operator]

    return doubled


class RefusalContract(_Given):
    """What the library promises for a model whose cells it can't move: a refusal first, and a plain cache after."""

    def test_refusal_has_reasons_and_changes_nothing(self, model: PreTrainedModel, ids: Tensor) -> None:
        cache = EditableCache(model)
        logits_after(model, ids[:9], cache)
        before, ledger, history = copy.deepcopy(cache), cache.ledger, list(cache.history)
        operations: list[Callable[[], object]] = [
            lambda: model_spec(model),
            lambda: Skill.precompile(model, None, ids[:4], name="x"),
            lambda: cache.remove((5, 7)),
            lambda: cache.insert(ids[:2], 3),
            lambda: cache.reposition((2, 4), to=5),
            lambda: cache.reposition((2, 4), position=50),
            lambda: cache.recompute((2, 4)),
        ]
        for operation in operations:
            with pytest.raises(UnsupportedModelError) as refusal:
                operation()
            assert refusal.value.reasons or "plain" in str(refusal.value)
            assert cache.ledger.same(ledger)
            assert cache.history == history
        assert refusal.value.reasons or not cache.editable_layers
        with pytest.raises(UnsupportedModelError) as refusal:
            model_spec(model)
        assert refusal.value.reasons
        assert all(reason.what and reason.got for reason in refusal.value.reasons)
        assert torch.equal(logits_after(model, ids[9:12], before), logits_after(model, ids[9:12], cache))

    def test_it_stays_a_plain_cache(self, model: PreTrainedModel, ids: Tensor) -> None:
        cache, stock = EditableCache(model), DynamicCache(config=model.config)
        for part in (ids[:9], ids[9:10], ids[10:11]):
            oracles.check(logits_after(model, part, cache), logits_after(model, part, stock), 1e-5)
        assert cache.token_ids[0].tolist() == ids[:11].tolist()
        prompt, options = ids[None, :9], {"max_new_tokens": 6, "do_sample": False}
        name = host.cache_argument(model)
        mine, theirs = (
            model.generate(prompt, attention_mask=torch.ones_like(prompt), **{name: one}, **options)  # type: ignore[operator]
            for one in (EditableCache(model), DynamicCache(config=model.config))
        )
        assert mine.tolist() == theirs.tolist()
        appended = EditableCache(model)
        appended.append(ids[:9])
        oracles.check(
            logits_after(model, ids[9:10], appended),
            oracles.full(model, ids[:10]).logits[:, -1:] if appended.editable_layers else logits_of(model, ids[:10]),
        )


def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Last logits of a plain forward without a cache, ``[1, 1, vocab]``."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids[None], use_cache=False).logits
    return logits[:, -1:]
