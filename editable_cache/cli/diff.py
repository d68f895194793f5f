"""``diff``: in what two skills differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from editable_cache.cli.loading import find_builds
from editable_cache.cli.options import Json
from editable_cache.cli.screen import NO, YES, Screen, command, line, table

if TYPE_CHECKING:
    from torch import Tensor

    from editable_cache.hub.build import Build

MOST_PAIRS = 500_000
"""Pairs of equal ids up to which additions and removals are counted in order: more would take too long."""

A = Annotated[str, typer.Argument(metavar="A", help="A skill: a folder, or organization/name on the Hub.")]
B = Annotated[str, typer.Argument(metavar="B", help="Another.")]
BuildA = Annotated[str | None, typer.Option("--build-a", metavar="NAME", help="The build of A.")]
BuildB = Annotated[str | None, typer.Option("--build-b", metavar="NAME", help="The build of B.")]
RevisionA = Annotated[str | None, typer.Option("--revision-a", metavar="REV", help="The revision of A.")]
RevisionB = Annotated[str | None, typer.Option("--revision-b", metavar="REV", help="The revision of B.")]


def diff(
    a: A,
    b: B,
    build_a: BuildA = None,
    build_b: BuildB = None,
    revision_a: RevisionA = None,
    revision_b: RevisionB = None,
    as_json: Json = False,
) -> None:
    """Show in what two skills differ: ids, text, model, provenance, storage, and cells where both are here.

    Of skills on the Hub only the manifests are downloaded, so their cells are compared by their digest. Exit code 0 if
    they are equal, 1 if they differ, 2 if one can't be read.
    """
    with command(as_json) as screen:
        pair = [
            _build(screen, source, label, revision)
            for source, label, revision in ((a, build_a, revision_a), (b, build_b, revision_b))
        ]
        differences = list(_differences(*pair))
        ids = _ids(pair[0].token_ids.tolist(), pair[1].token_ids.tolist())
        with screen.stage("comparing the cells"):
            cells = _cells(*pair)
        equal = not differences and ids["equal"] and cells["equal"]
        facts = {"ok": equal, "a": a, "b": b, "ids": ids, "differences": differences, "cells": cells}
        screen.answer(facts, _parts(facts), YES if equal else NO)


def _build(screen: Screen, source: str, label: str | None, revision: str | None) -> Build:
    build = find_builds(screen, source, revision).choose(label).build
    assert build is not None
    return build


def _differences(a: Build, b: Build) -> Iterator[dict[str, str]]:
    """Everything that differs but ids and cells."""
    from editable_cache.spec import compare

    yield from _unless_equal("name", a.name, b.name)
    if a.text != b.text:
        texts = [each.text or "" for each in (a, b)]
        first = _common(*texts)
        yield {"what": f"text from character {first}", "a": texts[0][first:][:80], "b": texts[1][first:][:80]}
    for reason in compare(a.model, b.model):
        yield {"what": f"model: {reason.what}", "a": reason.expected, "b": reason.got}
    for part in fields(a.origin):
        yield from _unless_equal(f"origin: {part.name}", getattr(a.origin, part.name), getattr(b.origin, part.name))
    for name, value in asdict(a.provenance).items():
        yield from _unless_equal(f"provenance: {name}", value, asdict(b.provenance)[name])
    for name in ("storage", "live_ends", "compressed", "images", "layout", "layers", "forms"):
        yield from _unless_equal(name, getattr(a, name), getattr(b, name))
    for name in ("position_ids", "axes"):
        mine, theirs = (None if value is None else value.tolist() for value in (getattr(a, name), getattr(b, name)))
        yield from _unless_equal(name, mine, theirs)


def _unless_equal(what: str, a: Any, b: Any) -> Iterator[dict[str, str]]:
    if a != b:
        yield {"what": what, "a": _short(a), "b": _short(b)}


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."


def _common(a: Any, b: Any) -> int:
    """How many items at the start are equal."""
    same = next((idx for idx, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return min(len(a), len(b)) if same is None else same


def _ids(a: list[int], b: list[int]) -> dict[str, Any]:
    """Where ids begin to differ, and how many were added and removed; ``counted`` is false for a lower bound."""
    start = _common(a, b)
    facts: dict[str, Any] = {"equal": a == b, "tokens": [len(a), len(b)]}
    if a == b:
        return {**facts, "first_difference": None, "added": 0, "removed": 0, "counted": True}
    stop = _common(a[start:][::-1], b[start:][::-1])
    old, new = a[start : len(a) - stop], b[start : len(b) - stop]
    here, there = Counter(old), Counter(new)
    counted = sum(count * there[value] for value, count in here.items()) <= MOST_PAIRS
    if counted:
        blocks = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
        kept = sum(block.size for block in blocks)
    else:
        kept = sum((here & there).values())
    return {
        **facts,
        "first_difference": start,
        "added": len(new) - kept,
        "removed": len(old) - kept,
        "counted": counted,
    }


def _cells(a: Build, b: Build) -> dict[str, Any]:
    """Largest difference of cells by the name of their tensor; without the payloads only whether they are equal."""
    facts: dict[str, Any] = {"equal": a.payload.sha256 == b.payload.sha256, "tensors": {}, "compared": "digest"}
    if facts["equal"] or not all(each.payload.path.is_file() for each in (a, b)):
        return facts
    from editable_cache.forward.verify_chunk import tensors_of
    from editable_cache.hub.chunk_store import load_chunk

    mine, theirs = (tensors_of(load_chunk(each)[0]) for each in (a, b))
    if {name: t.shape for name, t in mine.items()} != {name: t.shape for name, t in theirs.items()}:
        return {**facts, "compared": "shape"}
    tensors: dict[str, dict[str, float]] = {}
    for name, tensor in mine.items():
        worst = tensors.setdefault(name.split(" ")[-1], {"largest": 0.0, "relative": 0.0})
        largest, relative = _distance(tensor, theirs[name])
        worst["largest"], worst["relative"] = max(worst["largest"], largest), max(worst["relative"], relative)
    equal = not any(worst["largest"] for worst in tensors.values())
    return {"equal": equal, "tensors": tensors, "compared": "cells"}


def _distance(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Largest difference, and the same over the largest value of ``a``; infinite where it is not a number."""
    if not a.numel() or a.equal(b):
        return 0.0, 0.0
    largest, size = float((a.double() - b.double()).abs().max()), float(a.double().abs().max())
    found = largest, largest / max(size, 1e-30)
    return found if all(map(math.isfinite, found)) else (math.inf, math.inf)


def _parts(facts: dict[str, Any]) -> Iterable[RenderableType]:
    if facts["ok"]:
        yield line(f"{facts['a']} and {facts['b']} are equal")
        return
    ids, cells = facts["ids"], facts["cells"]
    if ids["equal"]:
        yield line(f"ids: equal ({ids['tokens'][0]} tokens)")
    else:
        least = "" if ids["counted"] else "at least "
        yield line(
            f"ids: differ from token {ids['first_difference']} on; {least}{ids['removed']} removed, "
            f"{least}{ids['added']} added ({ids['tokens'][0]} and {ids['tokens'][1]} tokens)"
        )
    if facts["differences"]:
        rows = [(each["what"], each["a"], each["b"]) for each in facts["differences"]]
        yield table("differences", ("what", facts["a"], facts["b"]), rows)
    if cells["equal"]:
        yield line("cells: equal")
    elif cells["compared"] == "digest":
        yield line("cells: the files differ; they are compared number by number where both are on this machine")
    elif cells["compared"] == "shape":
        yield line("cells: of other shapes")
    else:
        for name, worst in cells["tensors"].items():
            yield line(f"cells: {name} differ by up to {worst['largest']:.3g}, relative {worst['relative']:.1e}")
