"""Searches over actions: what they find, what fools them, and how often they measure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from editable_cache.errors import SpanError
from editable_cache.repair import beam_search, exhaustive_search, greedy_search


def columns(count: int, num_layers: int = 2) -> list[Tensor]:
    """One action per token column."""
    return [torch.arange(count).eq(token).expand(num_layers, count).contiguous() for token in range(count)]


class Objective:
    """Distance from worths of tokens and of sets of tokens, with every call written down."""

    def __init__(self, worth: Sequence[float], together: dict[tuple[int, ...], float] | None = None) -> None:
        self.worth, self.together = worth, together or {}
        self.calls: list[tuple[int, ...]] = []

    def __call__(self, mask: Tensor) -> float:
        assert mask.dtype == torch.bool
        tokens = tuple(mask.any(0).nonzero()[:, 0].tolist())
        self.calls.append(tokens)
        bonus = sum(worth for group, worth in self.together.items() if set(group) <= set(tokens))
        return 10.0 - sum(self.worth[token] for token in tokens) - bonus


FOOLED = Objective([2.0, 1.5, 1.4, 0.0], {(0, 1): -1.4, (0, 2): -1.3, (1, 2): 1.0})
"""Token 0 is the best alone; tokens 1 and 2 are the best pair, and 0 spoils both."""

LOCKED = Objective([-0.1, -0.2, 0.0, -0.3], {(0, 1): 5.0})
"""No token helps alone; tokens 0 and 1 do together."""


def fresh(objective: Objective) -> Objective:
    return Objective(objective.worth, objective.together)


def test_greedy_is_fooled_where_beam_and_exhaustive_are_not() -> None:
    actions = columns(4)
    greedy = greedy_search(fresh(FOOLED), actions, 4)
    beam = beam_search(fresh(FOOLED), actions, 4, width=3)
    exhaustive = exhaustive_search(fresh(FOOLED), actions, 4)
    assert (greedy.actions, greedy.distance) == ((0, 2), pytest.approx(7.9))
    assert (sorted(beam.actions), beam.distance) == ([1, 2], pytest.approx(6.1))
    assert (exhaustive.actions, exhaustive.distance) == ((1, 2), pytest.approx(6.1))
    assert exhaustive.mask.tolist() == [[False, True, True, False]] * 2


def test_a_beam_of_one_is_fooled_too() -> None:
    assert beam_search(fresh(FOOLED), columns(4), 4, width=1).distance == pytest.approx(7.9)


def test_greedy_stops_where_nothing_improves() -> None:
    found = greedy_search(fresh(LOCKED), columns(4), 8)
    assert (found.actions, found.distance, found.num_evaluations) == ((), 10.0, 1 + 4)
    assert not found.mask.any()
    assert sorted(beam_search(fresh(LOCKED), columns(4), 8, width=2).actions) == [0, 1]
    assert exhaustive_search(fresh(LOCKED), columns(4), 8).actions == (0, 1)


# -- counts of evaluations


def counted(search: Callable[..., object], objective: Objective, *args: object, **kwargs: object) -> int:
    """Evaluations that a search reports, after a look at what was really called."""
    found = search(objective, *args, **kwargs)
    assert found.num_evaluations == len(objective.calls) == len(set(objective.calls))  # type: ignore[attr-defined]
    assert found.seconds > 0  # type: ignore[attr-defined]
    return found.num_evaluations  # type: ignore[attr-defined, no-any-return]


def test_evaluations_of_greedy_are_those_of_the_study() -> None:
    """905 for 16 of 64 actions, and 91 for 4 of 24."""
    assert counted(greedy_search, Objective([1.0] * 64), columns(64), 10_000, max_actions=16) == 905
    assert counted(greedy_search, Objective([1.0] * 24), columns(24), 10_000, max_actions=4) == 91


def test_evaluations_of_exhaustive_are_those_of_the_study() -> None:
    """12,951 choices of up to 4 of 24 actions."""
    assert counted(exhaustive_search, Objective([1.0] * 24), columns(24, 1), 4) == 12_951


@given(st.integers(1, 7), st.integers(1, 7))
def test_evaluations_have_closed_forms(count: int, limit: int) -> None:
    actions, taken = columns(count, 1), min(count, limit)
    all_help, none_helps = [1.0 + token for token in range(count)], [-1.0] * count
    greedy = 1 + sum(count - step for step in range(taken))
    every = sum(math.comb(count, size) for size in range(taken + 1))
    for limits in ({"budget_cells": limit}, {"budget_cells": 99, "max_actions": limit}):
        assert counted(greedy_search, Objective(all_help), actions, **limits) == greedy
        assert counted(greedy_search, Objective(none_helps), actions, **limits) == 1 + count
        assert counted(exhaustive_search, Objective(all_help), actions, **limits) == every
        assert counted(beam_search, Objective(all_help), actions, **limits, width=1) == greedy
        assert counted(beam_search, Objective(none_helps), actions, **limits, width=10**6) == every


def test_a_beam_measures_no_choice_twice() -> None:
    """Two kept actions of four: 3 further choices each, of which {a, b} is one and the same."""
    assert counted(beam_search, Objective([4.0, 3.0, 2.0, 1.0]), columns(4), 99, width=2, max_actions=2) == 1 + 4 + 5


def test_overlapping_actions_are_charged_once() -> None:
    """Layer prefixes of one token: 1, 2 and 3 cells of the same column."""
    prefixes = [(torch.arange(3) < height)[:, None].expand(3, 2) & torch.tensor([True, False]) for height in (1, 2, 3)]
    found = greedy_search(lambda mask: 10.0 - float(mask.sum()), prefixes, 2)
    assert (found.actions, found.distance) == ((1,), 8.0)
    assert found.num_evaluations == 3  # nothing, one cell, two cells: three cells are too many, and 0 adds nothing to 1
    assert exhaustive_search(lambda mask: 10.0 - float(mask.sum()), prefixes, 3).num_evaluations == 4


# -- budgets and order


@given(
    st.lists(st.floats(-2, 2), min_size=1, max_size=6),
    st.dictionaries(st.tuples(st.integers(0, 5), st.integers(0, 5)), st.floats(-2, 2), max_size=4),
    st.integers(1, 12),
    st.integers(1, 6),
)
def test_exhaustive_is_never_beaten(
    worth: list[float], together: dict[tuple[int, ...], float], budget_cells: int, max_actions: int
) -> None:
    actions = columns(len(worth))
    limits = {"max_actions": max_actions}
    best = exhaustive_search(Objective(worth, together), actions, budget_cells, **limits)
    for width in (1, 3):
        beam = beam_search(Objective(worth, together), actions, budget_cells, width=width, **limits)
        assert best.distance <= beam.distance
    greedy = greedy_search(Objective(worth, together), actions, budget_cells, **limits)
    assert best.distance <= greedy.distance <= Objective(worth, together)(torch.zeros(2, len(worth), dtype=torch.bool))
    for found in (best, beam, greedy):
        assert int(found.mask.sum()) <= budget_cells
        assert len(found.actions) <= max_actions
        assert found.distance == Objective(worth, together)(found.mask)
        union = torch.zeros_like(found.mask)
        for action in found.actions:
            union |= actions[action]
        assert torch.equal(union, found.mask)


def test_among_equals_the_first_one_wins() -> None:
    equal = [1.0, 1.0, 1.0]
    assert greedy_search(Objective(equal), columns(3), 2).actions == (0,)
    assert beam_search(Objective(equal), columns(3), 2).actions == (0,)
    assert exhaustive_search(Objective(equal), columns(3), 2).actions == (0,)
    assert exhaustive_search(Objective([0.0, 0.0]), columns(2), 9).actions == ()


def test_a_budget_below_every_action_buys_nothing() -> None:
    for search in (greedy_search, beam_search, exhaustive_search):
        found = search(Objective([1.0, 1.0]), columns(2), 1)
        assert (found.actions, found.num_evaluations) == ((), 1)


def test_what_evaluate_does_to_its_mask_stays_with_it() -> None:
    def careless(mask: Tensor) -> float:
        worth = float(mask.sum())
        mask.fill_(True)
        return -worth

    actions = columns(3)
    found = greedy_search(careless, actions, 4)
    assert int(found.mask.sum()) == 4
    assert [int(action.sum()) for action in actions] == [2, 2, 2]


# -- refusals


def test_exhaustive_refuses_with_the_number() -> None:
    objective = Objective([1.0] * 40)
    with pytest.raises(SpanError, match=r"102091 choices of up to 4 of 40 actions, expected 50000 at most"):
        exhaustive_search(objective, columns(40), 999, max_actions=4)
    with pytest.raises(SpanError, match=r"\b16 choices"):
        exhaustive_search(objective, columns(4), 999, most=15)
    assert objective.calls == []
    assert exhaustive_search(objective, columns(4), 999, most=16).num_evaluations == 16


@pytest.mark.parametrize("search", [greedy_search, beam_search, exhaustive_search])
@pytest.mark.parametrize(
    ("actions", "limits"),
    [
        ([], (4, 4)),
        ([torch.zeros(2, 2, dtype=torch.bool)], (4, 4)),
        ([torch.ones(2, 2)], (4, 4)),
        ([torch.ones(2, 2, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool)], (4, 4)),
        (columns(3), (0, 4)),
        (columns(3), (-1, 4)),
        (columns(3), (4.0, 4)),
        (columns(3), (True, 4)),
        (columns(3), (4, 0)),
    ],
)
def test_bad_candidates_and_limits(
    search: Callable[..., object], actions: list[Tensor], limits: tuple[int, int]
) -> None:
    objective = Objective([1.0] * 3)
    with pytest.raises(SpanError, match="Search"):
        search(objective, actions, limits[0], max_actions=limits[1])
    assert objective.calls == []


@pytest.mark.parametrize("width", [0, -1, 1.5, True])
def test_a_beam_has_a_width(width: int) -> None:
    with pytest.raises(SpanError, match="width"):
        beam_search(Objective([1.0]), columns(1), 2, width=width)


def test_a_distance_is_a_number() -> None:
    with pytest.raises(SpanError, match=r"after actions \[0\] is no number"):
        greedy_search(lambda mask: math.nan if mask.any() else 1.0, columns(2), 4)
