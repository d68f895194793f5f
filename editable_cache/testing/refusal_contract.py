"""The contract for a model whose cells can't be moved: see `adapter_contract`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from editable_cache.adapters import host, model_spec
from editable_cache.editable import EditableCache
from editable_cache.errors import UnsupportedModelError
from editable_cache.skill import Skill
from editable_cache.testing import oracles
from editable_cache.testing.contents import cells_in, layers_of, logits_after, must_differ, same_cells
from editable_cache.testing.contract_fixtures import GivenModel


class RefusalContract(GivenModel):
    """What the library promises for a model whose cells it can't move: moves are refused with reasons, and all that
    needs no move works.
    """

    tolerance: ClassVar[float] = 1e-4
    positions_given: ClassVar[bool] = True
    """Whether the model takes ``position_ids``."""

    @pytest.fixture
    def tokenizer(self) -> Any:
        """A tokenizer whose ids the model knows, or None: then fields are not tested."""
        return None

    def positions(self, cache: EditableCache) -> Tensor | None:
        """Positions of all slots, as an oracle wants them."""
        return cache.positions[0] if self.positions_given else None

    def test_refusal_has_reasons_and_changes_nothing(self, model: PreTrainedModel, ids: Tensor) -> None:
        cache = EditableCache(model)
        logits_after(model, ids[:9], cache)
        before, ledger, history = copy.deepcopy(cache), cache.ledger, list(cache.history)
        operations: list[Callable[[], object]] = [
            lambda: model_spec(model),
            lambda: Skill.precompile(model, None, ids[:4], name="x"),
            lambda: cache.splice(cache.extract((2, 5))),
            lambda: cache.remove((5, 7)),
            lambda: cache.insert(ids[:2], 3),
            lambda: cache.reposition((2, 4), to=5),
            lambda: cache.reposition((2, 4), position=50),
        ]
        for operation in operations:
            with pytest.raises(UnsupportedModelError) as refusal:
                operation()
            assert refusal.value.reasons
            assert all(reason.what and reason.got for reason in refusal.value.reasons)
            assert cache.ledger.same(ledger)
            assert cache.history == history
            assert same_cells(cells_in(cache), cells_in(before))
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

    def test_append_is_full(self, model: PreTrainedModel, ids: Tensor) -> None:
        cache = EditableCache(model)
        for start in range(0, len(ids), 12):
            cache.append(ids[start : start + 12])
        expected = oracles.full(model, ids, self.positions(cache))
        oracles.check(cells_in(cache), expected.cells, self.tolerance)
        oracles.check(cache.next_token_logits(), expected.logits[:, -1], self.tolerance)
        must_differ(cells_in(cache), oracles.full(model, ids.flip(0), self.positions(cache)).cells)

    @pytest.mark.parametrize("by_layer", [False, True], ids=["tokens", "layers"])
    def test_cells_and_full(self, model: PreTrainedModel, ids: Tensor, by_layer: bool) -> None:
        cache = EditableCache(model)
        cache.append(ids)
        for holder in cache.editable_layers:
            stored = holder.view(8)
            noise = {n: t + torch.randn(t.shape, generator=torch.Generator().manual_seed(4)) for n, t in stored.items()}
            holder.overwrite(slice(8, len(ids)), noise)
        before, layers = cells_in(cache), layers_of(cache)
        mask = torch.rand((len(layers), len(ids)), generator=torch.Generator().manual_seed(1)) < 0.3
        if not by_layer:
            mask[:] = mask[0]
        expected = oracles.layer_cells(model, ids, self.positions(cache), layers, mask)
        cache.recompute(mask if by_layer else mask[0])
        oracles.check(cells_in(cache), expected.cells, self.tolerance)
        must_differ(cells_in(cache), before)
        cache.recompute((8, len(ids)))
        oracles.check(cells_in(cache), oracles.full(model, ids, self.positions(cache)).cells, self.tolerance)

    def test_fields_are_edited_in_place_and_by_errata(self, model: PreTrainedModel, tokenizer: Any) -> None:
        if tokenizer is None:
            pytest.skip("no tokenizer for this model")
        cache = EditableCache(model, tokenizer=tokenizer)
        cache.append("You are a support agent.\norder_status: {status} .\n", fields={"status": "1 2"})
        cache.append("The agent may refund it.\n")
        before, layers, ids = cells_in(cache), layers_of(cache), cache.token_ids[0].clone()
        start, stop = cache.field("status").spans[0]
        with pytest.raises(UnsupportedModelError):  # more tokens would move the tail
            cache.refresh_field("status", "1 2 3 4 5")
        assert same_cells(cells_in(cache), before)
        assert torch.equal(cache.token_ids[0], ids)
        cache.refresh_field("status", "3 4")
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[start:stop] = True
        expected = oracles.layer_cells(model, cache.token_ids[0], self.positions(cache), layers, mask)
        oracles.check(cells_in(cache), expected.cells, self.tolerance)
        must_differ(cells_in(cache), before)
        cache.erratum("status", "5 6")
        cache.recompute(slice(start, None))
        after = oracles.full(model, cache.token_ids[0], self.positions(cache))
        oracles.check(cells_in(cache), after.cells, self.tolerance)
