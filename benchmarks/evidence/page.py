"""``docs/results.md`` and its plots from the committed JSON: ``python -m evidence.page``. Nothing in them is typed by
hand.
"""

from __future__ import annotations

from pathlib import Path

from editable_cache.evaluation.report import CLAIMS, document, gather, judge, markdown, plot
from editable_cache.evaluation.report.blocks import Figure

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "evidence"
PAGE = ROOT / "docs" / "results.md"
FIGURES = ROOT / "docs" / "figures"

HEAD = (
    "Generated from `benchmarks/results/evidence` by `python -m evidence.page` (in `benchmarks`). The same as one\n"
    "HTML page, with wide tables that scroll: `editable-cache report benchmarks/results/evidence -o report.html`."
)


def main() -> None:
    """Write the page and its plots; plots that are no longer part of it are removed."""
    files = rendered()
    for path in FIGURES.glob("evidence-*.svg"):
        if path not in files:
            path.unlink()
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")


def rendered(results: Path = RESULTS) -> dict[Path, str]:
    """Each generated file with the text that it should have."""
    evidence = gather([results])
    blocks = document(evidence, judge(CLAIMS, evidence))
    plots = {FIGURES / f"{block.name}.svg": plot.standalone(block.svg) for block in blocks if isinstance(block, Figure)}
    title, rest = markdown.page(blocks, "figures/").split("\n\n", 1)
    return {PAGE: f"{title}\n\n{HEAD}\n\n{rest}", **plots}


if __name__ == "__main__":
    main()
