"""A heat map for each probe and task: arms or tokens down, counts, layers or heads across."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from editable_cache.evaluation.probes import direction, heads
from editable_cache.evaluation.probes.registry import PROBES
from editable_cache.evaluation.probes.summary import Line, lines
from editable_cache.evaluation.results import Results, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_NUMBERS = 80
"""Cells of a map up to which each is labelled with its number."""

UNDRAWN = ("deviation", "decodable")
"""Measures that are one number for each arm and say nothing in a map."""

SHARES = ("accuracy", "follows", "flips", "cosine", "depth")
"""Measures from 0 to 1, drawn in one colour; the others are drawn around 0, where nothing was recovered."""

TEXT = 18
"""Characters of a token on the axis."""


@dataclass(frozen=True)
class Map:
    """A matrix with the names of its rows and columns; None where nothing was measured."""

    title: str
    across: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    share: bool = False


def maps(rows: Sequence[Row], probe: str, task: str) -> list[Map]:
    """What a probe found on a task, one map for each measure."""
    mine = [row for row in rows if row.get("probe") == probe and row.get("task") == task]
    found = []
    for measure in dict.fromkeys(row["measure"] for row in mine if "value" in row):
        found += (
            [] if measure in UNDRAWN else list(_by_arm([row for row in mine if row.get("measure") == measure], measure))
        )
    effects = [row["effects"] for row in mine if "effects" in row and probe == heads.NAME]
    if effects:
        found.append(_heads(effects, _num_heads(mine)))
    return found


def require_matplotlib() -> None:
    """Raise ImportError, naming the extra, without matplotlib."""
    _figure()


def draw(results: Results, folder: Path, *, ending: str = "svg") -> list[Path]:
    """Write a picture for each probe and task; returns their paths. The same results give the same bytes.

    Raises:
        ImportError: naming the extra, without matplotlib.
    """
    figure_of = _figure()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    tasks = list(dict.fromkeys(row["task"] for row in results.rows if "task" in row))
    for probe in PROBES:
        for task in tasks:
            panels = maps(results.rows, probe, task)
            if panels:
                path = folder / f"{probe}-{task}.{ending}"
                figure_of(panels, f"{probe}, {task}: {PROBES[probe].question}", results.model, path)
                written.append(path)
    return written


def _by_arm(rows: Sequence[Row], measure: str) -> Iterator[Map]:
    """Arms with nothing across, with counts, and with layers: each a map of their own."""
    texts = {row["arm"]: str(row["text"]) for row in rows if "text" in row}
    found = lines(rows, unsummed=())
    for across in ("", "number", "layer"):
        chosen = [line for line in found if _across(line) == across]
        if not chosen:
            continue
        arms = list(dict.fromkeys(line.arm for line in chosen))
        columns = sorted({line.x for line in chosen if line.x is not None}) if across else [None]
        values = {(line.arm, line.x): line.interval.mean for line in chosen}
        named = tuple(_named(arm, texts.get(arm)) for arm in arms)
        names = tuple("" if x is None else f"{x:g}" for x in columns)
        matrix = tuple(tuple(values.get((arm, x)) for x in columns) for arm in arms)
        yield Map(measure, across, named, names, matrix, measure in SHARES)


def _across(line: Line) -> str:
    """What ``x`` is."""
    if line.x is None:
        return ""
    layers = line.measure in ("cell", "accuracy", "share") or line.probe == direction.NAME
    return "layer" if layers or line.arm.startswith("layer") else "number"


def _named(arm: str, text: str | None) -> str:
    if text is None:
        return arm
    return f"{text.replace(chr(10), '⏎')[:TEXT]!r}  {arm}"


def _heads(effects: Sequence[Sequence[float]], num_heads: int) -> Map:
    """Mean effect of each head: layers down, heads across."""
    mean = [sum(values) / len(effects) for values in zip(*effects, strict=True)]
    layers = len(mean) // num_heads
    matrix = tuple(tuple(mean[layer * num_heads : (layer + 1) * num_heads]) for layer in range(layers))
    rows, columns = (tuple(str(index) for index in range(count)) for count in (layers, num_heads))
    return Map("recovery from one head, layer by layer", "head", rows, columns, matrix)


def _num_heads(rows: Sequence[Row]) -> int:
    return next(int(row["num_heads"]) for row in rows if "num_heads" in row)


def _figure() -> Any:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'editable-cache[evaluation]'") from error

    def write(panels: Sequence[Map], title: str, model: str, path: Path) -> None:
        tall = [max(1.2, 0.24 * len(panel.rows) + 0.9) for panel in panels]
        wide = max(7.0, *(0.32 * len(panel.columns) + 3.4 for panel in panels))
        with mpl.rc_context({"svg.hashsalt": "editable-cache", "svg.fonttype": "none", "font.size": 8}):
            figure = Figure(figsize=(wide, sum(tall) + 0.6), layout="constrained")
            figure.suptitle(f"{title}\n{model}".replace("$", r"\$"), fontsize=9)
            axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=tall)
            for axis, panel in zip(axes[:, 0], panels, strict=True):
                _draw(axis, panel)
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(path, metadata=metadata, dpi=150)

    return write


def _draw(axis: Axes, panel: Map) -> None:
    known = [value for row in panel.values for value in row if value is not None]
    most = max([1e-9, *(abs(value) for value in known)])
    matrix = [[float("nan") if value is None else value for value in row] for row in panel.values]
    colours, low, high = ("Blues", 0.0, 1.0) if panel.share else ("RdBu_r", -most, most)
    image = axis.imshow(matrix, cmap=colours, vmin=low, vmax=high, aspect="auto")
    axis.set_yticks(range(len(panel.rows)), [row.replace("$", r"\$") for row in panel.rows])
    axis.set_xticks(range(len(panel.columns)), panel.columns)
    axis.set_xlabel(panel.across)
    axis.set_title(panel.title, loc="left", fontsize=8)
    if len(panel.rows) * len(panel.columns) <= MOST_NUMBERS:
        for y, row in enumerate(panel.values):
            for x, value in enumerate(row):
                if value is not None:
                    dark = abs(value) > 0.6 * high
                    axis.text(x, y, f"{value:.2f}", ha="center", va="center", color="white" if dark else "black")
    assert axis.figure is not None
    axis.figure.colorbar(image, ax=axis, fraction=0.03)
