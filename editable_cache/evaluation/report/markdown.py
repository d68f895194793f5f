"""A report as Markdown, with its plots as files beside it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from editable_cache.evaluation.report.blocks import Block, Heading, Paragraph, Table, harmless


def page(blocks: Sequence[Block], figures: str) -> str:
    """The page; plots are linked as ``{figures}NAME.svg``."""
    return "\n\n".join(_part(block, figures) for block in blocks) + "\n"


def _part(block: Block, figures: str) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {text(block.text)}"
    if isinstance(block, Paragraph):
        return "\n".join(_wrapped(text(block.text)))
    if isinstance(block, Table):
        return _table(block)
    return f"**{text(block.title)}**\n\n![{text(block.title)}]({figures}{block.name}.svg)"


def text(raw: str) -> str:
    """On one line, with everything escaped that Markdown or HTML would read."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", harmless(raw))


def _table(block: Table) -> str:
    lines = [_row(block.head), "|" + "---|" * len(block.head), *map(_row, block.rows)]
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join('<br>'.join(map(text, cell.split(chr(10)))) for cell in cells)} |"


def _wrapped(line: str, width: int = 118) -> Iterable[str]:
    """Lines of at most this width, broken at spaces."""
    held = ""
    for word in line.split():
        if held and len(held) + 1 + len(word) > width:
            yield held
            held = word
        else:
            held = f"{held} {word}" if held else word
    yield held
