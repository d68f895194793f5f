"""Pages with figures say what the committed JSON says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

PAGES = Path(__file__).parents[1] / "benchmarks" / "pages.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_pages", PAGES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RENDERED = load().rendered()


@pytest.mark.parametrize("path", RENDERED, ids=lambda path: path.name)
def test_generated_pages_are_up_to_date(path: Path) -> None:
    """Run `python benchmarks/pages.py` after a benchmark."""
    assert path.read_text(encoding="utf-8") == RENDERED[path]
