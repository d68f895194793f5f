"""The adapter contract: inherit, say which model, and get the tests.

    class TestMyModel(AdapterContract):
        @pytest.fixture
        def model(self):
            return load_my_model()  # float32, evaluation mode, eager or sdpa attention; each test asks: keep it

What a model can't do is said by a flag of the class, and a test shows that it is then refused. For a model with
recurrent layers inherit `hybrid_contract.HybridContract`, for one whose cells can't be moved `RefusalContract`. Needs
pytest (the `testing` extra).
"""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from editable_cache.adapters import host, identify, model_spec
from editable_cache.chunk import KVChunk
from editable_cache.editable import EditableCache
from editable_cache.errors import CompatibilityError, SpanError, UnsupportedModelError
from editable_cache.skill import Skill
from editable_cache.spec import ModelSpec
from editable_cache.testing import oracles, parts
from editable_cache.testing.contents import cells_in, generated, layers_of, logits_after, must_differ, same_cells
from editable_cache.testing.contract_fixtures import GivenModel
from editable_cache.testing.refusal_contract import RefusalContract

__all__ = ["AdapterContract", "RefusalContract"]


class AdapterContract(GivenModel):
    """What the library promises for a supported model. Override ``model``, and where needed ``ids`` and the flags."""

    tolerance: ClassVar[float] = 1e-4
    rotates: ClassVar[bool] = True
    """Whether anything that it stores rotates with the position."""
    positions_given: ClassVar[bool] = True
    """Whether it takes ``position_ids``; if not, its positions are the slots of its cache."""
    recomputes_cells: ClassVar[bool] = True
    """Whether it honours masks over chosen cells."""

    @pytest.fixture
    def spec(self, model: PreTrainedModel) -> ModelSpec:
        """What the self-test proves."""
        return model_spec(model)

    @pytest.fixture
    def texts(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids of a prefix, a chunk that is longer than the tail, and a tail."""
        cut = len(ids) // 4
        return ids[:cut], ids[cut : 3 * cut], ids[3 * cut :]

    @pytest.fixture
    def chunk(self, model: PreTrainedModel, texts: tuple[Tensor, Tensor, Tensor]) -> KVChunk:
        """The chunk, compiled alone."""
        return Skill.precompile(model, None, texts[1], name="chunk")

    @pytest.fixture
    def cache(self, model: PreTrainedModel, texts: tuple[Tensor, Tensor, Tensor], chunk: KVChunk) -> EditableCache:
        """Prefix and chunk, no seam."""
        cache = EditableCache(model)
        cache.append(texts[0])
        cache.splice(chunk, seam_tokens=0)
        return cache

    def full(self, model: PreTrainedModel, ids: Tensor) -> oracles.OracleResult:
        """FULL."""
        return oracles.full(model, ids, torch.arange(len(ids)) if self.positions_given else None)

    def test_self_test_proves_every_layer(self, model: PreTrainedModel, spec: ModelSpec) -> None:
        assert len(spec.layers) == len(EditableCache(model).editable_layers)
        assert spec.worst_error <= self.tolerance
        assert (not spec.against_recompute) == self.recomputes_cells
        assert (spec.positions == "given") == self.positions_given
        assert bool(spec.rotaries()) == self.rotates

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

    def test_iso(self, model: PreTrainedModel, texts: tuple[Tensor, ...], cache: EditableCache) -> None:
        prefix, chunk, _ = texts
        if not self.positions_given:
            with pytest.raises(SpanError, match="slots"):
                cache.reposition("chunk", position=600)
            return  # FROZEN compares the cells at the only positions that there are
        for first in (len(prefix), 600):
            cache.reposition("chunk", position=first)
            places = torch.arange(len(chunk)) + first
            oracles.check(cells_in(cache, len(prefix)), oracles.iso(model, chunk, places).cells, self.tolerance)
            must_differ(cells_in(cache, len(prefix)), oracles.iso(model, chunk, places + 1).cells)

    def test_frozen(self, model: PreTrainedModel, ids: Tensor, texts: tuple[Tensor, ...], cache: EditableCache) -> None:
        expected = parts.frozen(model, texts, given=self.positions_given)
        got = logits_after(model, texts[2], cache)
        oracles.check(got, expected.logits[:, -len(texts[2]) :], self.tolerance)
        oracles.check(cells_in(cache), expected.cells, self.tolerance)
        must_differ(got, self.full(model, ids).logits[:, -len(texts[2]) :])

    def test_frozen_through_generate(
        self, model: PreTrainedModel, texts: tuple[Tensor, ...], cache: EditableCache
    ) -> None:
        sequence, logits = generated(model, cache, texts[2], 4)
        rest = sequence[len(texts[0]) + len(texts[1]) :]
        expected = parts.frozen(model, (*texts[:2], rest), given=self.positions_given)
        oracles.check(logits, expected.logits[:, -5:-1], self.tolerance)

    @pytest.mark.parametrize("by_layer", [False, True], ids=["tokens", "layers"])
    def test_cells(self, model: PreTrainedModel, cache: EditableCache, by_layer: bool) -> None:
        cache.append(cache.token_ids[0, :5].flip(0))
        length = len(cache.token_ids[0])
        before, layers = cells_in(cache), layers_of(cache)
        mask = torch.rand((len(layers), length), generator=torch.Generator().manual_seed(1)) < 0.3
        mask[:, length // 4 : length // 4 + 3] = True  # where the chunk did not see what precedes it
        if not by_layer:
            mask[:] = mask[0]
        wanted = mask if by_layer else mask[0]
        if not self.recomputes_cells:
            with pytest.raises(UnsupportedModelError):
                cache.recompute(wanted)
            assert same_cells(cells_in(cache), before)
            return
        places = cache.positions[0] if self.positions_given else None
        expected = oracles.layer_cells(model, cache.token_ids[0], places, layers, mask)
        cache.recompute(wanted)
        oracles.check(cells_in(cache), expected.cells, self.tolerance)
        must_differ(cells_in(cache), before)
        for layer_idx, (now, then) in enumerate(zip(layers_of(cache), layers, strict=True)):
            for name in then:
                assert torch.equal(now[name][..., ~mask[layer_idx], :], then[name][..., ~mask[layer_idx], :])

    def test_full(self, model: PreTrainedModel, ids: Tensor, texts: tuple[Tensor, ...], cache: EditableCache) -> None:
        cache.append(texts[2])
        expected = self.full(model, ids)
        must_differ(cells_in(cache), expected.cells)
        cache.recompute((0, len(ids)))
        oracles.check(cells_in(cache), expected.cells, self.tolerance)
        oracles.check(logits_after(model, ids[:1], cache.fork()), self.after(model, ids, ids[:1]), self.tolerance)
        cache.sync(ids[: len(ids) // 2])
        cache.sync(ids)
        oracles.check(cells_in(cache), expected.cells, self.tolerance)

    def after(self, model: PreTrainedModel, ids: Tensor, more: Tensor) -> Tensor:
        """Logits of ``more`` behind ``ids``, from a plain prefill."""
        return self.full(model, torch.cat([ids, more])).logits[:, len(ids) :]

    def test_removal_keeps_contents(self, model: PreTrainedModel, ids: Tensor, spec: ModelSpec) -> None:
        """Everything starts three positions further on, so that the removal of three tokens brings the rest home."""
        cache, home = EditableCache(model), self.full(model, ids).span(13).cells
        cache.append(ids)
        if self.positions_given:
            cache.reposition((0, len(ids)), position=3)
            if self.rotates:
                must_differ(cells_in(cache, 13), home)
        before = cells_in(cache)
        cache.remove((10, 13))
        assert cache.token_ids[0].tolist() == [*ids[:10].tolist(), *ids[13:].tolist()]
        oracles.check(cells_in(cache, 0, 10), {name: t[..., :10, :] for name, t in before.items()}, self.tolerance)
        if self.positions_given or not self.rotates:
            oracles.check(cells_in(cache, 10), home, self.tolerance)
        still = {
            f"layer {layer.layer_idx} {tensor.name}"
            for layer in spec.layers
            for tensor in layer.tensors
            if tensor.rotary is None and not tensor.counter
        }
        for name in still & before.keys():
            assert torch.equal(cells_in(cache, 10)[name], before[name][..., 13:, :])

    def test_insertion_keeps_contents(self, model: PreTrainedModel, ids: Tensor) -> None:
        cache = EditableCache(model)
        cache.append(ids)
        before = cells_in(cache)
        if not self.recomputes_cells:
            with pytest.raises(UnsupportedModelError):
                cache.insert(ids[:3], 10)
            assert same_cells(cells_in(cache), before)
            return
        cache.insert(ids[:3], 10)
        if self.positions_given:
            shifted = oracles.iso(model, ids, torch.arange(len(ids)) + 3)
            oracles.check(cells_in(cache, 13), shifted.span(10).cells, self.tolerance)
        cache.remove((10, 13))
        oracles.check(cells_in(cache), before, self.tolerance)

    def test_verify_judges(self, cache: EditableCache) -> None:
        if not self.recomputes_cells:
            pytest.skip("verify runs the last token again over chosen cells")
        assert cache.verify().ok
        cache.append(cache.token_ids[0, :4])
        assert cache.verify().ok
        last = max(i for i, holder in enumerate(cache.editable_layers) if holder.length)
        for slot in (1, 12, -1):  # live, isolated, last
            broken = copy.deepcopy(cache)
            for tensor in broken.editable_layers[last].view().values():
                tensor[..., slot, :] += 1
            assert not broken.verify().ok, slot

    def test_a_fork_goes_its_own_way(
        self, model: PreTrainedModel, cache: EditableCache, texts: tuple[Tensor, ...]
    ) -> None:
        before, fork = cells_in(cache), cache.fork()
        fork.append(texts[2])
        fork.recompute((0, 3) if self.recomputes_cells else (3, len(fork.token_ids[0])))
        fork.remove((6, 9))
        assert same_cells(cells_in(cache), before)
        twin = copy.deepcopy(cache)
        assert torch.equal(logits_after(model, texts[2], twin), logits_after(model, texts[2], cache))

    def test_other_weights_are_refused(self, model: PreTrainedModel, chunk: KVChunk) -> None:
        other = copy.deepcopy(model)
        with torch.no_grad():
            next(other.parameters()).mul_(1.01)
        cache = EditableCache(other)
        cache.append(chunk.token_ids[:3])
        before = cells_in(cache)
        with pytest.raises(CompatibilityError) as refusal:
            cache.splice(chunk)
        assert [reason.what for reason in refusal.value.reasons] == ["weights"]
        assert same_cells(cells_in(cache), before)

    def test_other_frequencies_are_another_model(self, model: PreTrainedModel, chunk: KVChunk) -> None:
        """A table that was changed in place: the chunk is refused, and the changed model is measured anew."""
        other = copy.deepcopy(model)
        tables = [buffer for name, buffer in other.named_buffers() if name.endswith("inv_freq")]
        if not self.rotates or not tables:
            pytest.skip("no table of frequencies among its buffers")
        for table in tables:
            table.mul_(0.5)
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
                monkeypatch.setattr(module, "forward", _doubled(module.forward), raising=True)
                patched += 1
        if not self.rotates or not patched:
            pytest.skip("no table of frequencies among its buffers")
        with pytest.raises(UnsupportedModelError) as refusal:
            model_spec(other)
        assert any(reason.what.startswith("layer") for reason in refusal.value.reasons)
        cache = EditableCache(other)
        with pytest.raises(UnsupportedModelError):
            Skill.precompile(other, None, [5, 6, 7], name="x")
        assert len(cache.token_ids[0]) == 0


def _doubled(forward: object) -> object:
    """A rotary module's forward at twice the positions, which is twice every frequency."""

    def doubled(x: Tensor, position_ids: Tensor, *args: object, **kwargs: object) -> object:
        return forward(x, 2 * position_ids, *args, **kwargs)  # type: ignore[operator]

    return doubled
