"""One call for every way to change a field: the arms of the study's edit frontier (section 4, table 6)."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from editable_cache.adapters import weights_state
from editable_cache.cache import LedgeredCache
from editable_cache.errors import FieldError
from editable_cache.forward import run
from editable_cache.forward.append import append_parsed
from editable_cache.forward.compose import remove_span
from editable_cache.forward.fields import correct, refresh, remove_errata
from editable_cache.forward.outcome import Outcome, Tally, operating
from editable_cache.forward.spans import Cells, choose

Method = Literal["field+erratum", "erratum", "in_place", "suffix", "selective", "hoist", "full"]

SELECTIVE_TOKENS = 32
"""Default of ``selective``: this many tokens right behind the field (a contiguous window repairs more than scattered
tokens at the same budget, arXiv 2609.17983).
"""


def edit(
    cache: LedgeredCache,
    tokenizer: Any,
    name: str,
    value: str,
    *,
    method: Method = "field+erratum",
    cells: Cells | None = None,
    template: str | None = None,
    role: str | None = None,
) -> Outcome:
    """Change a field by one of the arms; see ``EditableCache.edit``."""
    if method not in get_args(Method):
        raise FieldError(f"edit: unknown method {method!r}; expected one of {list(get_args(Method))}.")
    if cells is not None and method != "selective":
        raise FieldError(f"edit: cells= chooses what method='selective' recomputes; expected none with {method!r}.")
    if (template is not None or role is not None) and "erratum" not in method:
        raise FieldError(f"edit: template= and role= belong to an erratum; expected none with method={method!r}.")
    with operating(cache, f"edit[{method}]") as tally:
        field = cache.ledger.field(name)
        if method != "in_place":
            tally.computed += run.feed_unfed(cache)
        if field.current == field.value == value and method in ("field+erratum", "erratum", "in_place"):
            tally.notes.append(f"{name} reads {value!r} already")
            tally.segment = field.segment
        elif method == "erratum":
            correct(cache, tokenizer, tally, name, value, template=template, role=role)
        elif method == "field+erratum":
            refresh(cache, tokenizer, tally, name, value)
            correct(cache, tokenizer, tally, name, value, template=template, role=role, always=True)
        elif method == "in_place":
            refresh(cache, tokenizer, tally, name, value)
        elif method == "hoist":
            _hoist(cache, tokenizer, tally, name, value)
        else:
            _recompute_after(cache, tokenizer, tally, name, value, method, cells)
    return tally.done()


def recompute(cache: LedgeredCache, cells: Cells) -> Outcome:
    """Recompute chosen cells; see ``EditableCache.recompute``."""
    cache.adopt()
    chosen = choose(cache.ledger, len(cache.layers), cells, "recompute")
    if cache.state_layers and (
        chosen.rows is not None or len(chosen.slots) != len(cache.ledger) - int(chosen.slots[0])
    ):
        cache.require_cells_only("recompute of chosen cells", "choose everything from a token on: slice(start, None)")
    everything = chosen.rows is None and len(chosen.slots) == len(cache.ledger)
    with operating(cache, "recompute", renews_all=everything) as tally:
        tally.computed += run.recompute_slots(cache, chosen.slots, chosen.rows)
    if everything and cache.model is not None:
        cache.computed_by = weights_state(cache.model)
    return tally.done()


def _recompute_after(
    cache: LedgeredCache,
    tokenizer: Any,
    tally: Tally,
    name: str,
    value: str,
    method: Method,
    cells: Cells | None,
) -> None:
    first = remove_errata(cache, tally, name)
    spans = refresh(cache, tokenizer, tally, name, value)
    length = len(cache.ledger)
    if method == "full":
        tally.computed += run.recompute_slots(cache, torch.arange(length))
    elif method == "suffix":
        tally.computed += run.recompute_slots(cache, torch.arange(min(first, spans[0][0]), length))
    elif cells is not None:
        chosen = choose(cache.ledger, len(cache.layers), cells, "edit")
        tally.computed += run.recompute_slots(cache, chosen.slots, chosen.rows)
    else:
        after = spans[0][1]
        tally.computed += run.recompute_slots(cache, torch.arange(after, min(after + SELECTIVE_TOKENS, length)))


def _hoist(cache: LedgeredCache, tokenizer: Any, tally: Tally, name: str, value: str) -> None:
    """Take the field's segment out, recompute what had read it, and write it again at the end with the new value."""
    remove_errata(cache, tally, name)
    segment = cache.ledger.segment(cache.ledger.field(name).segment)
    if not segment.template:
        raise FieldError(
            f"Field {name!r}: the text of segment {segment.name!r} was cut, so it can't be written again at the end."
        )
    inside = [field for field in cache.ledger.fields if field.segment == segment.name]
    errata = {field.name: field.errata for field in inside}
    values = {field.name: field.value for field in inside} | {name: value}
    remove_span(cache, tally, *segment.span)
    if segment.start < len(cache.ledger):
        tally.computed += run.recompute_slots(cache, torch.arange(segment.start, len(cache.ledger)))
    append_parsed(cache, tokenizer, tally, segment.template, values, name=segment.name)
    if any(errata[other] for other in errata if other != name):
        tally.notes.append("errata of other fields in this segment now stand before it")
