"""Field reports, class 1: the phase of a key does not match its slot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cache_support import make_cache, refused, shared_model, shared_tokenizer, some_ids

from editable_cache import ContextWarning, EditableCache, Skill, SpanError
from editable_cache.adapters import model_spec, probe
from editable_cache.ops import rotate_into, rotation
from editable_cache.testing import oracles, zoo


def chunk_of(family: str, count: int = 7, seed: int = 3) -> Skill:
    return Skill.precompile(shared_model(family), None, some_ids(count, seed=seed)[0], name="chunk")


def cells(cache: EditableCache, start: int, stop: int) -> tuple[list[Any], list[Any]]:
    layers = [layer.view() for layer in cache.editable_layers]
    return [v["keys"][..., start:stop, :] for v in layers], [v["values"][..., start:stop, :] for v in layers]


def check_iso(family: str, cache: EditableCache, ids: Any, start: int) -> None:
    stop = start + len(ids)
    expected = oracles.iso(shared_model(family), ids, cache.positions[0, start:stop])
    keys, values = cells(cache, start, stop)
    oracles.check(keys, expected.keys, what="keys")
    oracles.check(values, expected.values, what="values")
    off = oracles.iso(shared_model(family), ids, cache.positions[0, start:stop] + 1)
    with pytest.raises(AssertionError):  # control: one position off must show
        oracles.check(keys, off.keys, what="keys")


def test_b01_two_copies_of_a_chunk() -> None:
    """MemTensor/MemOS#2315: fragments merged by plain concatenation keep the phase 0..n."""
    cache, chunk = make_cache(), chunk_of("llama")
    cache.append(some_ids(5)[0])
    cache.splice(chunk, seam_tokens=0, name="first")
    cache.splice(chunk, seam_tokens=0, name="second")
    first, second = cells(cache, 5, 12), cells(cache, 12, 19)
    assert torch.equal(first[1][0], second[1][0])
    assert not torch.equal(first[0][0], second[0][0])
    for start in (5, 12):
        check_iso("llama", cache, chunk.token_ids, start)


@pytest.mark.parametrize("family", ["gemma3", "llama", "gpt_neox", "phi", "cohere", "glm", "smollm3"])
def test_b02_several_bases(family: str) -> None:
    """ggml-org/llama.cpp#12357: one base for all layers turns Gemma 3 to gibberish on the first shift."""
    cache, chunk = make_cache(family), chunk_of(family)
    cache.append(some_ids(5)[0])
    cache.splice(chunk, seam_tokens=0)
    cache.reposition("chunk", position=42)
    check_iso(family, cache, chunk.token_ids, 5)


def test_b02_swapped_bases_would_show() -> None:
    """ggml-org/llama.cpp#12357, control: with the other layer type's frequencies the same test fails."""
    model, chunk = shared_model("gemma3"), chunk_of("gemma3")
    spec = model_spec(model)
    low, high = spec.rotaries()
    assert low.inv_freq != high.inv_freq
    expected = oracles.iso(model, chunk.token_ids, torch.arange(37, 44))
    for right in (True, False):
        errors = []
        for states, facts, wanted in zip(chunk.layers, spec.layers, expected.keys, strict=True):
            rotary = facts.tensors[0].rotary
            rotary = rotary if right else {low: high, high: low}[rotary]
            moved = torch.empty_like(states["keys"])
            rotate_into(moved, states["keys"], rotation(rotary, torch.arange(7), torch.arange(37, 44)))
            errors.append(oracles.relative_error(moved, wanted))
        assert (max(errors) < 1e-4) is right


def test_b03_latent_attention() -> None:
    """ggml-org/llama.cpp#8498, #8862, #10401: DeepSeek's `keys` hold the latent, which must not be rotated."""
    model, chunk, cache = shared_model("deepseek_v3"), chunk_of("deepseek_v3"), make_cache("deepseek_v3")
    cache.append(some_ids(5)[0])
    cache.splice(chunk, seam_tokens=0)
    before = [t.clone() for t in cells(cache, 5, 12)[0]]
    cache.reposition("chunk", position=35)
    assert all(torch.equal(old, new) for old, new in zip(before, cells(cache, 5, 12)[0], strict=True))
    places = torch.arange(35, 42)
    expected = oracles.iso(model, chunk.token_ids, places)
    oracles.check(cells(cache, 5, 12)[1], expected.values, what="rotated part")
    with pytest.raises(AssertionError):  # control: one position off must show
        oracles.check(cells(cache, 5, 12)[1], oracles.iso(model, chunk.token_ids, places + 1).values)
    suffix = some_ids(4, seed=6)[0]
    ids = torch.cat((cache.token_ids[0], suffix))
    positions, groups = torch.cat((cache.positions[0], torch.arange(42, 46))), torch.zeros(len(ids))
    groups[5:12] = 1
    cache.append(suffix)
    frozen = oracles.frozen(model, ids, positions, groups)
    oracles.check(cache.next_token_logits(), frozen.logits[:, -1])


@pytest.mark.parametrize("family", ["phi", "gpt_neox", "glm"])
def test_b04_partial_heads(family: str) -> None:
    """huggingface/transformers#26681: a full-width rotation of a head that rotates only in part."""
    cache, chunk = make_cache(family), chunk_of(family)
    cache.append(some_ids(5)[0])
    cache.splice(chunk, seam_tokens=0)
    rotary = model_spec(shared_model(family)).layers[0].tensors[0].rotary
    before = cells(cache, 5, 12)[0]
    before = [k.clone() for k in before]
    cache.reposition("chunk", position=5 + 11)
    after = cells(cache, 5, 12)[0]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[..., rotary.stop :], new[..., rotary.stop :])
        assert not torch.equal(old[..., : rotary.stop], new[..., : rotary.stop])
        assert old.shape[-1] > rotary.stop
    check_iso(family, cache, chunk.token_ids, 5)


@pytest.mark.parametrize("family", ["llama_yarn", "llama_llama3", "llama_linear"])
def test_b06_scaling_is_not_applied_twice(family: str) -> None:
    """vllm-project/vllm#48351, UCSB-NLP-Chang/KVLink#1: YaRN's factor sits inside cos and sin."""
    cache, chunk = make_cache(family), chunk_of(family)
    cache.append(some_ids(5)[0])
    cache.splice(chunk, seam_tokens=0)
    before = [k.clone() for k in cells(cache, 5, 12)[0]]
    cache.reposition("chunk", position=55)
    check_iso(family, cache, chunk.token_ids, 5)
    for old, new in zip(before, cells(cache, 5, 12)[0], strict=True):
        assert torch.allclose(old.norm(dim=-1), new.norm(dim=-1), rtol=1e-5)
    cache.reposition("chunk", position=5)
    for old, new in zip(before, cells(cache, 5, 12)[0], strict=True):
        assert torch.allclose(old, new, atol=1e-5)


def _length_dependent(kind: str) -> Any:
    return zoo.build({"dynamic": "llama:dynamic", "longrope": "phi3:longrope"}[kind])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_b07_below_the_limit_cells_move(kind: str) -> None:
    """huggingface/transformers#25104, #27227: below the original limit one set of frequencies serves all positions."""
    model = _length_dependent(kind)
    limit, ids = model_spec(model).limit, zoo.ids_for(model, 16, 1)
    assert limit is not None
    assert kind in limit.name
    cache = EditableCache(model)
    cache.append(ids[:4])
    cache.splice(Skill.precompile(model, None, ids[4:10], name="chunk"), seam_tokens=0, position=limit.value - 8)
    places = torch.arange(6) + limit.value - 8
    oracles.check(cells(cache, 4, 10)[0], oracles.iso(model, ids[4:10], places).keys)
    with pytest.raises(AssertionError):  # control: one position off must show
        oracles.check(cells(cache, 4, 10)[0], oracles.iso(model, ids[4:10], places - 1).keys)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_b07_frequencies_that_depend_on_the_length(kind: str) -> None:
    """huggingface/transformers#25104, #27227: beyond it the model rotates with others; nothing may move there."""
    model = _length_dependent(kind)
    limit, ids = model_spec(model).limit, zoo.ids_for(model, 16, 1)
    cache, chunk = EditableCache(model), Skill.precompile(model, None, ids[4:10], name="chunk")
    cache.append(ids[:4])
    cache.splice(chunk, seam_tokens=0)
    for call in (
        lambda: cache.splice(chunk, name="far", position=limit.value - 3),
        lambda: cache.reposition("chunk", position=limit.value - 3),
    ):
        with refused(cache, SpanError, ValueError, str(limit.value)):
            call()


def test_b07_a_context_that_passes_the_limit_is_computed_as_a_plain_prefill() -> None:
    """huggingface/transformers#27227: in pieces the first tokens would get other frequencies than in one forward."""
    model = _length_dependent("longrope")
    limit = model_spec(model).limit.value
    ids = zoo.ids_for(model, 1400, 1)
    assert limit < 1024 < len(ids)
    cache = EditableCache(model)
    cache.append(ids)
    expected = oracles.full(model, ids)
    oracles.check(cells(cache, 0, len(ids))[0], expected.keys)
    short = EditableCache(model)
    short.append(ids[:9])
    with pytest.warns(ContextWarning, match=str(limit)):
        short.append(ids[9:])
    with pytest.raises(AssertionError):  # the model's own inconsistency, as in a plain cache
        oracles.check(cells(short, 0, len(ids))[0], expected.keys)
    short.recompute(slice(None))
    oracles.check(cells(short, 0, len(ids))[0], expected.keys)


def test_b08_a_closed_gap() -> None:
    """huggingface/transformers#33691, #31537: positions not consecutive after eviction, new keys at the old phase."""
    model, ids = shared_model(), some_ids(20)[0]
    cache = make_cache()
    cache.append(ids)
    kept = [layer.view()["keys"].clone() for layer in cache.editable_layers]
    cache.remove((5, 10))
    assert cache.positions[0].tolist() == list(range(15))
    spec = model_spec(model)
    for layer, old, facts in zip(cache.editable_layers, kept, spec.layers, strict=True):
        moved = torch.empty_like(old[..., 10:, :])
        rotate_into(
            moved,
            old[..., 10:, :].contiguous(),
            rotation(facts.tensors[0].rotary, torch.arange(10, 20), torch.arange(5, 15)),
        )
        assert torch.allclose(layer.view()["keys"][..., 5:, :], moved, atol=1e-6)
        assert torch.equal(layer.view()["keys"][..., :5, :], old[..., :5, :])
    cache.append(some_ids(3, seed=8)[0])
    assert cache.positions[0, -3:].tolist() == [15, 16, 17]
    assert cache.verify().ok


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_b09_an_open_gap(family: str) -> None:
    """NVIDIA/kvpress#16, #31: one counter for both storage length and position."""
    model, ids = shared_model(family), some_ids(24)[0]
    cache = make_cache(family)
    cache.append(ids[:8])
    chunk = Skill.precompile(model, None, ids[8:18], name="evicted")
    cache.splice(chunk, seam_tokens=0)
    cache.splice(Skill.precompile(model, None, ids[18:], name="rest"), seam_tokens=0)
    cache.remove("evicted", close_gap=False)
    assert len(cache.ledger) == 14
    inputs = cache.inputs(torch.tensor([7]))
    out = model.generate(
        **inputs, cache=cache, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    assert cache.positions[0, 14:].tolist() == [24, 25, 26]
    groups = torch.tensor([0] * 8 + [1] * 6 + [0] * 3)
    expected = oracles.frozen(model, cache.token_ids, cache.positions, groups)
    oracles.check(torch.cat(out.logits), expected.logits[0, 14:], what="logits")
    closed = oracles.frozen(model, cache.token_ids, torch.arange(17), groups)
    with pytest.raises(AssertionError):
        oracles.check(torch.cat(out.logits), closed.logits[0, 14:], what="logits")
    assert cache.verify().ok


def test_moves_of_a_bfloat16_chunk_do_not_add_up() -> None:
    """Design section 6 (notes of the study): repeated moves of 16-bit keys drift unless they start from the source."""
    model = shared_model("llama", dtype=torch.bfloat16)
    chunk = Skill.precompile(model, None, some_ids(7)[0], name="chunk")
    cache = EditableCache(model, tokenizer=shared_tokenizer())
    cache.append(some_ids(5)[0])
    cache.splice(chunk, seam_tokens=0)
    cache.reposition("chunk", position=300)
    once = [layer.view()["keys"].clone() for layer in cache.editable_layers]
    for step in range(100):
        cache.reposition("chunk", position=6 + 37 * step)
        if step == 50:
            cache.remove((4, 5), close_gap=False)  # must not lose the sources
    cache.reposition("chunk", position=300)
    for layer, kept in zip(cache.editable_layers, once, strict=True):
        assert torch.equal(layer.view()["keys"][..., 4:, :], kept[..., 5:, :])
    wrong = replace(chunk, position_ids=chunk.position_ids + 1)
    assert wrong.digest != chunk.digest


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_b07_a_long_context_does_not_make_another_model(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface/transformers#25104: their frequencies are renewed in every forward; who they are stays."""
    model = _length_dependent(kind)
    limit = model_spec(model).limit.value
    ids = zoo.ids_for(model, limit + 8, 1)
    chunk = Skill.precompile(model, None, ids[:6], name="chunk")
    monkeypatch.setattr(probe, "measure", lambda _: pytest.fail("measured again"))
    if limit + 8 < model.config.max_position_embeddings:
        EditableCache(model).append(ids)
    cache = EditableCache(model)
    cache.append(ids[6:10])
    cache.splice(chunk, seam_tokens=0)
    oracles.check(cells(cache, 4, 10)[0], oracles.iso(model, ids[:6], torch.arange(4, 10)).keys)
