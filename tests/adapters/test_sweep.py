"""The sweep over all model types: its committed result, that it can be had again, and that it sees what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from editable_cache.adapters import probe
from editable_cache.testing import zoo
from editable_cache.testing.sweep import Row, certify
from editable_cache.testing.sweep.page import page
from editable_cache.testing.sweep.row import TOLERANCE, VISIBLE
from editable_cache.testing.sweep.runner import Worker

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "architectures.json"
CONTENT: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
ROWS = {row["name"]: Row.from_dict(row) for row in CONTENT["rows"]}
SAME_VERSION = CONTENT["environment"]["transformers"] == transformers.__version__
NAMES = (*zoo.model_types(), *zoo.variants())
SHARDS = 24

TEN = (
    "llama",
    "gemma3_text",
    "deepseek_v3",
    "glm_moe_dsa:topk4",
    "gptj",
    "roformer",
    "bloom",
    "gpt2",
    "bamba",
    "mamba2",
)


def check(row: Row) -> None:
    """A row is as committed, and in any case nothing about it is wrong in silence."""
    assert not row.wrong, (row.name, row.wrong, row.errors)
    if not SAME_VERSION or row.name not in ROWS:
        assert row.verdict in ("refused", "not built") or row.certified, (row.name, row.unproven)
        return
    committed = ROWS[row.name]
    assert (row.verdict, row.certified) == (committed.verdict, committed.certified), (row.name, row.unproven)
    assert row.operations == committed.operations
    assert row.tensors == committed.tensors
    assert row.errors.keys() == committed.errors.keys()
    assert row.controls.keys() == committed.controls.keys()


@pytest.mark.parametrize("name", [name for name in TEN if name.split(":")[0] in zoo.model_types()])
def test_a_type_is_as_committed(name: str) -> None:
    check(certify(name))


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_type_is_as_committed(shard: int) -> None:
    with Worker() as worker:
        for row in worker.rows(NAMES[shard::SHARDS]):
            check(row)


def test_what_the_committed_result_shows() -> None:
    types = [row for name, row in ROWS.items() if ":" not in name]
    certified = {
        verdict: sum(row.certified for row in types if row.verdict == verdict) for verdict in ("rotation", "hybrid")
    }
    assert certified["rotation"] >= 160
    assert certified["hybrid"] >= 35
    assert [row.name for row in ROWS.values() if row.wrong] == []
    assert not SAME_VERSION or set(NAMES) == set(ROWS)


def test_certified_means_small_errors_and_visible_controls() -> None:
    for row in ROWS.values():
        if row.certified:
            assert row.exact, row.name
            assert max(row.exact.values()) <= TOLERANCE, row.name
            assert min(row.controls.values()) >= VISIBLE, row.name
            assert len(row.controls) >= 3, row.name
            assert {"FROZEN", "THREADED"} & set(row.errors), row.name
            assert {name.partition(",")[0] for name in row.errors} & {"FULL"}, row.name
        if row.verdict == "refused":
            assert row.reasons or row.refused, row.name


# -- the sweep itself


@pytest.fixture
def mistaken(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A self-test that makes a mistake."""
    right = probe.measure

    def measure(model: Any) -> Any:
        spec = right(model)
        if request.param == "layout":
            turned = {"half": "interleaved", "interleaved": "half"}
            layers = tuple(
                replace(
                    layer,
                    tensors=tuple(
                        t if t.rotary is None else replace(t, rotary=replace(t.rotary, layout=turned[t.rotary.layout]))
                        for t in layer.tensors
                    ),
                )
                for layer in spec.layers
            )
            return replace(spec, layers=layers)
        return replace(spec, against_moving=())

    monkeypatch.setattr(probe, "measure", measure)


@pytest.mark.parametrize("mistaken", ["layout"], indirect=True)
def test_a_mistaken_self_test_is_seen(mistaken: None) -> None:
    row = certify("llama", seed=1)
    assert {"ISO +37", "FROZEN"} <= set(row.wrong)
    assert not row.certified


@pytest.mark.parametrize("mistaken", ["no refusal"], indirect=True)
def test_a_refusal_that_is_missing_is_seen(mistaken: None) -> None:
    row = certify("gpt2", seed=1)
    assert {"ISO +37", "FROZEN"} <= set(row.wrong)


def test_a_row_survives_json() -> None:
    row = certify("llama")
    assert Row.from_dict(json.loads(json.dumps(row.to_dict()))) == row


@pytest.mark.slow
def test_a_type_that_hangs_or_dies_is_a_row() -> None:
    with Worker(seconds=0.0) as worker:
        row = worker.examine("llama")
        assert (row.verdict, row.certified) == ("failed", False)
        assert "within" in row.unproven[0]
        worker.seconds = 60.0
        assert worker.examine("llama").certified
    with Worker(most_bytes=2**20) as worker:
        assert worker.examine("gemma3_text").verdict in ("failed", "not built")


# -- the page


def test_the_page_is_generated_from_the_result() -> None:
    path = RESULTS.parents[2] / "docs" / "architectures.md"
    assert path.read_text(encoding="utf-8") == page(CONTENT)
    assert all(f"| `{name}` |" in page(CONTENT) for name in ROWS)


def test_what_is_wrong_stands_on_the_page() -> None:
    rows = [{**row, "wrong": ["FROZEN"]} if row["name"] == "llama" else row for row in CONTENT["rows"]]
    text = page({**CONTENT, "rows": rows})
    assert "WRONG: FROZEN" in text
    assert f"1 of {len(rows)} is wrong in silence" in text
    assert f"None of {len(rows)} is wrong in silence" in page(CONTENT)
