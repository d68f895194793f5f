"""Field reports, class 10: aliasing and memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from cache_support import Snapshot, generate, make_cache, make_context, policy, shared_model, shared_tokenizer, some_ids

from editable_cache import EditableCache, KVChunk, Skill
from editable_cache.testing.tiny_models import tiny_model


def bits(chunk: KVChunk) -> list[Any]:
    return [chunk.token_ids.clone(), chunk.position_ids.clone(), *(t.clone() for s in chunk.layers for t in s.values())]


def same(chunk: KVChunk, kept: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(bits(chunk), kept, strict=True))


def test_b54_a_skill_is_never_written() -> None:
    """MemTensor/MemOS#2301, #2359; huggingface/transformers#37078: the stored object grows every turn."""
    for dtype in (torch.float32, torch.bfloat16):
        model = shared_model("llama", dtype=dtype)
        skill = Skill.precompile(model, shared_tokenizer(), "If the order is pending.\n", name="s")
        kept, digest = bits(skill), skill.digest
        first, second = (EditableCache(model, tokenizer=shared_tokenizer()) for _ in range(2))
        first.append(some_ids(3)[0])
        for turn in range(5):
            for cache in (first, second):
                cache.splice(skill, name=f"turn {turn}", seam_tokens=turn % 2)
                generate(cache, cache.inputs(some_ids(2)[0])["input_ids"], model=model)
                cache.recompute(f"turn {turn}")
                cache.reposition(f"turn {turn}", position=len(cache.ledger) + 50)
            before = Snapshot(second)
            first.append(some_ids(2)[0])
            first.layers[0].view()["keys"].mul_(1.5)
            before.check(second)
        assert same(skill, kept)
        assert skill.digest == digest
        assert len(skill) == len(kept[0])


def test_b54_a_spliced_first_skill_shares_nothing_with_the_cache() -> None:
    """MemTensor/MemOS#2301: the first splice into an empty cache is the one that is tempted to alias."""
    for at in (None, 0):
        cache, skill = make_cache(), policy()
        kept = bits(skill)
        cache.splice(skill, at=at, seam_tokens=0)
        for layer in cache.layers:
            layer.keys.zero_()
            layer.values.zero_()
        assert same(skill, kept)


def test_b54_an_extracted_chunk_is_a_copy() -> None:
    """huggingface/transformers#37078: what is handed out must not follow the cache."""
    cache = make_context()
    chunk = cache.extract("order")
    kept = bits(chunk)
    cache.edit("status", "delivered now")
    cache.remove("question")
    cache.layers[0].keys.zero_()
    assert same(chunk, kept)


def test_b54_sliced_chunks_splice_as_copies() -> None:
    """MemTensor/MemOS#2359: slices share storage with their chunk, caches with neither."""
    chunk = policy().slice(2, 8)
    kept = bits(policy())
    cache = make_cache()
    cache.splice(chunk, seam_tokens=0)
    cache.layers[1].values.zero_()
    assert same(policy(), kept)


def test_b55_gradients_on_while_compiling(tmp_path: Any) -> None:
    """huggingface/transformers#32681, #32929, #32159: deepcopy fails on non-leaf tensors, a graph is kept."""
    model = tiny_model("llama")
    assert torch.is_grad_enabled()
    skill = Skill.precompile(model, shared_tokenizer(), "If the order", name="s")
    assert not any(t.requires_grad or t.grad_fn for s in skill.layers for t in s.values())
    skill.save_pretrained(tmp_path)
    assert Skill.from_pretrained(tmp_path).equal_cells(skill)
    cache = EditableCache(model, tokenizer=shared_tokenizer())
    cache.splice(skill)
    model(some_ids(3), cache=cache)  # now the cells do carry a graph
    twin = copy.deepcopy(cache)
    assert not any(layer.keys.requires_grad for layer in twin.layers)
    chunk = cache.extract((0, len(cache.ledger)), name="all")
    assert not any(t.requires_grad for s in chunk.layers for t in s.values())
    cache.save_pretrained(tmp_path / "cache")
    assert EditableCache.from_pretrained(tmp_path / "cache", model=model).ledger.same(cache.ledger)


def test_forks_in_any_order_never_see_each_other() -> None:
    """MemTensor/MemOS#2301, design section 5: branches share storage until one writes, whoever writes first."""
    base = make_context()
    kept = Snapshot(base)
    forks = [base.fork() for _ in range(3)]
    grand = forks[0].fork()
    forks[0].append("one")
    forks[1].edit("status", "delivered")
    generate(forks[2], forks[2].inputs("ok")["input_ids"])
    snapshots = [Snapshot(cache) for cache in forks]
    kept.check(grand)
    grand.remove("policy")
    base.append("two")
    base.reset()
    for cache, snapshot in zip(forks, snapshots, strict=True):
        snapshot.check(cache)
        assert cache.verify().ok
    assert grand.verify().ok


def test_a_fork_is_edited_while_its_parent_generates() -> None:
    """MemTensor/MemOS#2359: one context must not move another, even in the middle of `generate`."""
    parent, reference = make_context(), make_context()
    fork = parent.fork()
    ids = parent.inputs("asked")["input_ids"]
    expected = generate(reference, ids, max_new_tokens=8)
    values = ["delivered", "refund it now", "pending"]

    def edit(_: Any, scores: Any) -> Any:
        edit.step = getattr(edit, "step", 0) + 1  # type: ignore[attr-defined]
        fork.refresh_field("status", values[edit.step % 3])  # type: ignore[attr-defined]
        fork.append("and")
        return scores

    actual = generate(parent, ids, max_new_tokens=8, logits_processor=[edit])
    assert torch.equal(actual.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(actual.logits, expected.logits, strict=True))
    assert parent.verify().ok
    assert fork.verify().ok
    assert edit.step == 8  # type: ignore[attr-defined]
