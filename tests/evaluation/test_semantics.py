"""What edits do to decisions: small models that were trained to decide, held to the committed results.

The stale cache must give the old answer and a full prefill the new one, and what each arm recovers must lie within the
interval that `benchmarks/results/evidence` states for it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from editable_cache.evaluation.arms import FRONTIER
from editable_cache.evaluation.results import Results, Run, load
from editable_cache.evaluation.statistics import Interval, bootstrap
from editable_cache.evaluation.studies.frontier import possible, run_frontier
from editable_cache.evaluation.tasks import ItemFile, answered, read_items

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = sorted(path.parent.name for path in (BENCHMARKS / "models").glob("small-*/items.json"))
ARMS = [name for name in FRONTIER if not name.startswith("selective@") or name in ("selective@1", "selective@8")]

if not NAMES:
    pytest.skip("no small model in this copy: cd benchmarks && python -m training.small all", allow_module_level=True)


@cache
def loaded(name: str) -> tuple[Any, Any, ItemFile]:
    folder = BENCHMARKS / "models" / name
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder), read_items(folder / "items.json")


@cache
def measured(name: str) -> Results:
    """Every third direct item, now: all fields, both calls, both directions."""
    model, tokenizer, given = loaded(name)
    items = [item for item in given.items if item.mode == "direct"][::3]
    run = Run(None, study="frontier", model=name, settings={})
    run_frontier(model, tokenizer, items, run, arms=possible(ARMS, items, model), erratum=given.erratum, label="direct")
    return run.results()


@cache
def stated(name: str) -> Results:
    return load(BENCHMARKS / "results" / "evidence" / f"frontier-{name}.json")


def of(results: Results, arm: str, measure: str) -> Interval:
    rows = [row for row in results.where(set="direct", arm=arm) if row[measure] is not None]
    return bootstrap([float(row[measure]) for row in rows], [row["domain"] for row in rows])


def within(found: Interval, told: Interval) -> bool:
    """The mean of fewer items lies in the stated interval, or theirs reaches its mean."""
    return told.low - 1e-6 <= found.mean <= told.high + 1e-6 or found.low <= told.mean <= found.high


@pytest.mark.parametrize("name", NAMES)
def test_a_stale_cache_gives_the_old_answer_and_a_full_prefill_the_new_one(name: str) -> None:
    assert of(measured(name), "stale", "correct").mean <= 0.1
    assert of(measured(name), "full", "correct").mean >= 0.9
    assert of(measured(name), "suffix", "recovery").mean == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("name", NAMES)
def test_what_an_arm_recovers_is_what_the_results_say(name: str, arm: str) -> None:
    model = loaded(name)[0]
    if not possible([arm], [], model):
        pytest.skip("a recurrent state can't be computed again at chosen tokens")
    for measure in ("recovery", "correct"):
        found, told = of(measured(name), arm, measure), of(stated(name), arm, measure)
        assert within(found, told), f"{measure}: {found} now, {told} stated"


@pytest.mark.parametrize("name", NAMES)
def test_another_arm_is_not_within_that_interval(name: str) -> None:
    """The comparison can fail: what `stale` recovers is not what the results say of `full`, nor the other way round."""
    assert not within(of(measured(name), "stale", "recovery"), of(stated(name), "full", "recovery"))
    assert not within(of(measured(name), "full", "recovery"), of(stated(name), "stale", "recovery"))


@pytest.mark.parametrize("name", NAMES)
def test_a_chain_of_thought_ends_in_the_right_call(name: str) -> None:
    model, tokenizer, given = loaded(name)
    said = []
    asked = [item for item in given.items if item.mode == "cot"][::4]
    for item in asked:
        ids = torch.tensor([tokenizer(item.context(item.old) + item.question).input_ids])
        mask, pad = torch.ones_like(ids), tokenizer.pad_token_id
        with torch.no_grad():
            written = model.generate(ids, attention_mask=mask, max_new_tokens=32, do_sample=False, pad_token_id=pad)
        said.append(answered(item, tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)))
    assert sum(value == item.old for value, item in zip(said, asked, strict=True)) >= 0.9 * len(asked)
