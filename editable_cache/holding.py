"""`HoldingCache`: what a cache says about itself, and how a model goes on from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from editable_cache.cache import Field, LedgeredCache, Segment
from editable_cache.chunk import ImageSpan
from editable_cache.forward import prompt, run, verify
from editable_cache.forward.extract import image_spans
from editable_cache.forward.text import TextOrIds
from editable_cache.forward.verify import Verification
from editable_cache.report import CacheReport


class HoldingCache(LedgeredCache):
    """The questions half of ``EditableCache``: nothing here changes what the cache holds."""

    def __init__(self, model: nn.Module | None = None, *, config: Any = None, tokenizer: Any = None) -> None:
        super().__init__(model, config=config)
        self.tokenizer = tokenizer

    def rewind(self, length: int) -> None:
        """Go back to the first ``length`` tokens where recurrent layers can't be cut by token: what stands behind the
        last state that was kept is computed again.

        Raises:
            LedgerError: without a model, if no state was kept at that token.
        """
        if self.model is None:
            super().rewind(length)
        else:
            run.rewind(self, length)

    # -- what it holds

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Named spans of slots, ascending, covering everything."""
        self.adopt()
        return self.ledger.segments

    @property
    def fields(self) -> tuple[Field, ...]:
        """Tracked fields, in order of definition."""
        return self.ledger.fields

    @property
    def token_ids(self) -> Tensor:
        """int64 ``[batch, seq_len]``; -1 where a token reached the cache unseen.

        After ``generate`` these are the returned sequence without its last token, which no forward has seen yet. It
        is remembered, and fed first with whatever is put behind the cache next (``append``, ``inputs``, ...).
        """
        self.adopt()
        return self.ledger.ids

    @property
    def positions(self) -> Tensor:
        """int64 ``[batch, seq_len]``: what the rotary embedding saw. Not the same as the slot once something was
        removed.
        """
        self.adopt()
        return self.ledger.positions

    def image_spans(self, row: int = 0) -> tuple[ImageSpan, ...]:
        """Which slots of a row stand for which image, told by the digest of its content; ascending."""
        self.adopt()
        return image_spans(self.ledger, 0, len(self.ledger), row)

    def segment(self, name: str) -> Segment:
        """The segment called ``name`` as it stands now. ``segment.slots(a, b)`` turns local tokens into slots."""
        self.adopt()
        return self.ledger.segment(name)

    def field(self, name: str) -> Field:
        """The field called ``name`` as it stands now."""
        return self.ledger.field(name)

    def report(self) -> CacheReport:
        """Segments, positions, freshness, bytes, fields and what each operation cost: prints as a rich table, shows
        as HTML in a notebook.
        """
        self.adopt()
        return CacheReport.of(self)

    def verify(self, tolerance: float | None = None) -> Verification:
        """Rebuild the oracles from the ledger, compare every cell, and say how far a plain prefill would be.

        Costs about two prefills of everything in the cache; changes nothing.

        Args:
            tolerance: largest relative error that counts as equal; 1e-4 in float32 and 5e-2 in 16 bits by default.

        Raises:
            LedgerError: if some ids are unknown.
        """
        return verify.verify(self, tolerance)

    # -- generate

    def inputs(self, content: TextOrIds | Sequence[str] = "") -> dict[str, Tensor]:
        """What ``model.generate`` and ``model(...)`` need to go on from here: everything held, then ``content``.

        Args:
            content: text, ids ``[n]``, or one text for each row (padded on the left, behind the cache).

        Returns:
            ``input_ids`` and ``attention_mask``, int64 ``[batch, seq_len + num_new]`` on the model's device. With
            nothing new, the last token runs again to give the next one's logits. Trained cells, which no token made,
            stand there as the padding or BOS token (or id 0): it is never fed, but what counts the ids of a prompt (a
            repetition penalty) counts it.

        Raises:
            LedgerError: if some ids are unknown, or if cache and content are both empty.
        """
        return prompt.inputs(self, self.tokenizer, content)

    def next_token_logits(self) -> Tensor:
        """Logits after the last token of ``token_ids``, ``[batch, vocab]``. It runs again; nothing is written.

        Works where everything came from chunks and no token was ever live (a cache that covers the whole prompt).
        """
        self.require_idle("next_token_logits")
        self.adopt()
        run.require_continuing(self, "next_token_logits")
        return run.next_token_logits(self)
