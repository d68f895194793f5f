"""A report as one HTML page that needs nothing else: no script, no file, no network."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from editable_cache.evaluation.report.blocks import Block, Figure, Heading, Paragraph, Table, harmless
from editable_cache.evaluation.report.claim import STATUSES

SIGNS = dict(zip(STATUSES, ("✓", "±", "?", "✗", "–", "○"), strict=True))
"""A status is told apart without its colour."""

CSS = """
:root{color-scheme:light dark;--ink:#1b1f24;--paper:#fff;--soft:#f3f5f7;--line:#d4dae0;--muted:#59636e}
@media(prefers-color-scheme:dark){:root{--ink:#dfe4ea;--paper:#14171a;--soft:#1e2328;--line:#384048;--muted:#9aa5b1}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:84rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:1.7rem;line-height:1.2}h2{margin-top:2.6rem;border-bottom:1px solid var(--line);padding-bottom:.2rem}
h3{margin-top:1.8rem;font-size:1.05rem}p{max-width:46rem}nav{font-size:.92rem}nav a{margin-right:1rem}
a{color:inherit}
.scroll{overflow-x:auto;margin:1rem 0}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:.3rem .7rem .3rem 0;border-bottom:1px solid var(--line);
overflow-wrap:break-word;max-width:34rem}
th{color:var(--muted);font-weight:600;position:sticky;top:0;background:var(--paper)}
td.wide{min-width:15rem}
td.status{white-space:nowrap;font-weight:600}
td.s0{color:#1a7f4e}td.s1{color:#9a6700}td.s2{color:#c2383a}td.s3,td.s4{color:var(--muted)}
@media(prefers-color-scheme:dark){td.s0{color:#4fc48a}td.s1{color:#d9a63a}td.s2{color:#f0797b}}
figure{margin:1.2rem 0;overflow-x:auto}figcaption{color:var(--muted);font-size:.9rem;margin-bottom:.3rem}
svg.plot{max-width:100%;height:auto;min-width:34rem;font:13px system-ui,sans-serif;color:var(--ink)}
svg.plot text{fill:currentColor}svg.plot .grid{stroke:var(--line)}svg.plot .axis{stroke:currentColor}
@media print{:root{--ink:#1b1f24;--paper:#fff;--line:#d4dae0;--muted:#59636e}
main{max-width:none;padding:0}.scroll,figure{overflow:visible}svg.plot{min-width:0}
@page{size:A4 landscape;margin:12mm}table{font-size:.66rem;width:100%}td.wide{min-width:0}th{position:static}
td.status{white-space:normal}h2{break-after:avoid}tr,figure{break-inside:avoid}nav{display:none}}
"""


def page(blocks: Sequence[Block]) -> str:
    """The whole document. Every text is data and is escaped."""
    title = next((block.text for block in blocks if isinstance(block, Heading) and block.level == 1), "Report")
    body = "\n".join(_parts(blocks))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def text(raw: str) -> str:
    """Escaped, and harmless to whoever looks at the source."""
    return escape(harmless(raw))


def _parts(blocks: Sequence[Block]) -> Iterable[str]:
    for number, block in enumerate(blocks):
        if isinstance(block, Heading):
            yield f'<h{block.level} id="{_anchor(block.text, number)}">{text(block.text)}</h{block.level}>'
            if block.level == 1:
                yield _contents(blocks)
        elif isinstance(block, Paragraph):
            yield f"<p>{text(block.text)}</p>"
        elif isinstance(block, Table):
            yield _table(block)
        else:
            yield _figure(block)


def _contents(blocks: Sequence[Block]) -> str:
    links = (
        f'<a href="#{_anchor(block.text, number)}">{text(block.text)}</a>'
        for number, block in enumerate(blocks)
        if isinstance(block, Heading) and block.level == 2
    )
    return f"<nav>{' '.join(links)}</nav>"


def _anchor(title: str, number: int) -> str:
    return f"{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-') or 'part'}-{number}"


def _table(block: Table) -> str:
    head = "".join(f'<th scope="col">{text(cell)}</th>' for cell in block.head)
    rows = "\n".join(f"<tr>{''.join(_cells(block, row))}</tr>" for row in block.rows)
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>'


def _cells(block: Table, row: Sequence[str]) -> Iterable[str]:
    return (_cell(cell, number == block.status, number in block.wide) for number, cell in enumerate(row))


def _cell(cell: str, is_status: bool, is_wide: bool) -> str:
    place = next((number for number, status in enumerate(STATUSES) if status == cell), None)
    if not is_status or place is None:
        lines = "<br>".join(text(line) for line in cell.split("\n"))
        return f'<td class="wide">{lines}</td>' if is_wide else f"<td>{lines}</td>"
    return f'<td class="status s{place}">{SIGNS[STATUSES[place]]} {text(cell)}</td>'


def _figure(block: Figure) -> str:
    return f"<figure>\n<figcaption>{text(block.title)}</figcaption>\n{block.svg}\n</figure>"
