"""The algebra of transitions: apply, follow, store compactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from editable_cache import CompatibilityError
from editable_cache.chunk.transition import Form, Transition, compacted
from editable_cache.ops import relative_error

EXACT = 1e-5
SHAPE = (1, 3, 4, 5)  # batch, heads, key dim, value dim
FORMS: list[Form] = ["diagonal", "matrix", "replace"]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def transition(form: Form, seed: int, *, rank_one: bool = True) -> Transition:
    """A random one; a diagonal has one number per head and row, or one per element."""
    factors = {
        "diagonal": drawn(seed, *SHAPE[:3], 1 if rank_one else SHAPE[3]).sigmoid(),
        "matrix": drawn(seed, *SHAPE[:3], SHAPE[2]) / 2,
        "replace": None,
    }
    return Transition(form, factors[form], drawn(seed + 1, *SHAPE), drawn(seed + 2, 1, 6, 4))


@st.composite
def transitions(draw: st.DrawFn) -> Transition:
    return transition(draw(st.sampled_from(FORMS)), draw(st.integers(0, 10_000)))


@given(transitions(), transitions(), st.integers(0, 1000))
def test_two_in_a_row_are_one_after_the_other(first: Transition, second: Transition, seed: int) -> None:
    state = drawn(seed, *SHAPE)
    assert relative_error(first.then(second).apply(state), second.apply(first.apply(state))) <= EXACT


@given(transitions(), transitions(), transitions(), st.integers(0, 1000))
def test_composition_is_associative(a: Transition, b: Transition, c: Transition, seed: int) -> None:
    state = drawn(seed, *SHAPE)
    left, right = a.then(b).then(c), a.then(b.then(c))
    assert left.form == right.form
    assert relative_error(left.apply(state), right.apply(state)) <= EXACT


@given(transitions(), transitions(), st.integers(0, 1000))
def test_order_matters(first: Transition, second: Transition, seed: int) -> None:
    state = drawn(seed, *SHAPE)
    if not torch.equal(first.offset, second.offset):  # type: ignore[arg-type]
        assert relative_error(first.then(second).apply(state), second.then(first).apply(state)) > 1e-3


def test_the_later_window_wins() -> None:
    first, second = transition("diagonal", 1), transition("diagonal", 9)
    assert first.then(second).conv is second.conv
    without = Transition("diagonal", second.factor, second.offset, None)
    assert first.then(without).conv is first.conv


def test_a_layer_without_a_recurrent_state_has_a_window_alone() -> None:
    first, second = (Transition("replace", None, None, drawn(seed, 1, 6, 3)) for seed in (1, 2))
    assert first.then(second).conv is second.conv
    assert first.nbytes == 6 * 3 * 4
    with pytest.raises(CompatibilityError, match="without a recurrent state"):
        first.apply(drawn(0, *SHAPE))


@pytest.mark.parametrize("form", FORMS)
def test_apply_makes_a_new_tensor_of_the_dtype_of_the_state(form: Form) -> None:
    each, state = transition(form, 3), drawn(4, 2, *SHAPE[1:])
    before = state.clone(), each.offset.clone()  # type: ignore[union-attr]
    wide = each.apply(state)
    narrow = each.apply(state.bfloat16())
    assert (wide.dtype, narrow.dtype, wide.shape) == (torch.float32, torch.bfloat16, state.shape)
    wide.add_(1.0)
    assert torch.equal(state, before[0])
    assert torch.equal(each.offset, before[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS)
def test_another_shape_is_refused(form: Form) -> None:
    for shape in ((1, 3, 4, 6), (1, 2, 4, 5)):
        with pytest.raises(CompatibilityError, match="recurrent state: expected"):
            transition(form, 3).apply(drawn(0, *shape))


def test_a_diagonal_along_the_values_is_no_matrix() -> None:
    full, matrix = transition("diagonal", 1, rank_one=False), transition("matrix", 5)
    with pytest.raises(CompatibilityError, match="constant along the last dimension"):
        full.then(matrix)


@pytest.mark.parametrize(
    "wrong",
    [
        {"form": "diagonal", "factor": None, "offset": torch.ones(1, 2)},
        {"form": "replace", "factor": torch.ones(1, 2), "offset": torch.ones(1, 2)},
        {"form": "matrix", "factor": torch.ones(1, 2, 2), "offset": None},
    ],
)
def test_forms_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Transition(conv=None, **wrong)


def test_half_size_storage() -> None:
    each, state = transition("matrix", 7), drawn(8, *SHAPE)
    half = each.to(dtype=torch.float16)
    assert half.nbytes < each.nbytes
    assert half.conv.dtype == torch.float32  # type: ignore[union-attr]
    assert 1e-6 < relative_error(half.apply(state), each.apply(state)) < 2e-3


@given(st.lists(st.booleans(), min_size=4, max_size=4), st.integers(0, 1000))
def test_what_is_constant_is_stored_once(constant: list[bool], seed: int) -> None:
    shape = [1 if flat else size for flat, size in zip(constant, SHAPE, strict=True)]
    exact = drawn(seed, *shape).sigmoid()
    noise = 1 + 6e-7 * (2 * torch.rand(SHAPE, generator=torch.Generator().manual_seed(seed)) - 1)
    stored = compacted(exact.expand(SHAPE) * noise)
    assert list(stored.shape) == shape
    assert relative_error(stored, exact) <= EXACT


def test_a_small_difference_is_no_noise() -> None:
    factor = torch.full(SHAPE, 1e-3)
    factor[..., 0] *= 1.0001
    assert compacted(factor).shape[-1] == SHAPE[-1]
