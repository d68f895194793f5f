"""Every Python block of the README and the docs runs.

The blocks of one page run one after the other with the same names, in an empty folder. Before the first one stands a
preamble: ``model`` and ``tokenizer`` are a tiny Llama with random weights and its tokenizer, and ``from_pretrained`` of
transformers' Auto classes gives the same two, or a tiny Qwen2.5-VL and a stand-in for its processor, whatever name is
asked for, so that nothing is downloaded; ``photo`` is what that processor takes as an image. A block that must not run
has the line ``<!-- not run: reason -->`` in front of it. The README runs on SmolLM2 too (slow).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from vision_support import FAMILIES, READING, StandIn, pixels, vision_model

from editable_cache.testing.tiny_models import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>[^>]+) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.S | re.M)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def blocks(page: Path) -> list[str]:
    """Python blocks of a page that run, each moved down to its line in the page so that errors point at it."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        if match["language"] == "python" and match["reason"] is None:
            found.append("\n" * text.count("\n", 0, match.start("code")) + match["code"])
    return found


def run(page: Path, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: model)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    monkeypatch.setitem(FAMILIES, "reading", READING)
    processor = StandIn("reading", "<user>{}</user>", tokenizer)
    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", lambda *_, **__: vision_model("reading"))
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda *_, **__: processor)
    names = {"__name__": page.stem, "model": model, "tokenizer": tokenizer, "photo": pixels("reading")}
    for code in blocks(page):
        exec(compile(code, page.name, "exec"), names)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(page, tiny_model("llama"), tiny_tokenizer(), monkeypatch, tmp_path)


@pytest.mark.slow
def test_readme_runs_on_a_real_model(
    smollm2: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(ROOT / "README.md", *smollm2, monkeypatch, tmp_path)
    printed = capsys.readouterr().out
    assert "refund-policy" in printed
    assert "ok: live cells" in printed


def test_the_readme_has_its_examples() -> None:
    assert len(blocks(ROOT / "README.md")) == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_no_machine(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"/(?:home|Users|root|tmp)/\S*|\blocalhost\b", text) == []


def test_every_error_is_explained() -> None:
    import editable_cache

    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    kinds = (Exception, Warning)
    public = [name for name in editable_cache.__all__ if isinstance(getattr(editable_cache, name), type)]
    raised = [name for name in public if issubclass(getattr(editable_cache, name), kinds)]
    assert [name for name in raised if f"`{name}`" not in page] == []


def test_a_wrong_block_would_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n```python\nassert model is None\n```\n<!-- not run: never -->\n```python\n1 / 0\n```\n")
    with pytest.raises(AssertionError):
        run(page, 1, 2, monkeypatch, tmp_path)
    run(page, None, 2, monkeypatch, tmp_path)
