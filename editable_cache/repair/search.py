"""The intervention oracle: try actions, measure, keep the best; greedy, beam or exhaustive over one list of candidates.

An *action* is a bool mask of cells that are repaired together; a choice of actions repairs the union of their cells,
and that union is what a budget of cells is charged with. Every search first measures the empty choice, never measures
the same cells twice, and counts what it measured. Greedy search at 4 of 24 actions takes 1 + 24 + 23 + 22 + 21 = 91
evaluations, exhaustive search 12,951 ("What Must a KV-Cache Repair Know to Choose?", section 8).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from editable_cache.errors import SpanError

Evaluate = Callable[[Tensor], float]
"""Distance to the clean cache (lower is better) after repair of the cells of a bool mask, which it must not change."""

MOST_CHOICES = 50_000
"""Choices of actions that `exhaustive_search` agrees to measure."""


@dataclass(frozen=True, eq=False)
class SearchResult:
    """What a search found and what it cost.

    Attributes:
        mask: bool, of the candidates' shape: the cells of all chosen actions.
        distance: what `evaluate` said of it.
        actions: indices into the candidates, in the order in which they were taken.
        num_evaluations: calls of `evaluate`, the one of the empty choice included.
        seconds: wall time.
    """

    mask: Tensor
    distance: float
    actions: tuple[int, ...]
    num_evaluations: int
    seconds: float


def greedy_search(
    evaluate: Evaluate, candidates: Sequence[Tensor], budget_cells: int, *, max_actions: int | None = None
) -> SearchResult:
    """Take the action that lowers the distance most, again and again, until none lowers it or fits.

    With n candidates of separate cells and k actions taken: ``1 + n + (n - 1) + ...`` evaluations, k terms after the
    first, and one term more where the search stops because nothing improves.

    Args:
        evaluate: called with a new bool mask each time.
        candidates: bool masks of one shape, none empty; they may overlap.
        budget_cells: most cells that the chosen actions may hold together.
        max_actions: most actions; None for no limit.

    Raises:
        SpanError: for candidates, limits or a distance that are no such thing.
    """
    trial = _Trial(evaluate, candidates, budget_cells, max_actions)
    best = trial.start()
    while True:
        further = min(trial.extensions(best), key=lambda choice: choice.distance, default=best)
        if not further.distance < best.distance:
            return trial.result(best)
        best = further


def beam_search(
    evaluate: Evaluate,
    candidates: Sequence[Tensor],
    budget_cells: int,
    *,
    width: int = 8,
    max_actions: int | None = None,
) -> SearchResult:
    """Extend the `width` best choices by every action, again and again, until none fits; return the best one met.

    It goes on where nothing improves, so actions that help only together are found if the first of them stays among the
    `width` best. At most ``1 + n + width * ((n - 1) + (n - 2) + ...)`` evaluations, up to the limit of actions. For
    the arguments and errors see `greedy_search`.
    """
    if not _is_count(width):
        raise SpanError(f"beam_search: expected a width of at least 1, got {width!r}.")
    trial = _Trial(evaluate, candidates, budget_cells, max_actions)
    best = trial.start()
    beam = [best]
    while beam:
        further = [choice for kept in beam for choice in trial.extensions(kept)]
        beam = sorted(further, key=lambda choice: choice.distance)[:width]
        best = min([best, *beam], key=lambda choice: choice.distance)
    return trial.result(best)


def exhaustive_search(
    evaluate: Evaluate,
    candidates: Sequence[Tensor],
    budget_cells: int,
    *,
    max_actions: int | None = None,
    most: int = MOST_CHOICES,
) -> SearchResult:
    """Measure every choice of actions that fits. Among equals the smallest choice wins, then the one listed first.

    With n candidates of separate cells, and k actions that fit: ``sum over i <= k of binomial(n, i)`` evaluations. For
    the other arguments and errors see `greedy_search`.

    Args:
        most: refuse to start if more choices than this may have to be measured.

    Raises:
        SpanError: also if there are more, with their number.
    """
    trial = _Trial(evaluate, candidates, budget_cells, max_actions)
    count = sum(math.comb(len(candidates), size) for size in range(trial.most_actions + 1))
    if count > most:
        raise SpanError(
            f"exhaustive_search: {count} choices of up to {trial.most_actions} of {len(candidates)} actions, expected "
            f"{most} at most; take fewer candidates, a lower max_actions, or beam_search()."
        )
    best = trial.start()
    for size in range(1, trial.most_actions + 1):
        for actions in itertools.combinations(range(len(candidates)), size):
            choice = trial.measured(actions, torch.stack([candidates[action] for action in actions]).any(0))
            if choice is not None and choice.distance < best.distance:
                best = choice
    return trial.result(best)


@dataclass(frozen=True, eq=False)
class _Choice:
    actions: tuple[int, ...]
    mask: Tensor
    distance: float


class _Trial:
    """Candidates within their limits, and what has been measured of them."""

    def __init__(
        self, evaluate: Evaluate, candidates: Sequence[Tensor], budget_cells: int, max_actions: int | None
    ) -> None:
        self.started = time.perf_counter()
        _require_candidates(candidates)
        if not _is_count(budget_cells) or not (max_actions is None or _is_count(max_actions)):
            raise SpanError(
                f"Search: expected budget_cells and max_actions of at least 1, got {budget_cells!r} and "
                f"{max_actions!r}."
            )
        self.evaluate, self.candidates, self.budget_cells = evaluate, candidates, budget_cells
        self.most_actions = len(candidates) if max_actions is None else min(max_actions, len(candidates))
        sizes = sorted(int(candidate.sum()) for candidate in candidates)
        if sum(sizes) == int(
            functools.reduce(torch.logical_or, candidates).sum()
        ):  # no cell twice: so many fit at most
            fitting = sum(total <= budget_cells for total in itertools.accumulate(sizes))
            self.most_actions = min(self.most_actions, fitting)
        self.seen: set[bytes] = set()

    def start(self) -> _Choice:
        """The empty choice."""
        found = self.measured((), torch.zeros_like(self.candidates[0]))
        assert found is not None
        return found

    def extensions(self, choice: _Choice) -> Iterator[_Choice]:
        """`choice` with one action more, measured, for each that fits and makes for cells not yet measured."""
        if len(choice.actions) >= self.most_actions:
            return
        for action, cells in enumerate(self.candidates):
            found = self.measured((*choice.actions, action), choice.mask | cells)
            if found is not None:
                yield found

    def measured(self, actions: tuple[int, ...], mask: Tensor) -> _Choice | None:
        """A choice with its distance; None if its cells have been measured before, or are more than the budget."""
        digest = hashlib.blake2b(mask.contiguous().numpy().tobytes(), digest_size=16).digest()
        if digest in self.seen or int(mask.sum()) > self.budget_cells:
            return None
        self.seen.add(digest)
        distance = float(self.evaluate(mask.clone()))
        if math.isnan(distance):
            raise SpanError(f"Search: the distance after actions {list(actions)} is no number; check `evaluate`.")
        return _Choice(actions, mask, distance)

    def result(self, choice: _Choice) -> SearchResult:
        """What the search returns."""
        seconds = time.perf_counter() - self.started
        return SearchResult(choice.mask, choice.distance, choice.actions, len(self.seen), seconds)


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def _require_candidates(candidates: Sequence[Tensor]) -> None:
    if len(candidates) == 0:
        raise SpanError("Search: expected at least one candidate action, got none.")
    shape = candidates[0].shape
    for index, candidate in enumerate(candidates):
        if candidate.dtype != torch.bool or candidate.shape != shape or candidate.device.type != "cpu":
            raise SpanError(
                f"Search: candidate {index}: expected a bool mask {list(shape)} on the CPU, got {candidate.dtype} "
                f"{list(candidate.shape)} on {candidate.device}."
            )
        if not bool(candidate.any()):
            raise SpanError(f"Search: candidate {index}: expected at least one cell, got none.")
