"""Masks from scores and a budget: exact counts, shapes, nesting, ties, and refusals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from editable_cache.errors import SpanError
from editable_cache.repair import Geometry, mask_of
from editable_cache.repair.geometry import antitonic

SHAPES: tuple[Geometry, ...] = ("cells", "prefixes", "columns")
BUDGETS = (0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 1.0)

budgets = st.floats(0.0, 1.0, exclude_min=True)


@st.composite
def score_arrays(draw: st.DrawFn, *, distinct: bool = False) -> Tensor:
    """Scores of few values, so that many tie; or all different, in random order."""
    num_layers, num_tokens = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    size = num_layers * num_tokens
    values = draw(
        st.permutations(range(size)) if distinct else st.lists(st.integers(-3, 3), min_size=size, max_size=size)
    )
    return torch.tensor(values, dtype=torch.float32).view(num_layers, num_tokens)


def is_prefixes(mask: Tensor) -> bool:
    return bool((mask[1:] <= mask[:-1]).all())


def is_columns(mask: Tensor) -> bool:
    return bool((mask == mask[:1]).all())


def greedy_prefixes(scores: Tensor, count: int) -> Tensor:
    """Extend by the best mean, one extension after the other, written as it is said."""
    num_layers, num_tokens = scores.shape
    rows, heights = scores.double(), [0] * num_tokens
    while count > 0:
        options = [
            (float(rows[heights[token] : stop, token].mean()), -token, stop)
            for token in range(num_tokens)
            for stop in range(heights[token] + 1, num_layers + 1)
        ]
        _, negative, stop = max(options)
        token = -negative
        taken = min(count, stop - heights[token])
        heights[token] += taken
        count -= taken
    return torch.arange(num_layers)[:, None] < torch.tensor(heights)


# -- counts


@given(score_arrays(), budgets)
def test_cells_and_prefixes_spend_the_budget_to_one_cell(scores: Tensor, budget: float) -> None:
    for geometry in ("cells", "prefixes"):
        mask = mask_of(scores, budget, geometry)
        assert mask.dtype == torch.bool
        assert mask.shape == scores.shape
        assert int(mask.sum()) == max(1, round(budget * scores.numel()))


@given(score_arrays(), budgets)
def test_columns_spend_the_budget_to_one_column(scores: Tensor, budget: float) -> None:
    mask = mask_of(scores, budget, "columns")
    assert is_columns(mask)
    assert int(mask[0].sum()) == max(1, round(budget * scores.shape[1]))


@given(score_arrays(), budgets, st.data())
def test_suffixes_spend_the_budget_to_one_suffix(scores: Tensor, budget: float, data: st.DataObject) -> None:
    num_layers, num_tokens = scores.shape
    from_layer = data.draw(st.integers(0, num_layers - 1))
    each = num_layers - from_layer
    wanted = max(1, round(budget * scores.numel() / each))
    if wanted > num_tokens:
        with pytest.raises(SpanError, match="hold"):
            mask_of(scores, budget, "suffixes", from_layer=from_layer)
        return
    mask = mask_of(scores, budget, "suffixes", from_layer=from_layer)
    assert not mask[:from_layer].any()
    assert is_columns(mask[from_layer:])
    assert int(mask.sum()) == wanted * each
    assert abs(int(mask.sum()) - budget * scores.numel()) <= each


@pytest.mark.parametrize("budget", BUDGETS)
def test_counts_of_the_study(budget: float) -> None:
    """4,113 tokens by 36 layers, its case: at 5 % 7,403 cells under S1 and S2, and 206 columns (it bought 205)."""
    scores = torch.rand(36, 4113, generator=torch.Generator().manual_seed(1))
    assert int(mask_of(scores, budget, "cells").sum()) == round(budget * 148_068)
    assert int(mask_of(scores, budget, "prefixes").sum()) == round(budget * 148_068)
    assert abs(int(mask_of(scores, budget, "columns").sum()) - budget * 148_068) <= 18


@given(score_arrays())
def test_the_whole_budget_takes_everything(scores: Tensor) -> None:
    for geometry in (*SHAPES, "suffixes"):
        assert mask_of(scores, 1.0, geometry).all()  # type: ignore[arg-type]
        assert mask_of(scores, 1, geometry).all()  # type: ignore[arg-type]


def test_suffixes_cannot_spend_the_whole_budget() -> None:
    scores = torch.ones(4, 10)
    with pytest.raises(SpanError, match=r"from layer 1 up hold 0\.75 of all cells, got a budget of 1\.0"):
        mask_of(scores, 1.0, "suffixes", from_layer=1)
    assert int(mask_of(scores, 0.75, "suffixes", from_layer=1).sum()) == 30
    for budget, from_layer in ((11 * 3 / 40, 1), (11 / 40, 3), (0.9, 3)):  # one suffix too many, and far too many
        with pytest.raises(SpanError, match="hold"):
            mask_of(scores, budget, "suffixes", from_layer=from_layer)


@given(score_arrays())
def test_the_smallest_budget_buys_one_action(scores: Tensor) -> None:
    num_layers = len(scores)
    assert int(mask_of(scores, 1e-9, "cells").sum()) == 1
    assert int(mask_of(scores, 1e-9, "prefixes").sum()) == 1
    assert int(mask_of(scores, 1e-9, "columns").sum()) == num_layers
    assert int(mask_of(scores, 1e-9, "suffixes", from_layer=num_layers - 1).sum()) == 1


# -- which cells


@given(score_arrays(), budgets)
def test_cells_are_the_best_ones(scores: Tensor, budget: float) -> None:
    mask = mask_of(scores, budget, "cells")
    assert mask.all() or scores[mask].min() >= scores[~mask].max()


@given(score_arrays(), budgets)
def test_columns_are_the_best_ones(scores: Tensor, budget: float) -> None:
    chosen, sums = mask_of(scores, budget, "columns")[0], scores.sum(0)
    assert chosen.all() or sums[chosen].min() >= sums[~chosen].max()


@given(score_arrays(), budgets)
def test_prefixes_are_those_of_the_greedy_choice(scores: Tensor, budget: float) -> None:
    mask = mask_of(scores, budget, "prefixes")
    assert is_prefixes(mask)
    assert torch.equal(mask, greedy_prefixes(scores, int(mask.sum())))


@given(score_arrays())
def test_antitonic_scores_keep_the_sum_and_fall(scores: Tensor) -> None:
    found = antitonic(scores)
    assert (found[1:] <= found[:-1]).all()
    assert torch.allclose(found.sum(0), scores.double().sum(0), atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_antitonic_scores_fall_in_spite_of_rounding(seed: int) -> None:
    """Means of near-equal blocks differ by rounding alone, and may not turn a prefix into something else."""
    scores = torch.full((36, 200), 0.1) + torch.rand(1, 200, generator=torch.Generator().manual_seed(seed))
    found = antitonic(scores)
    assert (found[1:] <= found[:-1]).all()
    assert is_prefixes(mask_of(scores, 0.37, "prefixes"))


def test_prefixes_dig_for_a_treasure_only_if_it_pays() -> None:
    """Token 0 has its worth two layers down: a mean of 3 over three cells, against 2 in the first cell of token 1."""
    scores = torch.tensor([[0.0, 2.0], [0.0, 0.0], [9.0, 0.0]])
    assert mask_of(scores, 3 / 6, "prefixes").tolist() == [[True, False]] * 3
    assert mask_of(scores, 4 / 6, "prefixes").tolist() == [[True, True], [True, False], [True, False]]
    scores[2, 0] = 5.0  # a mean of 5/3 does not pay
    assert mask_of(scores, 1 / 6, "prefixes").tolist() == [[False, True], [False, False], [False, False]]


def test_suffixes_look_at_their_own_layers_only() -> None:
    scores = torch.tensor([[100.0, 0.0], [1.0, 2.0], [1.0, 2.0]])
    assert mask_of(scores, 0.3, "suffixes", from_layer=1).tolist() == [[False, False], [False, True], [False, True]]
    assert mask_of(scores, 0.3, "columns")[0].tolist() == [True, False]


@given(score_arrays(), budgets, budgets)
def test_a_larger_budget_only_adds(scores: Tensor, one: float, other: float) -> None:
    small, large = sorted((one, other))
    for geometry in SHAPES:
        assert (mask_of(scores, small, geometry) <= mask_of(scores, large, geometry)).all()


def test_ties_go_to_the_earlier_slot_and_then_the_lower_layer() -> None:
    scores = torch.zeros(3, 4)
    wanted = [[True, True, False, False], [True, False, False, False], [True, False, False, False]]
    assert mask_of(scores, 4 / 12, "cells").tolist() == wanted
    assert mask_of(scores, 4 / 12, "prefixes").tolist() == wanted
    assert mask_of(scores, 0.5, "columns").tolist() == [[True, True, False, False]] * 3


# -- what must not and what must change the mask


@given(score_arrays(distinct=True), budgets, st.randoms(use_true_random=False))
def test_permuted_tokens_permute_the_cells(scores: Tensor, budget: float, random: object) -> None:
    order = list(range(scores.shape[1]))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert torch.equal(mask_of(scores[:, order], budget, "cells"), mask_of(scores, budget, "cells")[:, order])
    distinct = scores + torch.arange(scores.shape[1]) * math.pi  # no two columns or blocks of one sum
    for geometry in ("prefixes", "columns"):
        assert torch.equal(mask_of(distinct[:, order], budget, geometry), mask_of(distinct, budget, geometry)[:, order])


@given(score_arrays(distinct=True), budgets)
def test_scale_and_offset_do_not_matter(scores: Tensor, budget: float) -> None:
    for geometry in SHAPES:
        assert torch.equal(mask_of(scores, budget, geometry), mask_of(scores * 4 + 8, budget, geometry))


def test_permuted_layers_do_matter_to_prefixes_and_negated_scores_to_all() -> None:
    scores = torch.rand(5, 40, generator=torch.Generator().manual_seed(2))
    assert not torch.equal(mask_of(scores, 0.2, "prefixes"), mask_of(scores.flip(0), 0.2, "prefixes"))
    for geometry in SHAPES:
        assert not torch.equal(mask_of(scores, 0.2, geometry), mask_of(-scores, 0.2, geometry))
    mask = mask_of(scores, 0.2, "cells")
    assert not is_prefixes(mask)
    assert not is_columns(mask_of(scores, 0.2, "prefixes"))


def test_scores_stay_as_they_are() -> None:
    scores = torch.rand(3, 5, generator=torch.Generator().manual_seed(3))
    before = scores.clone()
    for geometry in SHAPES:
        mask_of(scores, 0.5, geometry)
    assert torch.equal(scores, before)
    mask_of(torch.zeros(1, 1).expand(3, 5), 0.5, "cells")


# -- refusals


@pytest.mark.parametrize("budget", [0, 0.0, -0.1, 1.0001, 2, math.nan, math.inf, True, "0.1", None])
def test_a_budget_is_a_share(budget: object) -> None:
    with pytest.raises(SpanError, match="budget"):
        mask_of(torch.ones(2, 3), budget, "cells")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "scores",
    [
        torch.ones(0, 3),
        torch.ones(3, 0),
        torch.ones(3),
        torch.ones(1, 2, 3),
        torch.tensor([[1.0, math.nan]]),
        torch.tensor([[1.0, math.inf]]),
        torch.tensor([[1.0, -math.inf]]),
        torch.ones(2, 2, dtype=torch.complex64),
        [[1.0]],
    ],
)
def test_scores_are_a_full_table_of_numbers(scores: Tensor) -> None:
    for geometry in SHAPES:
        with pytest.raises(SpanError, match="scores"):
            mask_of(scores, 0.5, geometry)


def test_geometries_and_layers_are_known() -> None:
    with pytest.raises(SpanError, match="'rows'"):
        mask_of(torch.ones(2, 3), 0.5, "rows")  # type: ignore[arg-type]
    for from_layer in (-1, 2, True, 1.0):
        with pytest.raises(SpanError, match="from_layer in 0 to 1"):
            mask_of(torch.ones(2, 3), 0.5, "suffixes", from_layer=from_layer)  # type: ignore[arg-type]
    with pytest.raises(SpanError, match="'suffixes' alone"):
        mask_of(torch.ones(2, 3), 0.5, "columns", from_layer=1)
