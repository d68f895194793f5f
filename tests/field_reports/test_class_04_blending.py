"""Field reports, class 4: chunk blending and partial recompute."""

from __future__ import annotations

import pytest
import torch
from cache_support import Snapshot, make_cache, shared_model, some_ids
from torch import Tensor

from editable_cache import EditableCache, Skill
from editable_cache.testing import oracles


def chunk(seed: int, count: int = 7) -> Skill:
    return Skill.precompile(shared_model(), None, some_ids(count, seed=seed)[0], name=f"chunk{seed}")


def keys_of(cache: EditableCache) -> list[Tensor]:
    return [layer.view()["keys"] for layer in cache.editable_layers]


def values_of(cache: EditableCache) -> list[Tensor]:
    return [layer.view()["values"] for layer in cache.editable_layers]


@pytest.mark.parametrize("order", [(3, 1, 2), (1, 1), (2,)])
def test_b21_known_chunks_in_another_order_and_nothing_new(order: tuple[int, ...]) -> None:
    """LMCache/LMCache#938, #854, #1875: blending assumed at least one token that is not cached."""
    model, cache = shared_model(), make_cache()
    for place, seed in enumerate(order):
        cache.splice(chunk(seed), seam_tokens=0, name=f"at {place}")
    ids = cache.token_ids[0]
    groups = torch.arange(len(order)).repeat_interleave(7) + 1
    # no token is live: the last one asks again, seeing everything
    held = cache.fork()
    logits = held.next_token_logits()
    expected = oracles.cells(
        model, ids, cache.positions, keys_of(cache), values_of(cache), torch.zeros(len(ids), dtype=torch.bool)
    )
    oracles.check(logits, expected.logits[:, -1])
    oracles.check(keys_of(cache), oracles.frozen(model, ids, cache.positions, groups).keys)
    cache.recompute((0, len(ids)))
    full = oracles.full(model, ids)
    oracles.check(keys_of(cache), full.keys)
    oracles.check(cache.next_token_logits(), full.logits[:, -1])
    if len(order) > 1:
        with pytest.raises(AssertionError):  # control: FROZEN is not FULL
            oracles.check(logits, full.logits[:, -1])


def test_b22_scattered_rows_do_not_see_the_future() -> None:
    """LMCache/LMCache#1152: bottom-right causal alignment with few queries and many keys."""
    cache = make_cache()
    cache.append(some_ids(15)[0])
    before = Snapshot(cache)
    cache.recompute([(2, 3), (9, 10)])
    oracles.check(keys_of(cache), [kept["keys"] for kept in before.layers], 1e-5)
    for layer in cache.editable_layers:
        layer.view()["values"][..., 12, :] += 10
    cache.recompute((2, 3))
    for layer, kept in zip(cache.editable_layers, before.layers, strict=True):
        assert torch.allclose(layer.view()["keys"][..., 2, :], kept["keys"][..., 2, :], atol=1e-5)
    cache.recompute((13, 14))  # control: a later token does see it
    deep = cache.editable_layers[2].view()["keys"][..., 13, :]
    assert not torch.allclose(deep, before.layers[2]["keys"][..., 13, :], atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_b23_which_cells_are_written(family: str) -> None:
    """LMCache/LMCache#2918: cells outside of the mask changed, or cells inside of it did not."""
    model, cache = shared_model(family), make_cache(family)
    cache.append(some_ids(6)[0])
    cache.splice(Skill.precompile(model, None, some_ids(9, seed=4)[0], name="c"), seam_tokens=0)
    cache.append(some_ids(5, seed=5)[0])
    mask = torch.rand(len(cache.layers), 20, generator=torch.Generator().manual_seed(0)) < 0.3
    before = Snapshot(cache)
    expected = oracles.cells(
        model,
        cache.token_ids,
        cache.positions,
        [kept["keys"] for kept in before.layers],
        [kept["values"] for kept in before.layers],
        mask,
    )
    cache.recompute(mask)
    for idx, layer in enumerate(cache.editable_layers):
        kept, now = before.layers[idx]["keys"], layer.view()["keys"]
        assert torch.equal(now[..., ~mask[idx], :], kept[..., ~mask[idx], :])
    oracles.check(keys_of(cache), expected.keys)
    oracles.check(values_of(cache), expected.values)
    assert cache.verify().ok
    cache.recompute(torch.zeros_like(mask))
    oracles.check(keys_of(cache), expected.keys, 0.0 + 1e-4)
    cache.recompute(torch.ones_like(mask))
    oracles.check(keys_of(cache), oracles.full(model, cache.token_ids).keys)
    assert not cache.ledger.stale
    assert cache.verify().ok


def test_b25_local_and_absolute_coordinates() -> None:
    """LMCache/LMCache-Ascend#282; LMCache/LMCache#3217: suffix-local indices on whole-sequence tensors."""
    outcomes = []
    for form in ("local", "absolute", "name"):
        cache = make_cache()
        cache.append(some_ids(6)[0], name="prefix")
        cache.splice(chunk(2, 8), seam_tokens=0, name="c")
        cache.append(some_ids(4, seed=7)[0])
        prefix = [k[..., :6, :].clone() for k in keys_of(cache)]
        where = {"local": cache.segment("c").slots(0, 8), "absolute": (6, 14), "name": "c"}[form]
        assert cache.recompute(where).tokens_computed == 8
        for now, old in zip(keys_of(cache), prefix, strict=True):
            assert torch.equal(now[..., :6, :], old)
        full = oracles.full(shared_model(), cache.token_ids)
        oracles.check([k[..., :14, :] for k in keys_of(cache)], [k[..., :14, :] for k in full.keys])
        outcomes.append([k.clone() for k in keys_of(cache)])
        assert [(s.start, s.stop) for s in cache.ledger.stale] == [(14, 18)]  # they had read the old chunk
        assert cache.verify().ok
        cache.recompute((14, 18))
        oracles.check(keys_of(cache), full.keys)
        assert not cache.ledger.stale
    for other in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], other, strict=True))


def test_b26_a_chunk_remembers_what_it_had_seen() -> None:
    """LMCache/LMCache#922, #1291: nobody can tell whether a stored chunk saw its neighbours."""
    cache = make_cache()
    cache.append(some_ids(6)[0], name="a")
    cache.append(some_ids(8, seed=3)[0], name="b")
    cut, alone = cache.extract("b", name="b"), chunk(3, 8)
    assert torch.equal(cut.token_ids, alone.token_ids)
    assert cut.provenance.how == "extracted"
    assert cut.provenance.prefix_ids == tuple(some_ids(6)[0].tolist())
    assert alone.provenance.how == "precompiled"
    assert cut.digest != alone.digest
    assert not torch.allclose(cut.layers[2]["values"], alone.layers[2]["values"], atol=1e-2)
    for piece in (cut, alone):
        other = make_cache()
        other.append(some_ids(9, seed=5)[0])
        note = other.splice(piece, seam_tokens=0, name="b").segment.note
        assert note == ("extracted behind 6 tokens" if piece is cut else "precompiled alone")
        assert other.verify().ok
    assert alone.slice(2, 5).provenance.prefix_ids == tuple(alone.token_ids[:2].tolist())


def test_b27_a_wrong_rotation_is_caught() -> None:
    """LMCache/LMCache#4666: nothing compares with a recompute; a doubled theta must not pass."""
    from editable_cache import UnsupportedModelError
    from editable_cache.testing.tiny_models import tiny_model

    model = tiny_model("llama")
    rotary = model.model.rotary_emb
    plain = type(rotary).forward

    class Patched(type(rotary)):
        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = plain(self, x, position_ids * position_ids)  # not a rotation by position any more
            return cos, sin

    rotary.__class__ = Patched
    with pytest.raises(UnsupportedModelError) as caught:
        Skill.precompile(model, None, some_ids(5)[0], name="x")
    assert any("layer" in reason.what for reason in caught.value.reasons)
