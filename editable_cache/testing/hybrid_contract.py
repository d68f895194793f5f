"""The contract for a model with recurrent layers: see `adapter_contract`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from editable_cache.adapters import host, measured
from editable_cache.chunk import KVChunk
from editable_cache.editable import EditableCache
from editable_cache.errors import CompatibilityError, UnsupportedModelError
from editable_cache.skill import Skill
from editable_cache.testing import oracles
from editable_cache.testing.contents import (
    cells_in,
    logits_after,
    must_differ,
    recurrent_in,
    same_cells,
    windows_behind,
)
from editable_cache.testing.contract_fixtures import GivenModel
from editable_cache.testing.threaded import named_cells, threaded


class HybridContract(GivenModel):
    """What the library promises where some layers fold all tokens into a state: a chunk composes at the end, every
    other change computes again from the nearest kept state on and is exact.
    """

    tolerance: ClassVar[float] = 1e-4
    positions_given: ClassVar[bool] = True
    """Whether the model takes ``position_ids``."""

    @pytest.fixture
    def texts(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids of a prefix, a chunk and a tail."""
        return ids[:14], ids[14:32], ids[32:]

    @pytest.fixture
    def chunk(self, model: PreTrainedModel, texts: tuple[Tensor, Tensor, Tensor]) -> KVChunk:
        """The chunk, compiled alone."""
        return Skill.precompile(model, None, texts[1], name="chunk")

    @pytest.fixture
    def filled(self, model: PreTrainedModel, ids: Tensor) -> EditableCache:
        """All ids, appended in three parts."""
        cache = EditableCache(model)
        for part in ids.split([14, 18, len(ids) - 32]):
            cache.append(part)
        return cache

    def everything(self, cache: EditableCache) -> dict[str, Tensor]:
        """Cells, states and the next token's logits."""
        return {"logits": cache.next_token_logits(), **cells_in(cache), **recurrent_in(cache)}

    def check_full(self, cache: EditableCache, ids: Tensor) -> None:
        """Cells and states of one and the same number of tokens: those of a plain prefill of ``ids``."""
        assert cache.model is not None
        model: PreTrainedModel = cache.model  # type: ignore[assignment]
        assert cache.token_ids[0].tolist() == ids.tolist()
        assert {holder.length for holder in cache.editable_layers if holder.length} <= {len(ids)}
        plain = oracles.full(model, ids, torch.arange(len(ids)) if self.positions_given else None)
        expected = {"logits": plain.logits[:, -1], **plain.cells, **plain.states}
        oracles.check(self.everything(cache), expected, self.tolerance)

    def test_append_is_full(self, model: PreTrainedModel, ids: Tensor, filled: EditableCache) -> None:
        self.check_full(filled, ids)
        one_less = EditableCache(model)
        one_less.append(ids[:-1])
        must_differ(recurrent_in(one_less), recurrent_in(filled))

    def test_unedited_it_goes_on_as_a_prefill(self, model: PreTrainedModel, ids: Tensor) -> None:
        """Plain forwards against one prefill: a stock cache does not always count its tokens rightly (Bamba)."""
        step, cache = measured(model).step_tokens or 5, EditableCache(model)
        got = [logits_after(model, part, cache) for part in (ids[:14], *ids[14:24].split(step))]
        expected = oracles.full(model, ids[:24], torch.arange(24) if self.positions_given else None)
        oracles.check(torch.cat(got, dim=1), expected.logits, self.tolerance)
        assert cache.token_ids[0].tolist() == ids[:24].tolist()
        prompt, options = ids[None, :9], {"max_new_tokens": 8, "do_sample": False}
        name = host.cache_argument(model)
        mine, theirs = (
            model.generate(prompt, attention_mask=torch.ones_like(prompt), **{name: one}, **options)  # type: ignore[operator]
            for one in (EditableCache(model), DynamicCache(config=model.config))
        )
        assert mine.tolist() == theirs.tolist()

    def test_splice_is_threaded(self, model: PreTrainedModel, texts: tuple[Tensor, ...], chunk: KVChunk) -> None:
        prefix, ids, tail = texts
        recurrence = chunk.recurrence
        assert recurrence is not None
        live = {"head": recurrence.head, "tail": recurrence.tail, "base": 0, "step": measured(model).step_tokens}
        result = threaded(model, *(text[None] for text in texts), **live)  # type: ignore[arg-type]
        expected = {"logits": result.logits[:, -1], **named_cells(result.end)}

        def spliced(chunk: KVChunk) -> dict[str, Tensor]:
            cache = EditableCache(model)
            cache.append(prefix)
            outcome = cache.splice(chunk)
            assert outcome.tokens_computed == recurrence.head + recurrence.tail
            cache.append(tail)
            found = self.everything(cache)
            # sliding layers of a stock cache drop what has left the window
            return {
                n: found[n][..., -t.shape[-2] :, :] if n in cells_in(cache) else found[n] for n, t in expected.items()
            }

        oracles.check(spliced(chunk), expected, self.tolerance)
        alone = {slot: replace(each, form="replace", factor=None) for slot, each in recurrence.transitions.items()}
        windows = windows_behind(model, prefix, ids[: recurrence.head])
        kept = {
            slot: each if each.conv is None else replace(each, conv=windows[slot])
            for slot, each in recurrence.transitions.items()
        }
        for wrong, shows in (
            (alone, any(each.factor is not None for each in recurrence.transitions.values())),
            (kept, any(each.conv is not None for each in recurrence.transitions.values())),
        ):
            if shows:
                changed = replace(chunk, recurrence=replace(recurrence, transitions=wrong))
                must_differ(spliced(changed), expected)
        plain = EditableCache(model)
        plain.append(torch.cat([prefix, ids, tail]))
        must_differ(plain.next_token_logits(), expected["logits"])

    def test_splice_and_generate(self, model: PreTrainedModel, texts: tuple[Tensor, ...], chunk: KVChunk) -> None:
        """Generation behind a splice goes on from cells and states alike: as a fork that is fed by hand."""
        cache = EditableCache(model)
        cache.append(texts[0])
        cache.splice(chunk)
        cache.append(texts[2])
        fork = cache.fork()
        out = model.generate(  # type: ignore[operator]
            **cache.inputs(), **{host.cache_argument(model): cache}, max_new_tokens=4, do_sample=False
        )
        new = out[0, len(torch.cat(list(texts))) :].tolist()
        by_hand = []
        for _ in range(4):
            by_hand.append(int(fork.next_token_logits().argmax()))
            fork.append(torch.tensor(by_hand[-1:]))
        assert new == by_hand

    def test_edits_compute_again_and_are_exact(self, ids: Tensor, filled: EditableCache) -> None:
        stale = recurrent_in(filled)
        three = ids[:3]
        filled.insert(three, 20)
        self.check_full(filled, torch.cat([ids[:20], three, ids[20:]]))
        must_differ(recurrent_in(filled), stale)
        filled.remove((20, 23))
        self.check_full(filled, ids)
        filled.reposition((20, 24), to=26)
        self.check_full(filled, torch.cat([ids[:20], ids[24:30], ids[20:24], ids[30:]]))
        filled.sync(ids)
        self.check_full(filled, ids)
        outcome = filled.recompute((30, len(ids)))
        assert any("recurrent" in note for note in outcome.notes)
        self.check_full(filled, ids)

    def test_a_spliced_chunk_recomputed_is_full(
        self, model: PreTrainedModel, ids: Tensor, texts: tuple[Tensor, ...], chunk: KVChunk
    ) -> None:
        cache = EditableCache(model)
        cache.append(texts[0])
        cache.splice(chunk)
        cache.append(texts[2])
        stale = self.everything(cache)
        cache.recompute((len(texts[0]), len(ids)))
        self.check_full(cache, ids)
        must_differ(stale, self.everything(cache))

    def test_crop_fork_and_rollback(
        self, model: PreTrainedModel, ids: Tensor, filled: EditableCache, chunk: KVChunk
    ) -> None:
        before = {**cells_in(filled), **recurrent_in(filled)}
        fork = filled.fork()
        fork.append(ids[:4])
        fork.crop(-7)
        self.check_full(fork, ids[:-3])
        assert same_cells({**cells_in(filled), **recurrent_in(filled)}, before)
        foreign = replace(chunk, model=replace(chunk.model, weights="0" * len(chunk.model.weights)))
        for refused, error in (
            (lambda: filled.splice(foreign), CompatibilityError),
            (lambda: filled.splice(chunk, at=5), UnsupportedModelError),
            (lambda: filled.splice(replace(chunk, recurrence=None)), CompatibilityError),
            (lambda: filled.extract((2, 5)), UnsupportedModelError),
        ):
            with pytest.raises(error):
                refused()
            assert same_cells({**cells_in(filled), **recurrent_in(filled)}, before)
        self.check_full(filled, ids)
        assert filled.verify().ok

    def test_saved_and_loaded(self, model: PreTrainedModel, ids: Tensor, filled: EditableCache, tmp_path: Path) -> None:
        filled.save_pretrained(tmp_path / "cache")
        loaded = EditableCache.from_pretrained(tmp_path / "cache", model=model)
        assert same_cells({**cells_in(loaded), **recurrent_in(loaded)}, {**cells_in(filled), **recurrent_in(filled)})
        loaded.append(ids[:3])
        self.check_full(loaded, torch.cat([ids, ids[:3]]))
