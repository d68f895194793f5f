"""From finished items to the summary and the page: known means, missing parts, half lines."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # as a script has it

import repair_page
from repair.masks import packed, unpacked
from repair.progress import finished
from repair.stats import interval
from repair.summary import laid_out, main, paired, spearman, summary

DOCUMENTS = ("a", "b", "c", "d")
BASE = {"sir": 0.8, "cacheblend": 0.6, "window": 0.2}
TIERS = {"sir": 1, "cacheblend": 2, "window": 0}
BUDGETS = (0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 1.0)
START = {"kl": 0.02, "l2": 30.0, "cosine": 0.01, "agreement": 0.9}


def recovery(name: str, document: str, budget: float) -> float:
    return 1.0 if budget == 1 else BASE[name] * budget + 0.01 * DOCUMENTS.index(document)


def grid_value(name: str, document: str) -> dict[str, Any]:
    l2 = [recovery(name, document, budget) for budget in BUDGETS]
    part = {
        "l2": l2,
        "kl": l2,
        "agreement": l2,
        "local": [-each for each in l2],
        "hidden": [[each, 1.0] for each in l2],
    }
    geometries = ("cells", "prefixes", "columns", "suffixes")
    return {"start": START, "tier": TIERS[name], "rows": dict.fromkeys(geometries, part)}


def deployable_value(name: str, document: str, shift: float) -> dict[str, Any]:
    budgets = {}
    for budget in (0.01, 0.1):
        value = recovery(name, document, budget) + shift
        score = {"l2": value, "kl": value, "agreement": 0.95}
        budgets[str(budget)] = {"recompute": score, "patch": score, "tokens": int(1000 * budget)}
    return {"start": START, "budgets": budgets}


def write(path: Path, items: list[tuple[tuple[str, ...], Any]]) -> None:
    path.write_text("".join(json.dumps({"key": key, "value": value}) + "\n" for key, value in items), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Finished items of one model; of the other there are none."""
    signals = [((document, name), grid_value(name, document)) for document in DOCUMENTS for name in BASE]
    write(tmp_path / "grid_smollm2.jsonl", signals)
    cases = [
        ((document, instruction, name), deployable_value(name, document, shift))
        for document in DOCUMENTS
        for instruction, shift in (("reviewer", 0.0), ("german", 0.2))
        for name in BASE
    ]
    score = {"l2": 1 - 2e-6}
    whole = {"start": START, "budgets": {"1.0": {"recompute": score, "patch": {"l2": 1.0}, "tokens": 1000}}}
    write(tmp_path / "deployable_smollm2.jsonl", [*cases, (("a", "reviewer", "everything"), whole)])
    same = {f"query {k}": [0.9 if j == k else 0.3 + 0.1 * k for j in range(4)] for k in range(4)}
    found = {"budgets": {"0.1": {**same, "bank, mean": [0.4, 0.5, 0.6, 0.7]}}}
    write(tmp_path / "transfer_smollm2.jsonl", [((document,), found) for document in DOCUMENTS])
    row = {"signal": "sir", "from_layer": 5, "budget": 0.1, "tokens": 240}
    items = [((name,), {"rows": [{**row, "l2": l2, "kl": -l2}]}) for name, l2 in (("a", 0.2), ("b", 0.4))]
    write(tmp_path / "resumed_smollm2.jsonl", items)
    return tmp_path


def test_means_and_intervals_are_those_of_documents(folder: Path) -> None:
    found = summary(folder)
    rows = {(row["signal"], row["geometry"]): row for row in found["grid"]["smollm2"]["rows"]}
    values = [recovery("sir", document, 0.1) for document in DOCUMENTS]
    assert rows["sir", "columns"]["l2"][5] == [round(each, 4) for each in interval(values)]
    assert rows["sir", "columns"]["l2"][5][0] == pytest.approx(0.095)
    assert rows["sir", "columns"]["l2"][-1] == [1, 1, 1]
    assert found["grid"]["smollm2"]["worst_at_full"] == 0
    hidden = found["grid"]["smollm2"]["hidden"]
    assert {(each["signal"], each["geometry"], each["budget"]) for each in hidden} == {
        ("sir", geometry, budget) for geometry in ("cells", "columns") for budget in (0.01, 0.05, 0.1)
    }
    assert hidden[2]["recovery"] == [pytest.approx(0.095), 1]


def test_cases_of_a_document_are_averaged_first(folder: Path) -> None:
    found = summary(folder)["deployable"]["smollm2"]
    assert (found["documents"], found["cases"], found["budgets"]) == (4, 8, [0.01, 0.1])
    sir = found["selectors"]["sir"]
    values = [recovery("sir", document, 0.1) + 0.1 for document in DOCUMENTS]
    assert sir["recompute"]["l2"][1] == [round(each, 4) for each in interval(values)]
    assert sir["tokens"] == [10, 100]
    assert sir["by_instruction"]["german"][1] == pytest.approx(sir["by_instruction"]["reviewer"][1] + 0.2)
    assert list(sir["minus"]) == ["cacheblend", "window"]
    assert sir["minus"]["cacheblend"][1] == [pytest.approx(0.02)] * 3
    assert found["everything"] == {"cases": 1, "recompute": pytest.approx(2e-6), "patch": 0}


def test_matched_and_mismatched_requests(folder: Path) -> None:
    ways = summary(folder)["transfer"]["smollm2"]["ways"]
    assert ways["matched"]["recovery"] == [[0.9] * 3]
    assert ways["mismatched"]["recovery"] == [[0.45] * 3]
    assert ways["bank, mean"]["recovery"] == [[0.55] * 3]
    assert ways["bank, mean"]["minus_matched"] == [[-0.35] * 3]


def test_resumed_rows_are_averaged(folder: Path) -> None:
    found = summary(folder)["resumed"]["smollm2"]
    assert found["documents"] == 2
    row = found["rows"][0]
    assert (row["signal"], row["from_layer"], row["tokens"]) == ("sir", 5, 240)
    assert (row["l2"], row["kl"]) == (pytest.approx(0.3), pytest.approx(-0.3))
    assert "| sir | 5 | 0.30 (240) |" in repair_page.resumed({"repair": summary(folder)})


def test_local_and_end_to_end(folder: Path) -> None:
    apart = summary(folder)["grid"]["smollm2"]["local_and_end"]["0.1"]
    assert apart["rows"] == {"n": 12, "spearman": -1, "apart": 0}
    assert spearman([(1, 2), (2, 9), (3, 10)]) == pytest.approx(1)
    assert spearman([(1, 2), (2, 9), (3, 2)]) == pytest.approx(0)
    assert spearman([(1, 2), (2, 2)]) == 0
    items = finished(folder / "grid_smollm2.jsonl")
    for value in items.values():
        part = value["rows"]["cells"]
        value["rows"]["cells"] = {**part, "l2": [-0.1] * 8, "local": [0.5] * 8}
    write(folder / "grid_smollm2.jsonl", list(items.items()))
    assert summary(folder)["grid"]["smollm2"]["local_and_end"]["0.1"]["cases"]["apart"] == 0.25


def test_what_is_missing_is_left_out_and_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = summary(folder)
    assert list(found) == ["settings", "grid", "deployable", "transfer", "resumed"]
    assert list(found["grid"]) == ["smollm2"]
    printed = capsys.readouterr().out
    assert "oracle, smollm2: nothing finished, left out" in printed
    assert "grid, gemma3_270m: nothing finished, left out" in printed
    assert "grid, smollm2: 4 of 8 documents" in printed


def test_half_a_line_is_as_if_it_were_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "grid_smollm2.jsonl"
    whole = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text("".join(whole[:-1]) + whole[-1][:40], encoding="utf-8")
    assert len(finished(path)) == len(whole) - 1
    rows = {row["signal"]: row for row in summary(folder)["grid"]["smollm2"]["rows"]}
    assert (rows["sir"]["documents"], rows["window"]["documents"]) == (4, 3)
    assert "grid, smollm2: window has 3 of 4 documents" in capsys.readouterr().out


def test_differences_are_of_common_cases_only() -> None:
    ours, theirs = {("a", 1): 0.5, ("a", 2): 0.7, ("b", 1): 0.9}, {("a", 1): 0.1, ("a", 2): 0.1, ("c", 1): 9.0}
    assert paired(ours, theirs) == [0.5, 0.5, 0.5]
    assert paired(ours, {}) is None


def test_a_value_that_is_no_number_leaves_its_place_empty(folder: Path) -> None:
    items = finished(folder / "grid_smollm2.jsonl")
    items["a", "sir"]["rows"]["cells"]["l2"][0] = float("nan")
    items["a", "sir"]["rows"]["cells"]["local"][1] = None
    write(folder / "grid_smollm2.jsonl", list(items.items()))
    found = summary(folder)["grid"]["smollm2"]
    row = next(row for row in found["rows"] if (row["signal"], row["geometry"]) == ("sir", "cells"))
    assert row["l2"][0] is None
    assert row["local"][1] is None
    assert row["l2"][1] is not None
    assert "NaN" not in laid_out(found)


def test_the_command_writes_valid_short_json(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = folder / "repair.json"
    monkeypatch.setattr(sys, "argv", ["summary", "--partial", str(folder), "--out", str(out)])
    main()
    text = out.read_text("utf-8")
    found = json.loads(text)
    assert {key: found[key] for key in summary(folder)} == json.loads(json.dumps(summary(folder)))
    assert "torch" in found["environment"]
    assert statistics.mean(len(line) for line in text.splitlines()) > 50


def test_masks_are_packed_and_unpacked() -> None:
    mask = torch.rand(3, 7, generator=torch.Generator().manual_seed(1)) > 0.5
    assert unpacked(packed(mask), [3, 7]) == mask.tolist()
    assert len(packed(mask)) == 6


def parts(folder: Path) -> dict[str, Any]:
    return {"repair": json.loads(json.dumps(summary(folder)))}


def test_another_figure_gives_another_page(folder: Path) -> None:
    before, after = parts(folder), parts(folder)
    sir = next(row for row in after["repair"]["grid"]["smollm2"]["rows"] if row["signal"] == "sir")
    sir["l2"][5] = [0.99, 0.98, 1.0]
    found = after["repair"]["deployable"]["smollm2"]["selectors"]["sir"]
    found["recompute"]["l2"][1] = [0.99, 0.98, 1.0]
    found["minus"]["cacheblend"][1] = [0.99, -0.98, 1.0]
    after["repair"]["transfer"]["smollm2"]["ways"]["matched"]["recovery"][0] = [0.99, 0.98, 1.0]
    after["repair"]["grid"]["smollm2"]["local_and_end"]["0.1"]["cases"]["spearman"] = 0.99
    for part in (repair_page.headline, repair_page.deployable, repair_page.transfer):
        assert "0.99 (0.98–1.00)" in part(after)
        assert "0.99 (0.98–1.00)" not in part(before)
    assert "| 0.99 (-0.98 to 1.00) |" in repair_page.paired(after)
    assert "| **0.02 (0.02–0.02)** |" in repair_page.paired(before)
    assert repair_page.local(after) != repair_page.local(before)
    assert repair_page.tables_page(after["repair"]) != repair_page.tables_page(before["repair"])


def test_marks_wait_until_there_are_figures(folder: Path) -> None:
    text = "a\n<!-- bench:repair-headline: waiting for figures -->\n<!-- /bench:repair-headline -->\nb\n"
    assert repair_page.filled(text, {}) == text
    full = repair_page.filled(text, parts(folder), {"repair-budgets"})
    assert "a\n<!-- bench:repair-headline -->\n**SmolLM2" in full
    assert "figures/repair-budgets.svg" in full
    assert "repair-masks" not in full
    assert repair_page.filled(full, parts(folder), {"repair-budgets"}) == full
    assert repair_page.filled(full, {}) == text
    with pytest.raises(KeyError, match="nothing"):
        repair_page.filled(text.replace("headline", "nothing"), {})


def test_every_part_has_its_place() -> None:
    text = (Path(__file__).parents[1] / "docs" / "repair.md").read_text("utf-8")
    marks = [match[1].removeprefix("bench:repair-") for match in repair_page.MARK.finditer(text)]
    assert sorted(marks) == sorted(repair_page.PARTS)
