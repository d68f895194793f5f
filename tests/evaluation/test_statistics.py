"""Statistics against known answers, and against what they must not say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from editable_cache.errors import TaskError
from editable_cache.evaluation.statistics import adjusted, bootstrap, gee_logistic, mcnemar, share, tost


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    """200 samples of 20 clusters with a strong effect of the cluster; items alone would cover far less."""
    rng, covered, naive = np.random.default_rng(0), 0, 0
    for seed in range(200):
        values = (rng.normal(size=20)[:, None] + 0.3 * rng.normal(size=(20, 5))).ravel()
        clusters = np.repeat(np.arange(20), 5).tolist()
        found = bootstrap(values.tolist(), clusters, resamples=400, seed=seed)
        covered += found.low <= 0 <= found.high
        alone = bootstrap(values.tolist(), resamples=400, seed=seed)
        naive += alone.low <= 0 <= alone.high
    assert 0.87 < covered / 200 <= 0.98
    assert naive / 200 < 0.75


def test_shares_of_few_answers_are_exact() -> None:
    assert (share([True] * 4).low, share([True] * 4).high) == pytest.approx((0.025**0.25, 1.0))
    assert (share([False] * 4).low, share([False] * 4).high) == pytest.approx((0.0, 1 - 0.025**0.25))
    half = share([True, False])
    assert (half.mean, half.low, half.high, half.n) == pytest.approx((0.5, 0.0126, 0.9874, 2), abs=1e-4)
    with pytest.raises(TaskError, match="at least one answer"):
        share([])


def test_the_mean_is_that_of_items_and_the_interval_repeats() -> None:
    values, clusters = [1.0, 1.0, 1.0, 0.0], ["a", "a", "a", "b"]
    found = bootstrap(values, clusters)
    assert (found.mean, found.n, found.clusters) == (0.75, 4, 2)
    assert (found.low, found.high) == (0.0, 1.0)
    assert bootstrap(values, clusters) == found


def test_certainty_is_not_claimed_from_few_items() -> None:
    """Of ten times yes, the exact two-sided bound of Clopper and Pearson is 0.6915."""
    always = bootstrap([True] * 10)
    assert always.low == pytest.approx(0.6915, abs=1e-4)
    assert always.high == 1.0
    never = bootstrap([0.0] * 10, counted=True)
    assert (never.low, never.high) == (0.0, pytest.approx(0.3085, abs=1e-4))
    assert bootstrap([1.0] * 10).low == 1.0  # a measure that is no answer: all are the same


@pytest.mark.parametrize("values", [[], [math.nan], [1.0, math.inf]])
def test_no_mean_of_nothing(values: list[float]) -> None:
    with pytest.raises(TaskError, match="finite"):
        bootstrap(values)


def test_clusters_must_fit() -> None:
    with pytest.raises(TaskError, match="a cluster for each"):
        bootstrap([1.0, 2.0], ["a"])


def test_equivalence_is_found_and_not_invented() -> None:
    near = np.random.default_rng(0).normal(0.0, 0.05, 200)
    assert tost(near.tolist(), 0.03).p < 0.05
    assert tost((near + 0.03).tolist(), 0.03).p > 0.05
    assert tost(near[:3].tolist(), 0.03).p > 0.05  # too few to tell
    assert tost([0.0, 0.0], 0.03).p == 0.0
    assert tost([0.1, 0.1], 0.03).p == 1.0
    with pytest.raises(TaskError, match="at least two"):
        tost([0.0], 0.03)


def test_mcnemar_counts_disagreements() -> None:
    """25 against 1 discordant: the exact binomial p is 8e-7 (the study, appendix G)."""
    first = [True] * 25 + [False] + [True] * 54
    second = [False] * 25 + [True] + [True] * 54
    found = mcnemar(first, second)
    assert found.statistic == 24
    assert found.p == pytest.approx(2 * 27 / 2**26, rel=1e-6)
    assert mcnemar(first, first).p == 1.0
    with pytest.raises(TaskError, match="one length"):
        mcnemar([True], [])


def test_gee_finds_the_effect_that_is_there() -> None:
    rng = np.random.default_rng(1)
    clusters = np.repeat(np.arange(60), 10)
    late, noise = rng.integers(0, 2, 600), rng.normal(size=600)
    odds = 0.5 - 1.2 * late + 0.5 * rng.normal(size=60)[clusters]
    outcomes = rng.random(600) < 1 / (1 + np.exp(-odds))
    found = gee_logistic(outcomes.tolist(), {"late": late.tolist(), "noise": noise.tolist()}, clusters.tolist())
    assert -1.6 < found["late"].statistic < -0.7
    assert found["late"].p < 1e-4
    assert found["noise"].p > 0.05


def test_gee_says_where_there_is_no_coefficient() -> None:
    found = gee_logistic([True, True, False, False], {"x": [1, 1, 0, 0]}, [0, 1, 0, 1])
    assert found["x"].statistic == math.inf
    assert math.isnan(found["x"].p)
    with pytest.raises(TaskError, match="one length"):
        gee_logistic([True], {"x": []}, [0])


def test_benjamini_hochberg() -> None:
    """The worked example of Benjamini & Hochberg 1995, section 3.1: at 0.05 four of fifteen are kept."""
    p = [
        0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262, 0.5719, 0.6528,
        0.7590, 1.0,
    ]  # fmt: skip
    assert sum(value <= 0.05 for value in adjusted(p)) == 4
    assert adjusted([]) == []
    assert adjusted([0.2]) == [0.2]
