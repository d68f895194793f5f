"""`EditableCache`: the public class. Each method says what it does; the rooms below do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from editable_cache.cache import LedgeredCache
from editable_cache.chunk import KVChunk
from editable_cache.errors import SpanError
from editable_cache.forward import adopt, append, batch, compose, edit, extract, fields, sync
from editable_cache.forward.edit import Method
from editable_cache.forward.outcome import Outcome
from editable_cache.forward.spans import Cells, Where
from editable_cache.forward.sync import Plan
from editable_cache.forward.text import TextOrIds
from editable_cache.hub.cache_store import load_cache, save_cache
from editable_cache.repairable import RepairableCache


class EditableCache(RepairableCache):
    """A transformers ``Cache`` whose contents a program can edit and compose instead of recomputing.

    It is a ``DynamicCache`` for everybody else: ``model(..., past_key_values=cache)`` and ``model.generate(...,
    past_key_values=cache)`` work as always, with the same tokens and logits. Besides, it knows the ids and positions
    of what it holds, and every operation below either succeeds whole or leaves cache and ledger bit for bit as they
    were.

    Cells are stored in full for every layer, sliding-window layers too (the model's mask enforces the window), as
    ``[batch, num_key_value_heads, seq_len, head_dim]``.

    Args:
        model: the model that this cache belongs to, in evaluation mode. Two forward hooks and a wrapper of
            ``generate`` are installed on it while a cache lives; its weights and config are not changed. Without a
            model the cache is a plain drop-in, and operations that need one say so.
        config: layout for a cache without a model.
        tokenizer: needed wherever text is given instead of ids.

    Raises (any operation):
        BusyError: if it is called during a forward or ``generate``.
        SpanError, FieldError, LedgerError, CompatibilityError, UnsupportedModelError: as each method says.
    """

    @classmethod
    def from_cache(
        cls,
        model: nn.Module,
        cache: Any,
        ids: Tensor | Sequence[int],
        *,
        tokenizer: Any = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> EditableCache:
        """Take over a filled cache of transformers: dynamic, static, offloaded or quantized.

        Args:
            cache: filled by ``model``; not changed, and nothing is shared with it.
            ids: int64 ``[batch, seq_len]`` or ``[seq_len]``, what it holds. The model computes the first of them again
                to check that they are.
            attention_mask: ``[batch, seq_len]``, where the rows were padded.
            position_ids: ``[batch, seq_len]``, where they were not 0 to ``seq_len - 1``.

        Raises:
            UnsupportedModelError: for layers that can't be taken over: sliding ones that dropped tokens, states.
            LedgerError: if ids, mask, positions and layers disagree.

        Warns:
            ContextWarning: for a quantized cache: its cells are read back with their rounding, and are stale.
        """
        adopted = cls(model, tokenizer=tokenizer)
        adopt.adopt(adopted, cache, ids, attention_mask=attention_mask, position_ids=position_ids)
        return adopted

    # -- compose

    def append(
        self,
        content: TextOrIds | Sequence[str],
        *,
        name: str | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> Outcome:
        """Prefill at the end. Costs the prefill of the new tokens.

        Args:
            content: text, ids ``[n]``, or for a cache of several rows one text for each (padded on the left, masked).
                The first text of a context gets the tokenizer's BOS if it adds one; later texts never do. With
                ``fields``, a template with ``{name}`` placeholders.
            name: of the new segment; made up by default.
            fields: values by name. Their tokens are found through the tokenizer's offsets and tracked from now on.

        Raises:
            FieldError: if template and fields do not match, or a value shares a token with its neighbour.
            SpanError: for a duplicate segment name, or beyond the model's positions.

        Warns:
            TokenBoundaryWarning: if the text tokenizes differently joined to what stands before it.
        """
        return append.append(self, self.tokenizer, content, name=name, fields=fields)

    def splice(
        self,
        chunk: KVChunk,
        at: int | None = None,
        *,
        seam_tokens: int = 1,
        name: str | None = None,
        position: int | None = None,
    ) -> Outcome:
        """Write a precompiled chunk into the cache: O(len(chunk)) copy and rotation, no prefill but the seam.

        The chunk's cells are copied (the chunk is never changed and shares nothing with the cache), its keys turned
        from the positions where they were computed to the new ones, and its first ``seam_tokens`` tokens are
        recomputed with what now stands before them (the boundary tokens of EPIC/LegoLink, Hu et al., 2024). Equals
        the FROZEN oracle without seam.

        Args:
            chunk: a ``KVChunk`` or ``Skill`` of this model.
            at: slot of its first token; the end by default. Later tokens make room: they are moved, and stale with
                respect to what they did not see.
            seam_tokens: how many tokens at its start to recompute; fewer where an image or a trained cell begins
                earlier, which nothing can compute again. Of a merged chunk, at the start of the whole only.
            name: of the new segment; the chunk's own name by default.
            position: position of its first token, for a splice at the end that leaves a gap.

        Raises:
            CompatibilityError: if the chunk comes from another model, weights, adapter, dtype, rope setting or
                tokenizer.
            UnsupportedModelError: if the self-test can't prove how this model's cells move.
            SpanError: for a slot out of range, a duplicate name, or beyond the model's positions.

        Warns:
            ContextWarning: if the chunk brings its own BOS into the middle of a context.
        """
        return compose.splice(self, self.tokenizer, chunk, at=at, seam_tokens=seam_tokens, name=name, position=position)

    def insert(self, content: TextOrIds, at: int, *, name: str | None = None) -> Outcome:
        """Compute new text at slot ``at``; later tokens make room, are moved, and are stale with respect to it.

        Raises:
            SpanError: for a slot out of range, a duplicate name, a slot inside a field, or beyond the model's
                positions.
        """
        return compose.insert(self, self.tokenizer, content, at, name=name)

    def remove(self, where: Where, *, close_gap: bool = True) -> Outcome:
        """Forget a span. Later tokens keep their contents, which still know of it: they are stale with respect to it.

        Args:
            where: a segment, its name, a slice, or ``(start, stop)``.
            close_gap: move later tokens up to consecutive positions. If False nothing moves, and the next token still
                gets the position it would have had (storage is shorter than the positions).

        Raises:
            SpanError: for a span that is empty, reversed, out of range, or cuts a field.

        Warns:
            ContextWarning: if the first tokens go, which attention leans on.
        """
        return compose.remove(self, where, close_gap=close_gap)

    def reposition(self, where: Where, to: int | None = None, *, position: int | None = None) -> Outcome:
        """Move a span: to another place in the order, or (with ``position``) to other positions in the same place.

        Args:
            where: a segment, its name, a slice, or ``(start, stop)``.
            to: slot of its first token in the new order; what lay between closes up.
            position: position of its first token; nothing else moves.

        Raises:
            SpanError: for a span or target out of range, or beyond the model's positions.
        """
        return compose.reposition(self, where, to=to, position=position)

    def extract(self, where: Where, *, name: str | None = None) -> KVChunk:
        """Cut out a copy of a span as a chunk that remembers which tokens it had seen; the cache does not change.

        Raises:
            SpanError: for a span out of range or a cache of several rows.
            LedgerError: if ids in the span are unknown.
        """
        return extract.extract(self, self.tokenizer, where, name=name)

    @classmethod
    def stack(cls, caches: Sequence[EditableCache]) -> EditableCache:
        """One cache with the rows of several, shorter ones padded on the left with slots that nobody attends to.
        Copies.

        Segments and fields are not kept: they differ from row to row.

        Raises:
            SpanError: if there is none, one is empty, or their models differ.
        """
        if not caches:
            raise SpanError("stack: expected at least one cache, got none.")
        stacked = cls(caches[0].model, tokenizer=caches[0].tokenizer)
        batch.stack(stacked, caches)
        return stacked

    def unstack(self) -> list[EditableCache]:
        """A cache for each row, without padding. Copies."""
        self.require_idle("unstack")
        self.adopt()
        self.require_editable("unstack")
        rows = []
        for row in range(self.ledger.batch):
            rows.append(type(self)(self.model, tokenizer=self.tokenizer))
            batch.take_row(rows[-1], self, row)
        return rows

    # -- edit

    def refresh_field(self, name: str, value: str) -> Outcome:
        """Recompute a field's own cells for a new value, in place; the notes behind it stay as they are and are stale.

        A value of another token count moves the tail. Models without a chain of thought mostly ignore this edit alone
        (the study, section 4): see ``edit``.

        Raises:
            FieldError: for an unknown field, an empty value, or a value that changes the tokens around it.

        Warns:
            ContextWarning: if a live erratum further back still states another value.
        """
        return fields.refresh_field(self, self.tokenizer, name, value)

    def erratum(self, name: str, value: str, *, template: str | None = None, role: str | None = None) -> Outcome:
        """Append one correcting line; nothing earlier changes, so prefix caches stay valid.

        One line is live for each field: a trailing one is replaced (and just taken back if the text says ``value``
            already), an earlier one is superseded.

        Args:
            template: with ``{name}`` and ``{value}``; a plain line by default.
            role: render the line as a turn of the tokenizer's chat template, for example ``"system"``.

        Raises:
            FieldError: for an unknown field, an empty value, a template without ``{value}``, or a chat template that
                does not know such a turn.
        """
        return fields.erratum(self, self.tokenizer, name, value, template=template, role=role)

    def consolidate(self) -> Outcome:
        """Fold all errata into the text: fields get their current values, the lines go, and everything from the first
        change on is recomputed.
        """
        return fields.consolidate(self, self.tokenizer)

    def edit(
        self,
        name: str,
        value: str,
        *,
        method: Method = "field+erratum",
        cells: Cells | None = None,
        template: str | None = None,
        role: str | None = None,
    ) -> Outcome:
        """Change a field.

        Args:
            method: ``"field+erratum"`` (robust and cheap), ``"erratum"``, ``"in_place"`` (the field only; enough with
                a chain of thought), ``"suffix"`` (recompute everything behind the field), ``"selective"`` (recompute
                ``cells``, or 32 tokens behind the field), ``"hoist"`` (take the field's segment out and write it
                again at the end), ``"full"``.
            cells: for ``"selective"``.
            template, role: for the erratum.

        Raises:
            FieldError: for an unknown field or method, an empty value, or options that the method does not take.
        """
        return edit.edit(self, self.tokenizer, name, value, method=method, cells=cells, template=template, role=role)

    def recompute(self, cells: Cells) -> Outcome:
        """Recompute chosen cells against what precedes them now; all others keep their bits.

        Args:
            cells: a bool mask ``[seq_len]`` or ``[num_layers, seq_len]``, a span (segment, name, slice, ``(start,
                stop)``), or a list of spans. Each chosen token runs through the whole model; only chosen layers are
                written.

        Raises:
            SpanError: for a mask of another shape or kind, or a span out of range.
            LedgerError: if ids of chosen tokens are unknown.
            UnsupportedModelError: if the model does not honour masks over chosen cells.
        """
        return edit.recompute(self, cells)

    def sync(
        self, content: TextOrIds, *, dry_run: bool = False, approximate: bool = False, seam_tokens: int = 1
    ) -> Plan | Outcome:
        """Bring the cache to a new sequence by the difference to what it holds.

        Args:
            content: the whole new text or ids.
            dry_run: return the plan and change nothing.
            approximate: also keep and move runs of equal tokens behind the first difference (their contents remember
                what stood before them); by default only the common prefix is kept and the rest recomputed.
            seam_tokens: tokens at the start of each moved run that are recomputed.

        Returns:
            The plan if ``dry_run``, else what was done.
        """
        return sync.sync(
            self, self.tokenizer, content, dry_run=dry_run, approximate=approximate, seam_tokens=seam_tokens
        )

    # -- rest

    def save_pretrained(self, folder: str | Path) -> None:
        """Write cells and ledger to a folder (safetensors and JSON, no pickle).

        Raises:
            LedgerError: for a cache without a model, whose identity has to go along.
            ArtifactError: if the folder can't be written.
        """
        self.require_idle("save_pretrained")
        self.adopt()
        save_cache(self, self.tokenizer, folder)

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, model: nn.Module, tokenizer: Any = None) -> EditableCache:
        """Load what ``save_pretrained`` wrote.

        Raises:
            ArtifactError: for a missing, damaged or unknown file.
            CompatibilityError: if it was saved from another model.
        """
        cache = cls(model, tokenizer=tokenizer)
        load_cache(cache, tokenizer, folder)
        return cache

    def _init_like(self, other: LedgeredCache) -> None:
        super()._init_like(other)
        self.tokenizer = getattr(other, "tokenizer", None)
