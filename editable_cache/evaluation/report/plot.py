"""Plots as SVG text: points with intervals, curves with bands, scatter. The same input gives the same bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from editable_cache.evaluation.report.blocks import harmless

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720, 210, 24, 14, 46
COLOURS = ("#2b7bba", "#d5702a", "#1f9d78", "#b0579c", "#8a8320", "#6c6fc4", "#c44e52", "#4b9fb5")
"""Readable on white and on black; series differ in the shape of their marks too."""

MARKS = ("circle", "square", "triangle", "diamond")

STYLE = (
    "<style>.plot{color:#222;font:13px system-ui,sans-serif}.plot text{fill:currentColor}.plot .grid{stroke:#8884}"
    ".plot .axis{stroke:currentColor}@media(prefers-color-scheme:dark){.plot{color:#ddd}}</style>"
)
"""For a plot in a file of its own; a page brings its own colours."""


@dataclass(frozen=True)
class Point:
    """One measured point.

    Attributes:
        x, y: where it stands; in ``dots`` only ``x``.
        low, high: bounds of ``x`` in ``dots``, of ``y`` in ``curves``; None without.
    """

    x: float
    y: float = 0.0
    low: float | None = None
    high: float | None = None


def dots(
    rows: Sequence[str],
    series: Sequence[tuple[str, Sequence[Point | None]]],
    *,
    label: str,
    span: tuple[float, float],
    published: Sequence[float | None] = (),
) -> str:
    """One line for each of ``rows``, on it a point with its interval for each series, and the published figure as a
    hollow diamond.
    """
    step = max(18.0, 11.0 * len(series) + 6)
    height = TOP + step * len(rows) + BOTTOM + _legend_height(len(series))
    x = _scale(span, LEFT, WIDTH - RIGHT)
    bottom = TOP + step * len(rows)
    parts = _x_axis(span, x, bottom, label)
    for number, name in enumerate(rows):
        middle = TOP + step * (number + 0.5)
        parts.append(_text(LEFT - 10, middle + 4, name, "end"))
        for place, (title, points) in enumerate(series):
            point = points[number]
            if point is None:
                continue
            y = middle + 11 * (place - (len(series) - 1) / 2)
            if point.low is not None and point.high is not None:
                parts.append(_line(x(point.low), y, x(point.high), y, _colour(place)))
            hint = f"{title}, {name}: {point.x:.3f}"
            parts.append(_mark(x(point.x), y, place, hint))
        given = published[number] if number < len(published) else None
        if given is not None:
            parts.append(_hollow(x(given), middle, f"published: {given:g}"))
    names = [name for name, _ in series]
    return _svg(height, parts + _legend(names, bottom + BOTTOM, published=any(p is not None for p in published)))


def curves(
    series: Sequence[tuple[str, Sequence[Point]]],
    *,
    labels: tuple[str, str],
    span: tuple[float, float],
    logarithmic: bool = False,
) -> str:
    """A curve with a band for each series."""
    xs = [point.x for _, points in series for point in points]
    bounds = (min(xs), max(xs)) if min(xs) < max(xs) else (min(xs) - 0.5, max(xs) + 0.5)
    bottom, left = 300.0, 64
    height = bottom + BOTTOM + _legend_height(len(series))
    turn: Callable[[float], float] = math.log2 if logarithmic and bounds[0] > 0 else float
    across = _scale((turn(bounds[0]), turn(bounds[1])), left + 8, WIDTH - RIGHT)
    y = _scale(span, bottom, TOP)
    parts = []
    for tick in _ticks(span):
        parts.append(_line(left, y(tick), WIDTH - RIGHT, y(tick), None, "grid"))
        parts.append(_text(left - 8, y(tick) + 4, f"{tick:g}", "end"))
    shown = sorted(set(xs)) if len(set(xs)) <= 10 else [tick for tick in _ticks(bounds) if tick >= bounds[0]]
    for tick in shown:
        parts.append(_text(across(turn(tick)), bottom + 18, f"{tick:g}"))
    parts.append(_line(left, bottom, WIDTH - RIGHT, bottom, None, "axis"))
    parts.append(_text((left + WIDTH - RIGHT) / 2, bottom + 38, labels[0]))
    parts.append(
        f'<text transform="translate(14 {_n((TOP + bottom) / 2)}) rotate(-90)" text-anchor="middle">'
        f"{_safe(labels[1])}</text>"
    )
    for place, (title, points) in enumerate(series):
        ordered = sorted(points, key=lambda point: point.x)
        banded = [point for point in ordered if point.low is not None and point.high is not None]
        if len(banded) > 1:
            edge = [(across(turn(p.x)), y(p.high or 0.0)) for p in banded]
            edge += [(across(turn(p.x)), y(p.low or 0.0)) for p in reversed(banded)]
            parts.append(f'<polygon points="{_path(edge)}" fill="{_colour(place)}" fill-opacity="0.13"/>')
        line = [(across(turn(p.x)), y(p.y)) for p in ordered]
        parts.append(f'<polyline points="{_path(line)}" fill="none" stroke="{_colour(place)}" stroke-width="2"/>')
        for p in ordered if len(ordered) <= 40 else ():
            parts.append(_mark(across(turn(p.x)), y(p.y), place, f"{title}, {p.x:g}: {p.y:.3f}"))
    return _svg(height, parts + _legend([name for name, _ in series], bottom + BOTTOM))


def scatter(
    series: Sequence[tuple[str, Sequence[Point]]],
    *,
    labels: tuple[str, str],
    spans: tuple[tuple[float, float], tuple[float, float]],
    diagonal: bool = False,
) -> str:
    """Points, and the line of equal values if ``diagonal``."""
    bottom, left, right = 400.0, 64, 480
    height = bottom + BOTTOM + _legend_height(len(series))
    x, y = _scale(spans[0], left, right), _scale(spans[1], bottom, TOP)
    parts = []
    for tick in _ticks(spans[1]):
        parts.append(_line(left, y(tick), right, y(tick), None, "grid"))
        parts.append(_text(left - 8, y(tick) + 4, f"{tick:g}", "end"))
    for tick in _ticks(spans[0]):
        parts.append(_line(x(tick), TOP, x(tick), bottom, None, "grid"))
        parts.append(_text(x(tick), bottom + 18, f"{tick:g}"))
    parts.append(_text((left + right) / 2, bottom + 38, labels[0]))
    parts.append(
        f'<text transform="translate(14 {_n((TOP + bottom) / 2)}) rotate(-90)" text-anchor="middle">'
        f"{_safe(labels[1])}</text>"
    )
    if diagonal:
        low, high = max(span[0] for span in spans), min(span[1] for span in spans)
        parts.append(_line(x(low), y(low), x(high), y(high), None, "axis"))
    for place, (title, points) in enumerate(series):
        for point in points:
            hint = f"{title}: {point.x:.3f}, {point.y:.3f}"
            parts.append(_mark(x(point.x), y(point.y), place, hint, faint=len(points) > 3))
    return _svg(height, parts + _legend([name for name, _ in series], bottom + BOTTOM))


def standalone(svg: str) -> str:
    """A plot as a file of its own, light or dark as the reader has it."""
    head, rest = svg.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg">{STYLE}{rest}\n'


def _svg(height: float, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return f'<svg class="plot" role="img" viewBox="0 0 {WIDTH} {_n(height)}" width="{WIDTH}">\n{body}\n</svg>'


def _scale(span: tuple[float, float], start: float, stop: float) -> Callable[[float], float]:
    """From values to pixels; what lies outside is drawn at the edge."""
    low, high = span
    width = (high - low) or 1.0
    return lambda value: start + (min(max(value, low), high) - low) / width * (stop - start)


def _x_axis(span: tuple[float, float], x: Callable[[float], float], bottom: float, label: str) -> list[str]:
    parts = []
    for tick in _ticks(span):
        parts.append(_line(x(tick), TOP, x(tick), bottom, None, "grid"))
        parts.append(_text(x(tick), bottom + 16, f"{tick:g}"))
    return [*parts, _text((x(span[0]) + x(span[1])) / 2, bottom + 34, label)]


def _ticks(span: tuple[float, float]) -> list[float]:
    """About five round values within the span."""
    low, high = span
    rough = (high - low) / 5 or 1.0
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round((first + number) * step, 10) for number in range(int((high - first * step) / step + 1e-9) + 1)]


def _legend_height(count: int) -> float:
    return 20.0 * math.ceil((count + 1) / 3) + 8


def _legend(names: Sequence[str], top: float, *, published: bool = False) -> list[str]:
    parts, shown = [], len(names) + published
    for place in range(shown):
        x, y = 30 + 230 * (place % 3), top + 14 + 20 * (place // 3)
        if place < len(names):
            parts += [_mark(x, y, place, ""), _text(x + 12, y + 4, names[place], "start")]
        else:
            parts += [_hollow(x, y, ""), _text(x + 12, y + 4, "published", "start")]
    return parts


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _mark(x: float, y: float, place: int, hint: str, *, faint: bool = False) -> str:
    kind = MARKS[(place + place // len(COLOURS)) % len(MARKS)]
    fill = f'fill="{_colour(place)}"' + (' fill-opacity="0.55"' if faint else "")
    title = f"<title>{_safe(hint)}</title>" if hint else ""
    if kind == "circle":
        return f'<circle cx="{_n(x)}" cy="{_n(y)}" r="4.2" {fill}>{title}</circle>'
    shapes = {
        "square": ((-3.8, -3.8), (3.8, -3.8), (3.8, 3.8), (-3.8, 3.8)),
        "triangle": ((0, -4.8), (4.6, 3.6), (-4.6, 3.6)),
        "diamond": ((0, -5.2), (5.2, 0), (0, 5.2), (-5.2, 0)),
    }
    return f'<polygon points="{_path([(x + dx, y + dy) for dx, dy in shapes[kind]])}" {fill}>{title}</polygon>'


def _hollow(x: float, y: float, hint: str) -> str:
    edge = _path([(x + dx, y + dy) for dx, dy in ((0, -6.5), (6.5, 0), (0, 6.5), (-6.5, 0))])
    title = f"<title>{_safe(hint)}</title>" if hint else ""
    return f'<polygon points="{edge}" fill="none" class="axis" stroke-width="1.5">{title}</polygon>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str | None, kind: str = "") -> str:
    style = f'stroke="{colour}" stroke-width="2"' if colour else f'class="{kind}"'
    return f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" {style}/>'


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">{_safe(text)}</text>'


def _safe(text: str) -> str:
    return escape(harmless(text))


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_n(x)},{_n(y)}" for x, y in points)


def _n(value: float) -> str:
    """A coordinate with one digit, and no negative zero."""
    return f"{round(value, 1) + 0.0:g}"
