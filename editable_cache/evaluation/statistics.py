"""Statistics of the evaluation: items of one domain are not independent, so domains are what is drawn again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from editable_cache.errors import TaskError

RESAMPLES = 10_000


@dataclass(frozen=True)
class Interval:
    """A mean with its bounds.

    Attributes:
        mean, low, high: of the measured quantity.
        n: items. clusters: groups that were drawn again.
    """

    mean: float
    low: float
    high: float
    n: int
    clusters: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Test:
    """Outcome of a test.

    Attributes:
        statistic: what it is depends on the test; see there.
        p: two-sided, for ``tost`` the larger of its two.
        n: items.
    """

    statistic: float
    p: float
    n: int


def bootstrap(
    values: Sequence[float],
    clusters: Sequence[Any] | None = None,
    *,
    counted: bool | None = None,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Mean with a percentile interval from drawing whole clusters again (Field & Welsh 2007; the study's appendix H).

    Where every answer is a yes, or every one a no, resampling would claim certainty; the bound is then the exact one of
    Clopper and Pearson for that many items.

    Args:
        values: one per item, finite.
        clusters: the group of each item; without, each item is its own.
        counted: whether the values are answers yes and no; by default, whether they are bools.

    Raises:
        TaskError: for no value, one that is not finite, or another number of clusters.
    """
    found = np.asarray(values, dtype=np.float64)
    if not found.size or not np.isfinite(found).all():
        raise TaskError(f"bootstrap: expected finite numbers, at least one, got {list(values)[:5]}.")
    groups = list(range(found.size)) if clusters is None else list(clusters)
    if len(groups) != found.size:
        raise TaskError(f"bootstrap: expected a cluster for each of {found.size} values, got {len(groups)}.")
    names = list(dict.fromkeys(groups))
    index = np.asarray([names.index(group) for group in groups])
    sums = np.bincount(index, weights=found, minlength=len(names))
    counts = np.bincount(index, minlength=len(names))
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(names), size=(resamples, len(names)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    if counted is None:
        counted = all(isinstance(value, (bool, np.bool_)) for value in values)
    if counted and (found == found[0]).all():
        bound = ((1 - level) / 2) ** (1 / found.size)
        low, high = (bound, 1.0) if found[0] else (0.0, 1 - bound)
    return Interval(float(found.mean()), float(low), float(high), int(found.size), len(names))


def share(answers: Sequence[bool]) -> Interval:
    """Share of yes with the exact 95 % interval (Clopper & Pearson 1934), for few answers taken as independent.

    Raises:
        TaskError: for no answer.
    """
    if not answers:
        raise TaskError("share: expected at least one answer, got none.")
    count = sum(map(bool, answers))
    low, high = _statsmodels("stats.proportion").proportion_confint(count, len(answers), method="beta")
    return Interval(count / len(answers), float(low), float(high), len(answers), len(answers))


def tost(differences: Sequence[float], margin: float) -> Test:
    """Two one-sided tests: is the mean difference within ``(-margin, margin)`` (Schuirmann 1987)?

    The statistic is the mean difference. Equivalent at 0.05 if ``p < 0.05``. Differences that are all the same leave no
    variance to test: p is then 0 inside the margin and 1 outside.
    """
    found = np.asarray(differences, dtype=np.float64)
    if found.size < 2:
        raise TaskError(f"tost: expected at least two differences, got {found.size}.")
    if np.ptp(found) == 0:
        return Test(float(found[0]), 0.0 if abs(float(found[0])) < margin else 1.0, int(found.size))
    p = _statsmodels("stats.weightstats").DescrStatsW(found).ttost_mean(-margin, margin)[0]
    return Test(float(found.mean()), float(p), int(found.size))


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> Test:
    """Exact test of two paired yes-or-no measures; the statistic is (only first) - (only second), in items."""
    a, b = np.asarray(first, dtype=bool), np.asarray(second, dtype=bool)
    if a.size != b.size or not a.size:
        raise TaskError(f"mcnemar: expected two lists of one length, got {a.size} and {b.size}.")
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    table = [[int((a & b).sum()), only_a], [only_b, int((~a & ~b).sum())]]
    p = _statsmodels("stats.contingency_tables").mcnemar(table, exact=True).pvalue
    return Test(float(only_a - only_b), float(p), int(a.size))


def gee_logistic(
    outcomes: Sequence[bool], factors: Mapping[str, Sequence[float]], clusters: Sequence[Any]
) -> dict[str, Test]:
    """Logistic regression whose errors may be correlated within clusters (Liang & Zeger 1986, exchangeable).

    Returns:
        For each factor its coefficient in log-odds and the robust p. A factor that separates the outcomes has no finite
        coefficient: its p is nan and the coefficient is infinite with its sign.
    """
    y = np.asarray(outcomes, dtype=np.float64)
    columns = {name: np.asarray(values, dtype=np.float64) for name, values in factors.items()}
    if not y.size or any(column.size != y.size for column in columns.values()) or len(clusters) != y.size:
        raise TaskError("gee_logistic: expected outcomes, factors and clusters of one length, at least one.")
    separating = {name: sign for name, column in columns.items() if (sign := _separates(column, y))}
    kept = {name: column for name, column in columns.items() if name not in separating}
    tests = {name: Test(sign * float("inf"), float("nan"), int(y.size)) for name, sign in separating.items()}
    if kept and 0 < y.mean() < 1:
        api = _statsmodels("api")
        design = np.column_stack([np.ones(y.size), *kept.values()])
        groups: NDArray[Any] = np.unique(np.asarray([str(cluster) for cluster in clusters]), return_inverse=True)[1]
        model = api.GEE(
            y, design, groups=groups, family=api.families.Binomial(), cov_struct=api.cov_struct.Exchangeable()
        )
        fitted = model.fit()
        for place, name in enumerate(kept, start=1):
            tests[name] = Test(float(fitted.params[place]), float(fitted.pvalues[place]), int(y.size))
    return tests


def adjusted(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for the false discovery rate (Benjamini & Hochberg 1995), in the order given."""
    if not len(p_values):
        return []
    return [float(p) for p in _statsmodels("stats.multitest").multipletests(list(p_values), method="fdr_bh")[1]]


def _separates(column: NDArray[np.float64], outcome: NDArray[np.float64]) -> int:
    """1 or -1 if the factor alone tells a yes from a no without error."""
    yes, no = column[outcome == 1], column[outcome == 0]
    if not yes.size or not no.size:
        return 0
    return 1 if yes.min() > no.max() else -1 if yes.max() < no.min() else 0


def _statsmodels(name: str) -> ModuleType:
    try:
        import importlib

        return importlib.import_module(f"statsmodels.{name}")
    except ImportError as error:
        raise ImportError("this test needs statsmodels: pip install 'editable-cache[evaluation]'") from error
