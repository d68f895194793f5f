"""ISO: wherever a chunk ends up, its cells are those of the chunk run alone at those positions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from editable_cache import EditableCache, KVChunk, Skill
from editable_cache.cache import arrange
from editable_cache.forward import compose
from editable_cache.ops import Rotation, rotate_into
from editable_cache.spec import LayerSpec, ModelSpec
from editable_cache.testing import oracles
from editable_cache.testing.contents import (
    family_cases,
    must_differ,
    random_ids,
    same_bits,
    shared_model,
    states_in,
    states_of,
)
from editable_cache.testing.tiny_models import SLIDING_WINDOW, TINY_FAMILIES

PREFIX, CHUNK = random_ids(11, 1), random_ids(13, 2)  # both longer than the window
assert min(len(PREFIX), len(CHUNK)) > SLIDING_WINDOW

CASES = pytest.mark.parametrize(("family", "attention"), family_cases(TINY_FAMILIES))
FAMILY = pytest.mark.parametrize("family", TINY_FAMILIES)


def chunk_of(model: PreTrainedModel) -> KVChunk:
    return Skill.precompile(model, None, CHUNK, name="chunk")


def check_iso(cache: EditableCache, model: PreTrainedModel, start: int, first_position: int, skip: int = 0) -> float:
    """The chunk's cells from its token `skip` on, standing from slot `start` on."""
    positions = torch.arange(len(CHUNK)) + first_position
    assert cache.positions[0, start + skip : start + len(CHUNK)].tolist() == positions[skip:].tolist()
    assert cache.token_ids[0, start : start + len(CHUNK)].tolist() == CHUNK.tolist()
    got = states_of(cache, start + skip, start + len(CHUNK))
    error = oracles.check(got, states_in(oracles.iso(model, CHUNK, positions), skip))
    must_differ(got, states_in(oracles.iso(model, CHUNK, positions + 1), skip))
    return error


@CASES
@pytest.mark.parametrize("seam", [0, 1, 3])
def test_splice_at_the_end(family: str, attention: str, seam: int) -> None:
    model = shared_model(family, attention)
    cache = EditableCache(model)
    cache.append(PREFIX)
    cache.splice(chunk_of(model), seam_tokens=seam)
    check_iso(cache, model, len(PREFIX), len(PREFIX), seam)
    both = torch.cat((PREFIX, CHUNK))
    clean = oracles.full(model, both)  # the seam saw what precedes it
    oracles.check(states_of(cache, 0, len(PREFIX) + seam), states_in(clean, 0, len(PREFIX) + seam))
    rest = len(PREFIX) + seam
    must_differ(states_of(cache, rest), states_in(clean, rest))


@CASES
def test_splice_far_behind_a_gap(family: str, attention: str) -> None:
    model = shared_model(family, attention)
    cache = EditableCache(model)
    cache.append(PREFIX)
    cache.splice(chunk_of(model), seam_tokens=0, position=3_000)
    check_iso(cache, model, len(PREFIX), 3_000)
    # Further out the model's own float32 angles change what deeper layers compute; what layer 0 stores stays exact.
    cache.reposition("chunk", position=99_000)
    layers = len(cache.layers)
    expected = states_in(oracles.iso(model, CHUNK, torch.arange(99_000, 99_013)))
    got = states_of(cache, len(PREFIX))
    oracles.check([got[0], got[layers]], [expected[0], expected[layers]], 1e-6)


@CASES
@pytest.mark.parametrize("at", [0, 4, 10])
def test_splice_in_the_middle(family: str, attention: str, at: int) -> None:
    model = shared_model(family, attention)
    cache = EditableCache(model)
    cache.append(PREFIX)
    before = states_of(cache, 0, at)
    cache.splice(chunk_of(model), at=at, seam_tokens=0)
    assert same_bits(states_of(cache, 0, at), before)
    check_iso(cache, model, at, at)
    # What made room keeps its contents: it is the prefix run as a whole, later.
    shifted = oracles.iso(model, PREFIX, torch.arange(len(PREFIX)) + len(CHUNK))
    oracles.check(states_of(cache, at + len(CHUNK)), states_in(shifted, at))
    must_differ(states_of(cache, at + len(CHUNK)), states_in(oracles.full(model, PREFIX), at))


@CASES
def test_reposition_in_the_order_and_in_place(family: str, attention: str) -> None:
    model = shared_model(family, attention)
    cache = EditableCache(model)
    cache.append(PREFIX)
    cache.splice(chunk_of(model), seam_tokens=0)
    cache.append(random_ids(9, 3))
    cache.reposition("chunk", to=2)
    check_iso(cache, model, 2, 2)
    cache.reposition("chunk", to=20)
    check_iso(cache, model, 20, 20)
    cache.reposition("chunk", position=3_001)
    check_iso(cache, model, 20, 3_001)
    cache.reposition("chunk", position=20)
    check_iso(cache, model, 20, 20)


@CASES
@pytest.mark.parametrize("close_gap", [True, False])
def test_remove_before_a_chunk(family: str, attention: str, close_gap: bool) -> None:
    model = shared_model(family, attention)
    cache = EditableCache(model)
    cache.append(PREFIX)
    cache.splice(chunk_of(model), seam_tokens=0)
    tail = random_ids(10, 3)
    cache.append(tail)
    before = states_of(cache)
    cache.remove((5, 9), close_gap=close_gap)
    gone = 4 if close_gap else 0
    check_iso(cache, model, len(PREFIX) - 4, len(PREFIX) - gone)
    groups = torch.zeros(len(before[0][0, 0]), dtype=torch.long)
    groups[len(PREFIX) : len(PREFIX) + len(CHUNK)] = 1
    ids = torch.cat((PREFIX, CHUNK, tail))
    whole = oracles.frozen(model, ids, torch.arange(len(ids)) - gone, groups)
    oracles.check(states_of(cache, 5), states_in(whole, 9))
    assert same_bits(states_of(cache, 0, 5), [t[..., :5, :] for t in before])
    if not close_gap:
        assert same_bits(states_of(cache, 5), [t[..., 9:, :] for t in before])
    cache.append(random_ids(1, 4))
    assert int(cache.positions[0, -1]) == len(ids) - gone


@FAMILY
def test_extracted_span_moves_like_any_chunk(family: str) -> None:
    model = shared_model(family)
    source = EditableCache(model)
    source.append(torch.cat((PREFIX, CHUNK)))
    chunk = source.extract((len(PREFIX), len(PREFIX) + len(CHUNK)))
    cache = EditableCache(model)
    cache.append(random_ids(3, 5))
    cache.splice(chunk, seam_tokens=0)
    expected = oracles.iso(model, CHUNK, torch.arange(3, 16), PREFIX, torch.arange(3 - len(PREFIX), 3))
    oracles.check(states_of(cache, 3), states_in(expected))
    must_differ(states_of(cache, 3), states_in(oracles.iso(model, CHUNK, torch.arange(3, 16))))
    assert cache.verify().ok


def other_layout(layer: LayerSpec) -> LayerSpec:
    flipped = {"half": "interleaved", "interleaved": "half"}
    tensors = [
        t if t.rotary is None else replace(t, rotary=replace(t.rotary, layout=flipped[t.rotary.layout]))
        for t in layer.tensors
    ]
    return replace(layer, tensors=tuple(tensors))


def everything_shifted(spec: ModelSpec) -> ModelSpec:
    return replace(spec, layers=(*spec.layers[1:], spec.layers[0]))


def with_frequencies(change: Callable[[float], float]) -> Callable[[ModelSpec], ModelSpec]:
    def changed(layer: LayerSpec) -> LayerSpec:
        tensors = [
            t
            if t.rotary is None
            else replace(t, rotary=replace(t.rotary, inv_freq=tuple(map(change, t.rotary.inv_freq))))
            for t in layer.tensors
        ]
        return replace(layer, tensors=tuple(tensors))

    return lambda spec: replace(spec, layers=tuple(map(changed, spec.layers)))


WRONG_SPECS = [
    *((f, "layout", lambda spec: replace(spec, layers=tuple(map(other_layout, spec.layers)))) for f in TINY_FAMILIES),
    *((f, "not moved", with_frequencies(lambda _: 0.0)) for f in TINY_FAMILIES),
    ("gemma3", "thetas swapped", everything_shifted),
    ("smollm3", "layers without rotation swapped", everything_shifted),
    ("llama_linear", "unscaled", with_frequencies(lambda f: 4 * f)),
]


@pytest.mark.parametrize(
    ("family", "wrong"), [pytest.param(f, wrong, id=f"{f}-{what}") for f, what, wrong in WRONG_SPECS]
)
def test_control_wrong_facts_are_seen(
    family: str, wrong: Callable[[ModelSpec], ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared_model(family)
    right = compose.model_spec(model)
    monkeypatch.setattr(compose, "model_spec", lambda *_, **__: wrong(right))
    cache = EditableCache(model)
    cache.append(PREFIX)
    cache.splice(chunk_of(model), seam_tokens=0)
    must_differ(states_of(cache, 11), states_in(oracles.iso(model, CHUNK, torch.arange(11, 24))), 1e-2)
    assert not cache.verify().ok


def test_control_scaling_twice_and_values_left_behind_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared_model("llama_yarn")
    expected = states_in(oracles.iso(model, CHUNK, torch.arange(11, 24)))
    factor = float(model.model.rotary_emb.attention_scaling)
    assert factor > 1.05

    def twice(out: torch.Tensor, states: torch.Tensor, turn: Rotation) -> None:
        rotate_into(out, states, turn)
        out.mul_(factor)

    monkeypatch.setattr(arrange, "rotate_into", twice)
    cache = EditableCache(model)
    cache.append(PREFIX)
    cache.splice(chunk_of(model), seam_tokens=0)
    must_differ(states_of(cache, 11), expected, 1e-2)
    monkeypatch.undo()
    cache = copy.deepcopy(cache)
    cache.remove("chunk")
    cache.splice(chunk_of(model), seam_tokens=0)
    states = states_of(cache, 11)
    oracles.check(states, expected)
    layers = len(states) // 2
    must_differ([*states[:layers], *(v.roll(1, -2) for v in states[layers:])], expected, 1e-2)
    must_differ([states[1], states[0], *states[2:]], expected, 1e-2)
