"""A ledger as JSON and tensors, and back: every count and span is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from editable_cache.cache import UNKNOWN, Field, Ledger, Segment, Stale
from editable_cache.cache.ledger import TENSORS, Erratum, Isolated
from editable_cache.hub.schema import MOST_NAME, MOST_NUMBER, Section

ORIGINS = ("prefilled", "generated", "spliced", "erratum", "unseen")
MOST_AXES = 15
LEDGER = "ledger."


def ledger_tensors(ledger: Ledger) -> dict[str, Tensor]:
    """The records of every slot, by name in the file."""
    return {LEDGER + name: getattr(ledger, name) for name in TENSORS}


def ledger_facts(ledger: Ledger) -> dict[str, Any]:
    """The rest of a ledger."""
    return {
        "segments": [asdict(segment) for segment in ledger.segments],
        "fields": [asdict(field) for field in ledger.fields],
        "stale": [asdict(span) for span in ledger.stale],
        "chunks": [asdict(chunk) for chunk in ledger.chunks],
        "open_gap": ledger.open_gap,
        "digests": list(ledger.digests),
    }


def read_ledger(facts: Section, tensors: dict[str, Tensor]) -> Ledger:
    """What ``ledger_facts`` and ``ledger_tensors`` wrote; the tensors are taken out of ``tensors``.

    Raises:
        ArtifactError: if it contradicts itself.
    """
    records = {name: tensors.pop(LEDGER + name, None) for name in TENSORS}
    shape = _shape(facts, records)
    length = shape[1]
    segments = tuple(_segment(each, length) for each in facts.sections("segments"))
    borders = [0, *(border for segment in segments for border in segment.span), length]
    facts.require(borders[::2] == borders[1::2], "segments", f"spans that cover {length} slots without gaps", borders)
    names = [segment.name for segment in segments]
    facts.require(len(set(names)) == len(names), "segments", "each name once", names)
    fields = tuple(_field(each, names, length) for each in facts.sections("fields"))
    known = {(field.segment, field.name) for field in fields}
    facts.require(len({field.name for field in fields}) == len(fields), "fields", "each name once", len(fields))
    lost = [
        (s.name, name) for s in segments for _, name in s.template if name is not None and (s.name, name) not in known
    ]
    facts.require(not lost, "segments", "templates of known fields", lost)
    ledger = Ledger(
        **records,  # type: ignore[arg-type]
        segments=segments,
        fields=fields,
        stale=tuple(_stale(each, length) for each in facts.sections("stale")),
        chunks=tuple(_chunk(each) for each in facts.sections("chunks")),
        open_gap=facts.integer("open_gap", 0, MOST_NUMBER),
        digests=_digests(facts),
    )
    _check_numbers(ledger, facts)
    return ledger


def _shape(facts: Section, records: Mapping[str, Tensor | None]) -> tuple[int, ...]:
    ids = records["ids"]
    facts.require(
        ids is not None and ids.dim() == 2 and ids.shape[0] > 0, "ledger.ids", "ids [batch, length]", ids is None
    )
    assert ids is not None
    shape = tuple(ids.shape)
    for name, tensor in records.items():
        facts.require(tensor is not None, f"ledger.{name}", "a record", None)
        assert tensor is not None
        fits = tuple(tensor.shape[:2]) == shape and tensor.dtype == (torch.bool if name == "valid" else torch.int64)
        fits = fits and (tensor.dim() == 2 if name != "axes" else tensor.dim() == 3 and tensor.shape[2] <= MOST_AXES)
        facts.require(fits, f"ledger.{name}", f"a record of {list(shape)} slots", list(tensor.shape))
    return shape


def _check_numbers(ledger: Ledger, facts: Section) -> None:
    limits = {
        "ids": (UNKNOWN, MOST_NUMBER),
        "positions": (0, MOST_NUMBER),
        "sources": (0, MOST_NUMBER),
        "groups": (0, len(ledger.chunks)),
        "offsets": (0, MOST_NUMBER),
        "axes": (-MOST_NUMBER, MOST_NUMBER),
        "images": (0, len(ledger.digests)),
    }
    for name, (low, high) in limits.items():
        tensor = getattr(ledger, name)
        fits = not tensor.numel() or (low <= int(tensor.min()) and int(tensor.max()) <= high)
        facts.require(fits, f"ledger.{name}", f"numbers of {low} to {high}", "others")
    sizes = torch.tensor([0, *(len(chunk.ids) - 1 for chunk in ledger.chunks)], dtype=torch.int64)
    facts.require(
        bool((ledger.offsets <= sizes[ledger.groups]).all()), "ledger.offsets", "tokens of their chunks", "others"
    )
    below = ledger.positions[..., None] + ledger.axes
    facts.require(bool((below >= 0).all()), "ledger.axes", "positions >= 0 on all axes", "others")


def _segment(facts: Section, length: int) -> Segment:
    start, stop = _span(facts, length)
    template = facts.items("template")
    fine = all(
        isinstance(piece, list)
        and len(piece) == 2
        and isinstance(piece[0], str)
        and (piece[1] is None or isinstance(piece[1], str))
        for piece in template
    )
    facts.require(fine, "template", "pairs of a text and the name of a field or null", template)
    segment = Segment(
        facts.text("name", printable=False),
        start,
        stop,
        facts.choice("origin", ORIGINS),
        tuple((piece[0], piece[1]) for piece in template),
        facts.text("note", printable=False),
        facts.choice("grows", (True, False)),
    )
    facts.done()
    return segment


def _field(facts: Section, segments: list[str], length: int) -> Field:
    name, value, segment = (facts.text(key, printable=False) for key in ("name", "value", "segment"))
    facts.require(segment in segments, "segment", "the name of one", segment)
    spans = facts.items("spans")
    fine = all(isinstance(span, list) and len(span) == 2 and all(type(slot) is int for slot in span) for span in spans)
    fine = fine and all(0 <= span[0] < span[1] <= length for span in spans)
    facts.require(fine, "spans", f"[start, stop] inside of {length} slots", spans)
    errata = tuple(_erratum(each) for each in facts.sections("errata"))
    facts.done()
    return Field(name, value, segment, tuple((span[0], span[1]) for span in spans), errata)


def _erratum(facts: Section) -> Erratum:
    segment, value = (facts.text(key, printable=False) for key in ("segment", "value"))
    erratum = Erratum(segment, value, facts.integer("tokens", 0, MOST_NUMBER))
    facts.done()
    return erratum


def _stale(facts: Section, length: int) -> Stale:
    start, stop = _span(facts, length)
    stale = Stale(start, stop, facts.text("cause", printable=False))
    facts.done()
    return stale


def _chunk(facts: Section) -> Isolated:
    chunk = Isolated(*(tuple(facts.integers(key, UNKNOWN)) for key in ("ids", "prefix_ids")))
    facts.done()
    return chunk


def _digests(facts: Section) -> tuple[str, ...]:
    digests = facts.items("digests")
    fine = all(isinstance(digest, str) and len(digest) <= MOST_NAME for digest in digests)
    facts.require(fine, "digests", f"texts of up to {MOST_NAME} characters", digests)
    return tuple(digests)


def _span(facts: Section, length: int) -> tuple[int, int]:
    start, stop = facts.integer("start", 0, length), facts.integer("stop", 0, length)
    facts.require(start < stop, "start", "before stop", (start, stop))
    return start, stop
