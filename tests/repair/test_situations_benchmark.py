"""The judge of stale fields and its intervals: right answers pass, wrong references fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from cache_support import make_cache, shared_model, shared_tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # as a script has it

from repair.cases import Setup
from repair.judge import Judge
from repair.situations import Situation, exact, score
from repair.stats import interval

from editable_cache import EditableCache


def setup() -> Setup:
    return Setup("tiny", shared_model(), shared_tokenizer(), [], "the status is")


def stale_field() -> tuple[EditableCache, EditableCache]:
    """A cache before its field changed, and after, with stale cells behind the new value."""
    before = make_cache()
    before.append("order_status: {status} \n", name="order", fields={"status": "pending"})
    before.append("The customer asked for the refund of the order, and the order was delivered.\n", name="document")
    stale = before.fork()
    stale.refresh_field("status", "delivered")
    return before, stale


def judge_of(contaminated: EditableCache, clean: EditableCache) -> Judge:
    query = torch.tensor(setup().ids("Was the order refunded?"))
    situation = Situation(contaminated, clean, {"field": query}, None)
    return Judge(setup(), situation, query, tokens=4)


def test_exact_cells_recover_everything_and_stale_ones_nothing() -> None:
    _, stale = stale_field()
    judge = judge_of(stale, exact(setup(), stale))
    mended = stale.fork()
    mended.recompute(slice(stale.ledger.field("status").spans[0][1], None))
    assert score(judge, mended)["recovery"] == pytest.approx(1, abs=1e-4)
    assert score(judge, stale)["recovery"] == 0


def test_a_wrong_reference_fails() -> None:
    before, stale = stale_field()
    judge = judge_of(stale, exact(setup(), before))
    mended = stale.fork()
    mended.recompute(slice(stale.ledger.field("status").spans[0][1], None))
    assert score(judge, mended)["recovery"] < 0.5


def test_reported_chances_are_of_the_given_tokens() -> None:
    _, stale = stale_field()
    judge = judge_of(stale, exact(setup(), stale))
    row = score(judge, stale, (7, 9))
    chances = judge.read(stale).logits[0].double().softmax(-1)
    assert row["right_value"] == pytest.approx(float(chances[7]))
    assert row["old_value"] == pytest.approx(float(chances[9]))
    assert row["right_preferred"] == pytest.approx(float(chances[7] / (chances[7] + chances[9])))


def test_interval_agrees_with_the_normal_approximation() -> None:
    values = torch.randn(400, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mean, low, high = interval(values.tolist())
    margin = 1.96 * float(values.std()) / 20
    assert mean == pytest.approx(float(values.mean()))
    assert (mean - low, high - mean) == pytest.approx((margin, margin), rel=0.12)
    assert interval(values.tolist()) == (mean, low, high)
    _, lower, higher = interval(values.tolist(), level=0.5)
    assert low < lower < higher < high


@pytest.mark.parametrize("values", [[], [1.0, float("nan")]])
def test_interval_refuses_what_it_cannot_average(values: list[float]) -> None:
    with pytest.raises(ValueError, match="interval: expected finite numbers"):
        interval(values)
