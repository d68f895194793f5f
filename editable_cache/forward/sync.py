"""Bring a cache to a new sequence of tokens by the difference to what it holds."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from editable_cache.cache import Ledger, LedgeredCache, Segment
from editable_cache.cache.arrange import Placed
from editable_cache.cache.isolated import trained
from editable_cache.cache.lengths import shortened
from editable_cache.cache.pieces import Blank, Keep, move_spans
from editable_cache.errors import LedgerError, SpanError
from editable_cache.forward import run
from editable_cache.forward.checks import check_text
from editable_cache.forward.move import move
from editable_cache.forward.outcome import Outcome, Tally, operating
from editable_cache.forward.text import TextOrIds, encode

MATCH_TOKENS = 8
"""Shortest run of equal tokens that an approximate plan moves instead of recomputing."""

MOST_PLACES = 16
"""How many occurrences of the same tokens an approximate plan compares."""


@dataclass(frozen=True)
class Run:
    """One run of a plan.

    Attributes:
        kind: ``"keep"`` (cells stay where they are), ``"move"`` (cells are rotated to another place) or
            ``"recompute"``.
        start, stop: slots of the new sequence.
        old_start: first slot in the cache as it is now; None for ``"recompute"``.
    """

    kind: Literal["keep", "move", "recompute"]
    start: int
    stop: int
    old_start: int | None = None

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Plan:
    """How a cache will become a new sequence.

    Attributes:
        runs: ascending, without gaps, covering the new sequence.
        exact: the kept cells are those of a plain prefill if they are so now; nothing is moved.
        dropped: slots of the cache whose cells are used nowhere.
    """

    runs: tuple[Run, ...]
    exact: bool
    dropped: int

    def count(self, kind: str) -> int:
        """Number of tokens in runs of one kind."""
        return sum(len(run) for run in self.runs if run.kind == kind)

    def __str__(self) -> str:
        counts = ", ".join(f"{kind} {self.count(kind)}" for kind in ("keep", "move", "recompute"))
        return f"Plan({counts}, drop {self.dropped}; {'exact' if self.exact else 'approximate'})"


def sync(
    cache: LedgeredCache,
    tokenizer: Any,
    content: TextOrIds,
    *,
    dry_run: bool,
    approximate: bool,
    seam_tokens: int,
) -> Plan | Outcome:
    """Diff, plan, and carry out unless ``dry_run``; see ``EditableCache.sync``."""
    cache.require_idle("sync")
    cache.adopt()
    ids = encode(tokenizer, content, first=True)
    if cache.ledger.batch != 1:
        raise SpanError(f"sync: expected a cache of one row, got {cache.ledger.batch}; unstack() it first.")
    if bool(cache.ledger.images.any()):
        raise LedgerError(
            "sync: this cache holds images, and ids can't say whether the new sequence means the same ones. Pass the "
            "prompt with its images to generate, which compares them, or edit the cache by remove, insert and splice."
        )
    if bool(trained(cache.ledger).any()):
        raise LedgerError(
            "sync: this cache holds trained cells, which no token made, and ids can't say whether the new sequence "
            "means them; it would drop them. Remove what follows them, and append the new text."
        )
    moves = approximate and not cache.state_layers  # a recurrent state can't move: the exact plan costs the same
    plan = approximate_plan(cache.ledger, ids) if moves else exact_plan(cache.ledger, ids)
    if dry_run:
        return plan
    with operating(cache, "sync") as tally:
        check_text(run.require_model(cache, "sync"), ids, "sync")
        cache.unfed = None
        if not len(ids):
            raise SpanError("sync: expected at least one token, got none; call reset() to forget everything.")
        if plan.exact:
            _carry_out_exact(cache, tally, plan, ids)
        else:
            _carry_out_approximate(cache, tally, plan, ids, seam_tokens)
        tally.notes.append(str(plan))
    return tally.done()


def exact_plan(ledger: Ledger, ids: Tensor) -> Plan:
    """Keep the common prefix, recompute the rest."""
    common = _common_prefix(ledger, ids)
    runs = [Run("keep", 0, common, 0), Run("recompute", common, len(ids))]
    return Plan(tuple(r for r in runs if len(r)), True, len(ledger) - common)


def approximate_plan(ledger: Ledger, ids: Tensor) -> Plan:
    """Reuse every run of ``MATCH_TOKENS`` or more equal tokens, wherever it stands; each old token at most once."""
    old, new = ledger.ids[0].tolist(), ids.tolist()
    common = _common_prefix(ledger, ids)
    places: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for slot in range(common, len(old) - MATCH_TOKENS + 1):
        places[tuple(old[slot : slot + MATCH_TOKENS])].append(slot)
    used = [slot < common for slot in range(len(old))]
    runs = [Run("keep", 0, common, 0)] if common else []
    start = at = common
    while at < len(new):
        best = max(
            (
                (_match(old, new, used, slot, at), -slot)
                for slot in places.get(tuple(new[at : at + MATCH_TOKENS]), [])[:MOST_PLACES]
            ),
            default=(0, 0),
        )
        count, slot = best[0], -best[1]
        if count < MATCH_TOKENS:
            at += 1
            continue
        if start < at:
            runs.append(Run("recompute", start, at))
        runs.append(Run("keep" if slot == at else "move", at, at + count, slot))
        used[slot : slot + count] = [True] * count
        at = start = at + count
    if start < len(new):
        runs.append(Run("recompute", start, len(new)))
    exact = all(r.kind == "recompute" or r.start == 0 == r.old_start for r in runs)  # only a common prefix is kept
    return Plan(tuple(runs), exact, used.count(False))


def _match(old: list[int], new: list[int], used: list[bool], slot: int, at: int) -> int:
    count = 0
    while (
        slot + count < len(old)
        and at + count < len(new)
        and not used[slot + count]
        and old[slot + count] == new[at + count]
    ):
        count += 1
    return count


def _common_prefix(ledger: Ledger, ids: Tensor) -> int:
    count = min(len(ledger), len(ids))
    same = (ledger.ids[0, :count] == ids[:count]) & ledger.valid[0, :count]
    return int(same.long().cumprod(dim=0).sum())


def _carry_out_exact(cache: LedgeredCache, tally: Tally, plan: Plan, ids: Tensor) -> None:
    common = plan.count("keep")
    approximations = sorted({cause for s in cache.ledger.stale if s.start < common for cause in [s.cause]})
    if bool((cache.ledger.groups[:, :common] != 0).any()):
        approximations.append("isolated chunks")
    if approximations:
        tally.notes.append(f"kept cells are approximations already: {', '.join(approximations)}")
    if plan.dropped:
        if cache.state_layers:
            cache.touch(common)
        else:
            for layer in cache.editable_layers:
                layer.truncate(common)
        cache.ledger = shortened(cache.ledger, common, cache.model)
    if common < len(ids):
        segment = Segment(cache.ledger.free_name("prefilled"), 0, 0, "prefilled")
        run.extend(cache, ids[None, common:], segment)
        tally.computed, tally.segment = len(ids) - common, segment.name


def _carry_out_approximate(cache: LedgeredCache, tally: Tally, plan: Plan, ids: Tensor, seam_tokens: int) -> None:
    model = run.require_model(cache, "sync")
    run.check_ids(model, ids, "sync")
    positions = _positions(cache.ledger, len(ids), next((r.start for r in plan.runs if r.kind != "keep"), len(ids)))
    run.check_limit(model, int(positions.max()), "sync")
    run.require_masks(cache, "an approximate sync")
    placed, fresh = [], []
    name = cache.ledger.free_name("synced")
    for index, part in enumerate(plan.runs):
        if part.old_start is None:
            segment = Segment(name if not index else f"{name}.{index}", 0, 0, "prefilled")
            placed.append(Placed(Blank(ids[None, part.start : part.stop]), segment))
            fresh.append(torch.arange(part.start, part.stop))
            continue
        placed.append(Placed(Keep(part.old_start, part.old_start + len(part))))
        if part.kind == "move":
            tally.moved += len(part)
        if part.start and part.kind == "move":
            fresh.append(torch.arange(part.start, min(part.start + seam_tokens, part.stop)))
    pieces = [item.piece for item in placed]
    whole = [
        field
        for field in cache.ledger.fields
        if all(sum(b - a for a, b in move_spans(pieces, *span)) == span[1] - span[0] for span in field.spans)
        and all(len(move_spans(pieces, *span)) == 1 for span in field.spans)
    ]
    lost = [field.name for field in cache.ledger.fields if field not in whole]
    if lost:
        tally.notes.append(f"fields no longer in the text: {lost}")
    cache.ledger = cache.ledger.with_fields(whole)
    move(cache, "sync", placed, positions)
    changed = next((r.start for r in plan.runs if r.kind != "keep"), len(ids))
    cache.ledger = replace(cache.ledger, open_gap=0).marked_stale([(changed, len(ids))], "sync")
    if fresh:
        tally.computed += run.recompute_slots(cache, torch.cat(fresh))


def _positions(ledger: Ledger, length: int, common: int) -> Tensor:
    """Positions of the new sequence: the common prefix stays where it is, the rest follows without gaps."""
    kept = ledger.positions[:, :common]
    first = int(kept.max()) + 1 if common else 0
    return torch.cat((kept, torch.arange(first, first + length - common)[None]), dim=1)
