"""The page says what the results say, holds everything it needs, and nothing of a stranger runs in it."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cli_support import answer, json_keys, run

from editable_cache.evaluation.report import CLAIMS, Evidence, document, gather, html, judge, markdown, plot
from editable_cache.evaluation.report.blocks import Heading, Table
from editable_cache.evaluation.report.plot import Point
from editable_cache.evaluation.report.shown import STUDIES
from editable_cache.evaluation.report.views import CurveView, DotView, ScatterView, TableView, number
from editable_cache.evaluation.results import FORMAT, Results, Row
from editable_cache.evaluation.statistics import Interval

ROOT = Path(__file__).parents[2]
HOSTILE = "</td><script>alert(1)</script>|`x`\n\u202e\x1b[31m&"
VOID = {"meta", "br", "hr", "img", "link", "input"}


def rows(arms: dict[str, float]) -> list[Row]:
    """Made up: 20 items of 5 domains."""
    found: list[Row] = []
    for item in range(20):
        facts = {"task": "gated", "mode": "direct", "domain": f"domain {item // 4}"}
        found.append({"key": f"gate/item {item}", "arm": "gate", **facts, "old": True, "new": True, "update": True})
        for arm, share in arms.items():
            right = item < 20 * share
            numbers = {"correct": right, "recovery": float(right), "share": 0.02, "p_correct": 0.5}
            found.append({"key": f"direct/item {item}", "arm": arm, "set": "direct", **facts, **numbers})
    return found


def evidence(*, model: str = "made up", study: str = "frontier", **arms: float) -> Evidence:
    environment = {"editable_cache": "0", "torch": "0", "processor": "none", "threads": 1}
    return Evidence((Results(study, model, {"seed": 0}, environment, tuple(rows(arms))),))


def page_of(found: Evidence) -> str:
    return html.page(document(found, judge(CLAIMS, found)))


class Checked(HTMLParser):
    """Fails where a tag is not closed in order; collects tags, addresses and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_alone() -> None:
    found = Checked(page_of(evidence(stale=0.0, in_place=0.0, erratum=1.0, **{"selective@1": 0.0, "selective@8": 1.0})))
    assert {"table", "svg", "nav", "style"} <= found.tags
    assert found.tags & {"script", "link", "img", "iframe", "object"} == set()
    assert all(address.startswith("#") for address in found.addresses)
    for claim in CLAIMS:
        assert claim.text in found.text
    assert "@media(prefers-color-scheme:dark)" in found.text
    assert "@media print" in found.text
    assert "url(" not in found.text
    with pytest.raises(AssertionError):
        Checked("<p><b>not closed</p>")


def test_texts_of_strangers_are_texts() -> None:
    text = page_of(evidence(model=HOSTILE, **{HOSTILE: 1.0}))
    found = Checked(text)
    assert "script" not in found.tags
    assert found.handlers == []
    assert "</td><script>alert(1)</script>" in found.text
    assert not set(text) & {"\u202e", "\x1b"}
    unknown = Checked(page_of(evidence(study=HOSTILE, **{HOSTILE: 1.0})))
    assert "script" not in unknown.tags


def test_unknown_studies_are_shown() -> None:
    found = document(evidence(study="quite new", one=1.0, other=0.25), [])
    place = next(n for n, block in enumerate(found) if isinstance(block, Heading) and block.text == "quite new")
    table = found[place + 2]
    assert isinstance(table, Table)
    assert "correct" in table.head
    line = next(row for row in table.rows if "other" in row)
    assert line[table.head.index("correct")].startswith("0.250 [")


def test_figures_stand_beside_the_published_ones() -> None:
    found = document(evidence(stale=0.0, erratum=0.25), [])
    table = next(
        block for block in found if isinstance(block, Table) and "published" in block.head and "set" in block.head
    )
    line = next(row for row in table.rows if "erratum" in row)
    assert (line[table.head.index("right")][:6], line[-1]) == ("0.250 ", "1.00 at 12.0 %")


def test_domains_stand_one_by_one() -> None:
    found = document(evidence(stale=0.0, erratum=0.25), [])  # the first 5 of 20 items, of 4 in each domain
    table = next(block for block in found if isinstance(block, Table) and "domain" in block.head)
    shown = {row[1]: row[table.head.index("erratum")] for row in table.rows}
    assert [*shown] == [f"domain {number}" for number in range(5)]
    assert shown["domain 0"] == "1.000 [0.398, 1.000]"
    assert shown["domain 1"] == "0.250 [0.006, 0.806]"
    assert shown["domain 2"] == "0.000 [0.000, 0.602]"


def test_exact_cells_stand_beside_computed_ones() -> None:
    edits = evidence(**{"selective@8": 0.25}).results
    probed = {"key": "suffix/a", "probe": "suffix", "arm": "by_effect", "task": "gated", "measure": "recovery", "x": 8}
    more = Results("mechanism", "made up", {}, {}, ({**probed, "domain": "a", "value": 0.9},))
    table = next(b for b in document(Evidence((*edits, more)), []) if isinstance(b, Table) and "exact cells" in b.head)
    assert table.rows == [("made up", "8", "0.900 [0.900, 0.900]", "1", "0.250 [0.000, 0.650]", "20")]
    assert not [b for b in document(Evidence(edits), []) if isinstance(b, Table) and "exact cells" in b.head]


def test_another_result_gives_another_page() -> None:
    assert page_of(evidence(stale=0.0)) == page_of(evidence(stale=0.0))
    assert page_of(evidence(stale=0.0)) != page_of(evidence(stale=0.25))


def test_markdown_escapes_and_keeps_its_tables() -> None:
    found = markdown.page(document(evidence(model=HOSTILE, stale=0.0), []), "figures/")
    assert "<script>" not in found.replace("\\<script\\>", "")
    for line in found.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")
    tables = re.findall(r"(?:^\|.*\n)+", found, re.M)
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


@pytest.mark.parametrize("span", [(0.0, 1.0), (-0.25, 1.25), (0.0, 3.0), (0.98, 1.0)])
def test_plots_stay_within_their_borders(span: tuple[float, float]) -> None:
    middle = sum(span) / 2
    points = [Point(span[0] - 1, middle, span[0] - 2, span[1] + 2), Point(middle, span[1] + 5, middle, span[1])]
    made = (
        plot.dots(
            ["<one>", "two"], [("a&b", points), ("c", [None, points[1]])], label="<x>", span=span, published=[middle]
        ),
        plot.curves([("a", points), ("b", points[:1] * 2)], labels=("<x>", "y"), span=span),
        plot.curves([("a", [Point(1, 0.5), Point(64, 0.6)])], labels=("x", "y"), span=span, logarithmic=True),
        plot.scatter([("a", points)], labels=("x", "y"), spans=(span, span), diagonal=True),
    )
    for svg in made:
        tree = ET.fromstring(plot.standalone(svg))
        width, height = map(float, tree.attrib["viewBox"].split()[2:])
        for each in tree.iter():
            for name, most in (
                ("x", width),
                ("cx", width),
                ("x1", width),
                ("y", height),
                ("cy", height),
                ("y2", height),
            ):
                assert 0 <= float(each.attrib.get(name, 0)) <= most
    assert "<x>" not in made[0]


def test_numbers_are_written_for_people() -> None:
    assert number(Interval(-0.0001, -0.0004, 0.5, 9, 9)) == "0.000 [0.000, 0.500]"
    assert number(Interval(1234.5, 1000.4, 2000.0, 9, 9)) == "1234 [1000, 2000]"


def test_plots_have_names_of_their_own() -> None:
    views = [view for study in STUDIES for view in study.views]
    names = [view.name for view in views if isinstance(view, (DotView, CurveView, ScatterView))]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"evidence-[a-z-]+", name) for name in names)


def write(folder: Path, **changes: Any) -> Path:
    found = evidence(stale=0.0, in_place=0.0).results[0]
    content = {"format": FORMAT, "study": found.study, "model": found.model, "settings": {},
               "environment": dict(found.environment), "rows": list(found.rows), **changes}  # fmt: skip
    path = folder / "frontier-made-up.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    write(tmp_path)
    out = tmp_path / "report.html"
    found = answer("report", str(tmp_path), "-o", str(out))
    assert set(found) == json_keys("report")
    assert found["page"] == str(out)
    assert sum(found["counts"].values()) == len(CLAIMS) == len(found["verdicts"])
    statuses = {each["id"]: each["status"] for each in found["verdicts"]}
    assert statuses["in-place-ignored"] == "replicated"
    assert statuses["locality"] == "not measured"
    Checked(out.read_text(encoding="utf-8"))
    shown = run("report", str(tmp_path))
    assert shown.exit_code == 0
    assert "in-place-ignored" in shown.stdout


@pytest.mark.parametrize("changes", [{"format": FORMAT + 1}, {"rows": []}, {"rows": [1]}, {"model": None}])
def test_bad_results_end_with_two(changes: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, **changes)
    out = tmp_path / "report.html"
    result = run("report", str(path), "-o", str(out))
    assert result.exit_code == 2
    assert "frontier-made-up.json" in result.stderr
    assert not out.exists()


def test_no_results_end_with_two(tmp_path: Path) -> None:
    assert run("report", str(tmp_path)).exit_code == 2
    assert run("report", str(tmp_path / "absent")).exit_code == 2


def test_the_page_does_not_replace_what_it_is_made_of(tmp_path: Path) -> None:
    path = write(tmp_path)
    before = path.read_bytes()
    for given in (path, tmp_path):
        assert "another file than the results" in answer("report", str(given), "-o", str(path), code=2)["error"]
    assert "got a folder" in answer("report", str(path), "-o", str(tmp_path), code=2)["error"]
    assert path.read_bytes() == before


def load_page() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("evidence_page", ROOT / "benchmarks" / "evidence" / "page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_results_is_up_to_date() -> None:
    """Run ``python -m evidence.page`` in ``benchmarks`` after a measurement."""
    page = load_page()
    if not list(page.RESULTS.glob("*.json")):
        pytest.skip("nothing measured yet")
    files = page.rendered()
    assert set(page.FIGURES.glob("evidence-*.svg")) == {path for path in files if path.suffix == ".svg"}
    for path, text in files.items():
        assert path.read_text(encoding="utf-8") == text, path.name


def test_what_the_page_shows_is_what_the_benchmarks_write() -> None:
    """Every entry that a table or a plot names is in the committed results of its study."""
    found = gather([load_page().RESULTS])
    for study in STUDIES:
        written = {name for results in found.of(study.name) for row in results.rows for name in row}
        for view in study.views:
            named = [*view.values] if isinstance(view, TableView) else [getattr(view, "value", None)]
            missing = {name for name in named if name is not None} - written
            assert not written or not missing, f"{study.name}: no row has {sorted(missing)}"


def test_another_result_gives_another_page_of_results(tmp_path: Path) -> None:
    page = load_page()
    write(tmp_path)
    before = page.rendered(tmp_path)[page.PAGE]
    write(tmp_path, rows=rows({"stale": 0.0, "in_place": 1.0}))
    assert page.rendered(tmp_path)[page.PAGE] != before
