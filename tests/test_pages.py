"""Pages with figures say what the committed JSON says."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

PAGES = Path(__file__).parents[1] / "benchmarks" / "pages.py"


sys.path.insert(0, str(PAGES.parent))  # as a script has it


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_pages", PAGES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGE = load()
RENDERED = PAGE.rendered()
RESULTS = sorted((PAGES.parent / "results").glob("*.json"))


@pytest.mark.parametrize("path", RENDERED, ids=lambda path: path.name)
def test_generated_pages_are_up_to_date(path: Path) -> None:
    """Run `python benchmarks/pages.py` after a benchmark."""
    assert path.read_text(encoding="utf-8") == RENDERED[path]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_say_where_they_come_from(path: Path) -> None:
    environment = json.loads(path.read_text(encoding="utf-8"))["environment"]
    assert {"editable_cache", "transformers", "torch", "python", "processor", "threads"} <= set(environment)


def test_every_marked_part_is_rendered() -> None:
    """A part between ``bench:`` comments that no function fills would go stale unseen."""
    for path in (PAGE.ROOT / "README.md", *(PAGE.ROOT / "docs").rglob("*.md")):
        marks = re.findall(r"<!-- (bench:[\w-]+) -->", path.read_text(encoding="utf-8"))
        assert not marks or path in RENDERED, path.name
        for mark in marks:
            part = RENDERED.get(path, "").split(f"<!-- {mark} -->\n")[1].split("<!--")[0]
            assert part.count("|") > 10, mark


def test_another_figure_gives_another_page() -> None:
    rotation, mrope = (json.loads((PAGE.RESULTS / f"{name}.json").read_text("utf-8")) for name in ("rotation", "mrope"))
    before = PAGE.distance_table(rotation), PAGE.moves_table(mrope)
    rotation["distance"]["Llama, theta 1e4"]["difference of angles"][-1] = 0.5
    mrope["models"]["Qwen3-VL"]["prefix"]["37"]["ways"]["all axes"]["logits"] = 0.5
    after = PAGE.distance_table(rotation), PAGE.moves_table(mrope)
    assert [a.replace("0.5", "") != b.replace("0.5", "") for a, b in zip(after, before, strict=True)] == [True, True]


def test_the_figures_support_what_the_page_says() -> None:
    rotation, mrope = (json.loads((PAGE.RESULTS / f"{name}.json").read_text("utf-8")) for name in ("rotation", "mrope"))
    assert rotation["distances"][-1] == 262_144
    for model in rotation["distance"].values():
        assert max(model["difference of angles"]) <= 1e-6
        assert min(model["float64 product"][-1], model["float32 product"][-1]) > 1e-4
    for model in mrope["models"].values():
        assert model["keys_from_positions"] <= 1e-6
        for part in model["prefix"].values():
            assert max(part["ways"]["all axes"]["keys"]) < 1e-4
            assert min(part["ways"]["temporal axis only"]["keys"]) > 0.1


HYBRIDS = json.loads((PAGE.RESULTS / "hybrids.json").read_text("utf-8"))


def test_another_figure_gives_another_page_of_hybrids() -> None:
    other = json.loads(json.dumps(HYBRIDS))
    name = next(iter(other["models"]))
    other["models"][name]["arms"]["default"]["cosine"]["median"] = 0.5
    other["cost"]["models"][name]["64"]["cell_bytes"] = 2**19
    assert PAGE.hybrids_text(other).replace("0.50000", "") != PAGE.hybrids_text(HYBRIDS)
    assert PAGE.hybrids_cost_table(other).replace("0.50", "") != PAGE.hybrids_cost_table(HYBRIDS)


@pytest.mark.parametrize("name", HYBRIDS["models"])
def test_a_composed_hybrid_beats_what_lacks_a_part(name: str) -> None:
    model = HYBRIDS["models"][name]
    arms = model["arms"]
    assert model["questions"] >= 256
    assert model["live_against_stock_worst_relative_error"] <= 1e-4
    assert model["training"]["held_out_accuracy"] >= 0.98
    default = arms["default"]["kl_nats_mean"]
    for arm in ("the chunk's own state only", "the state before it only"):
        assert arms[f"control: {arm}"]["kl_nats_mean"]["low"] > 3 * default["high"], arm
