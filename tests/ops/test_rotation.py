"""The rotation group: for every layout and scaling, turning keys is a group action that scores do not feel."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from editable_cache import EditableCache, Skill
from editable_cache.adapters import model_spec
from editable_cache.ops import rotate_into, rotation
from editable_cache.spec import RotarySpec
from editable_cache.testing import oracles, tolerance
from editable_cache.testing.contents import random_ids, shared_model
from editable_cache.testing.strategies import distances, heads, rotaries
from editable_cache.testing.tiny_models import TINY_FAMILIES, tiny_model

EXACT = 2e-6
"""Relative: a few roundings of float32."""


def turned(states: Tensor, rotary: RotarySpec, source: Tensor | int, target: Tensor | int) -> Tensor:
    """`states` carried from source to target positions (a number is the position of the first token)."""
    steps = torch.arange(states.shape[-2])
    source = steps + source if isinstance(source, int) else source
    target = steps + target if isinstance(target, int) else target
    out = torch.empty_like(states)
    rotate_into(out, states, rotation(rotary, source, target))
    return out


@st.composite
def cases(draw: st.DrawFn) -> tuple[RotarySpec, Tensor, int, int, int]:
    """A rotation, float32 states that it fits, and three positions."""
    rotary = draw(rotaries())
    return rotary, draw(heads(rotary)), draw(distances()), draw(distances()), draw(distances())


@given(cases())
def test_no_distance_changes_no_bit(case: tuple[RotarySpec, Tensor, int, int, int]) -> None:
    rotary, states, a, _, _ = case
    assert torch.equal(turned(states, rotary, a, a), states)


@given(cases())
def test_two_turns_are_their_sum(case: tuple[RotarySpec, Tensor, int, int, int]) -> None:
    rotary, states, a, b, c = case
    twice = turned(turned(states, rotary, a, b), rotary, b, c)
    oracles.check(twice, turned(states, rotary, a, c), EXACT)


@given(cases())
def test_the_way_back_undoes_a_turn(case: tuple[RotarySpec, Tensor, int, int, int]) -> None:
    rotary, states, a, b, _ = case
    oracles.check(turned(turned(states, rotary, a, b), rotary, b, a), states, EXACT)


@given(cases())
def test_norms_are_kept_and_other_channels_pass(case: tuple[RotarySpec, Tensor, int, int, int]) -> None:
    rotary, states, a, b, _ = case
    moved = turned(states, rotary, a, b)
    oracles.check(moved.norm(dim=-1), states.norm(dim=-1), EXACT)
    assert torch.equal(moved[..., : rotary.start], states[..., : rotary.start])
    assert torch.equal(moved[..., rotary.stop :], states[..., rotary.stop :])
    assert states.isfinite().all()


def rounding_of_angles(*positions: int) -> float:
    """What float32 angles of the model itself may be off by at the largest of these positions, in radians."""
    return 4 * torch.finfo(torch.float32).eps * max(positions, default=0)


@given(cases(), st.integers(0, 50_000))
def test_scores_depend_on_differences_only(case: tuple[RotarySpec, Tensor, int, int, int], shift: int) -> None:
    rotary, states, a, b, _ = case
    queries, keys = states.double(), states.flip(-2).double()

    def scores(by: int) -> Tensor:
        return turned(queries, rotary, 0, a + by) @ turned(keys, rotary, 0, b + by).transpose(-1, -2)

    bound = EXACT + rounding_of_angles(a + shift + 9, b + shift + 9)
    size = queries.norm(dim=-1).max() * keys.norm(dim=-1).max()
    assert float((scores(shift) - scores(0)).abs().max() / size) <= bound
    assert torch.allclose(turned(states, rotary, 7, 9), turned(states, rotary, 1, 3), rtol=0, atol=1e-4)


@given(cases(), st.data())
def test_turning_commutes_with_slicing_and_concatenation(
    case: tuple[RotarySpec, Tensor, int, int, int], data: st.DataObject
) -> None:
    rotary, states, a, b, _ = case
    cut = data.draw(st.integers(0, states.shape[-2]))
    turn = rotation(rotary, torch.arange(states.shape[-2]) + a, torch.arange(states.shape[-2]) + b)
    parts = []
    for start, stop in ((0, cut), (cut, states.shape[-2])):
        part = states[..., start:stop, :]
        parts.append(turned(part, rotary, a + start, b + start))
        sliced = torch.empty_like(part)
        rotate_into(sliced, part, turn.slots(start, stop))
        oracles.check(sliced, parts[-1], EXACT)
    oracles.check(torch.cat(parts, dim=-2), turned(states, rotary, a, b), EXACT)


@given(cases())
def test_each_row_of_a_batch_has_its_own_positions(case: tuple[RotarySpec, Tensor, int, int, int]) -> None:
    rotary, states, a, b, c = case
    steps = torch.arange(states.shape[-2])
    both = turned(torch.cat((states, states)), rotary, steps + a, torch.stack((steps + b, steps + c)))
    oracles.check(both, torch.cat((turned(states, rotary, a, b), turned(states, rotary, a, c))), EXACT)


@given(cases(), st.sampled_from([torch.bfloat16, torch.float16]))
def test_low_precision_is_rounded_once(case: tuple[RotarySpec, Tensor, int, int, int], dtype: torch.dtype) -> None:
    rotary, states, a, b, _ = case
    low = states.to(dtype)
    exact = turned(low.double(), rotary, a, b)
    assert torch.equal(turned(low, rotary, a, b), turned(low.float(), rotary, a, b).to(dtype))
    tolerance.check_budget(turned(low, rotary, a, b), exact, tolerance.rounding_budget(exact, dtype, headroom=1.5))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_control_a_wrong_turn_is_seen(layout: str) -> None:
    rotary = RotarySpec((1.0, 0.1, 0.01, 0.001), layout, start=2)  # type: ignore[arg-type]
    states = torch.randn(1, 2, 5, 12)
    right = turned(states, rotary, 3, 40)
    other = "interleaved" if layout == "half" else "half"
    wrong = [
        turned(states, rotary, 3, 41),
        turned(states, rotary, 40, 3),
        turned(states, replace(rotary, layout=other), 3, 40),
        turned(states, replace(rotary, start=4), 3, 40),
        turned(states, replace(rotary, inv_freq=rotary.inv_freq[::-1]), 3, 40),
        1.01 * right,
    ]
    for one in wrong:
        assert oracles.relative_error(one, right) > 1e-3


# -- against the model


@functools.cache
def first_layer_keys(family: str, start: int) -> Tensor:
    return oracles.iso(shared_model(family), random_ids(6), torch.arange(6) + start).keys[0]


def first_rotary(family: str) -> RotarySpec:
    rotary = model_spec(shared_model(family)).layers[0].tensors[0].rotary
    assert rotary is not None
    return rotary


@pytest.mark.parametrize("family", TINY_FAMILIES)
@given(source=distances(), target=distances())
def test_moved_first_layer_key_is_the_computed_one(family: str, source: int, target: int) -> None:
    moved = turned(first_layer_keys(family, source), first_rotary(family), source, target)
    oracles.check(moved, first_layer_keys(family, target), 1e-6)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_control_turning_by_frequency_times_distance_is_worse(family: str) -> None:
    """inv_freq x delta is not the difference of the model's float32 angles."""
    source, target = 40_003, 99_991
    rotary = first_rotary(family)
    naive = turned(first_layer_keys(family, source), rotary, torch.zeros(6).long(), torch.full((6,), target - source))
    error = oracles.relative_error(naive, first_layer_keys(family, target))
    assert error > 1e-5
    exact = turned(first_layer_keys(family, source), rotary, source, target)
    assert oracles.relative_error(exact, first_layer_keys(family, target)) < 1e-6


@pytest.mark.parametrize("family", ["llama", "glm", "cohere", "llama_yarn", "llama_llama3"])
def test_exact_at_every_distance_where_the_product_is_not(family: str) -> None:
    """The claim of docs/numerics.md: 1e-6 up to 262,144, which ``inv_freq * distance`` in float64 misses."""
    rotary, near = first_rotary(family), first_layer_keys(family, 0)
    errors = {}
    for distance in (1, 10, 100, 1_000, 10_000, 32_000, 100_000, 262_144):
        expected = first_layer_keys(family, distance)
        oracles.check(turned(near, rotary, 0, distance), expected, 1e-6)
        angle = torch.tensor(rotary.inv_freq, dtype=torch.float64) * distance
        errors[distance] = oracles.relative_error(by_angle(near, rotary, angle), expected)
    assert errors[262_144] > 1e-4
    assert errors[1] < 1e-6


def by_angle(states: Tensor, rotary: RotarySpec, angle: Tensor) -> Tensor:
    """`states` turned by ``angle`` ``[..., frequencies]`` in float64, as complex numbers."""
    out = states.double().clone()
    part = out[..., rotary.start : rotary.stop]
    count = len(rotary.inv_freq)
    half = rotary.layout == "half"
    first, second = (part[..., :count], part[..., count:]) if half else (part[..., 0::2], part[..., 1::2])
    number = torch.complex(first.contiguous(), second.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    first.copy_(number.real)
    second.copy_(number.imag)
    return out


@pytest.mark.parametrize("start", [0, 12, 24], ids=["leading", "middle", "trailing"])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_exact_at_the_farthest_distance_for_every_slice(layout: str, start: int) -> None:
    table = (10_000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float32) / 16)).tolist()
    rotary = RotarySpec(tuple(table), layout, start)  # type: ignore[arg-type]
    plain = torch.randn(1, 2, 9, 40, generator=torch.Generator().manual_seed(0))
    source = torch.arange(9)
    near, far = (
        by_angle(plain, rotary, (positions[:, None].float() * torch.tensor(table)).double())
        for positions in (source, source + 262_144)
    )
    oracles.check(turned(near.float(), rotary, source, source + 262_144), far, 1e-6)
    assert oracles.relative_error(turned(near.float(), rotary, source, source + 262_145), far) > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox", "cohere", "llama_yarn"])
def test_moved_a_hundred_times_is_as_exact_as_moved_once(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype=dtype)
    chunk = Skill.precompile(model, None, random_ids(12, 1), name="chunk")
    spec = model_spec(model)
    generator = torch.Generator().manual_seed(0)
    last = 50_003
    stops = [*torch.randint(20, 90_000, (99,), generator=generator).tolist(), last]
    caches = [EditableCache(model), EditableCache(model)]
    for cache in caches:
        cache.append(random_ids(7, 2))
        cache.splice(chunk, seam_tokens=0)
    for index, stop in enumerate(stops):
        caches[0].reposition("chunk", position=stop)
        if index % 10 == 3:
            caches[0].reposition("chunk", to=3)
            caches[0].reposition("chunk", to=7)
            caches[0].recompute((0, 4))
    caches[0].reposition("chunk", position=last)
    caches[1].reposition("chunk", position=last)
    rotating = 0
    for often, once, facts, states in zip(
        caches[0].editable_layers, caches[1].editable_layers, spec.layers, chunk.layers, strict=True
    ):
        rotary = facts.tensors[0].rotary
        assert torch.equal(often.view(7)["values"], states["values"])
        if rotary is None:
            continue
        rotating += 1
        exact = turned(states["keys"].double(), rotary, 0, last)
        budget = tolerance.rounding_budget(exact, dtype, headroom=1.5)
        tolerance.check_budget(once.view(7)["keys"], exact, budget)
        tolerance.check_budget(often.view(7)["keys"], exact, budget)
        assert torch.equal(often.view(7)["keys"], once.view(7)["keys"])
        chained, at = states["keys"], 0
        for stop in stops:
            chained, at = turned(chained, rotary, at, stop), stop
        assert tolerance.measured_error(chained, exact).rms > 3 * budget.rms
    assert rotating
