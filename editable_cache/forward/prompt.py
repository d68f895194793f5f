"""What `generate` needs to go on from a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from editable_cache.adapters import host
from editable_cache.cache import UNKNOWN, LedgeredCache
from editable_cache.cache.isolated import trained
from editable_cache.errors import LedgerError
from editable_cache.forward import checks, run
from editable_cache.forward.append import encode_rows
from editable_cache.forward.text import TextOrIds, encode


def inputs(cache: LedgeredCache, tokenizer: Any, content: TextOrIds | Sequence[str]) -> dict[str, Tensor]:
    """Ids and mask of everything held, then ``content``; see ``EditableCache.inputs``."""
    cache.require_idle("inputs")
    cache.adopt()
    ledger, first = cache.ledger, not len(cache.ledger)
    made = ~trained(ledger)
    if bool(((ledger.ids == UNKNOWN) & ledger.valid & made).any()):
        raise LedgerError(
            "inputs: some ids in the cache are unknown (tokens that the watched model did not see); pass input_ids of "
            "the new tokens and an attention_mask over cache and new tokens to generate yourself."
        )
    if isinstance(content, Sequence) and not isinstance(content, str) and content and isinstance(content[0], str):
        ids, valid = encode_rows(tokenizer, [str(text) for text in content], first=first)
    else:
        ids = encode(tokenizer, content, first=first)[None]  # type: ignore[arg-type]
        valid = torch.ones(ids.shape, dtype=torch.bool)
    if first and not ids.shape[1]:
        raise LedgerError("inputs: expected at least one token in the cache or in the content, got none.")
    rows = ids.shape[0] if first else max(ids.shape[0], ledger.batch)
    if ids.shape[0] not in (1, rows) or (ledger.batch not in (1, rows) and not first):
        raise LedgerError(f"inputs: expected one content, or one for each of {ledger.batch} rows, got {ids.shape[0]}.")
    if cache.model is not None:
        run.check_ids(cache.model, ids, "inputs")
        checks.check_padding(cache, valid, "inputs")
    if not first:
        unfed = ledger.ids[:, :0] if cache.unfed is None else cache.unfed
        known = ledger.ids.masked_fill(~ledger.valid, 0)
        if not bool(made.all()):
            known = torch.where(made, known, _filler(cache, tokenizer))
        held = torch.cat((known, unfed), dim=1)
        seen = torch.cat((ledger.valid, torch.ones(unfed.shape, dtype=torch.bool)), dim=1)
        ids = torch.cat((held.expand(rows, -1), ids.expand(rows, -1)), dim=1)
        valid = torch.cat((seen.expand(rows, -1), valid.expand(rows, -1)), dim=1)
    device = host.device_of(cache.model) if cache.model is not None else ids.device
    return {"input_ids": ids.to(device), "attention_mask": valid.long().to(device)}


def _filler(cache: LedgeredCache, tokenizer: Any) -> int:
    """An id for slots of cells that no token made: nobody embeds it, but what counts the ids of a prompt sees it.

    A token that is hardly ever generated is best: one to pad with, or to begin with, but none that ends a text, which a
    repetition penalty would then put off.
    """
    model = cache.model
    if model is None:
        return 0
    sources = (tokenizer, getattr(model, "generation_config", None), host.text_config(model.config))
    known = [source for source in sources if source is not None]
    ends = {idx for source in known for idx in _ids(getattr(source, "eos_token_id", None))}
    names = ("pad_token_id", "bos_token_id")
    wanted = [idx for name in names for source in known for idx in _ids(getattr(source, name, None))]
    shown = {*ends, *host.image_ids(model)}
    return next((idx for idx in wanted if 0 <= idx < host.num_embeddings(model) and idx not in shown), 0)


def _ids(value: Any) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)
