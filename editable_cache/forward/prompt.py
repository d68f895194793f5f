"""What `generate` needs to go on from a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from editable_cache.adapters import host
from editable_cache.cache import LedgeredCache
from editable_cache.errors import LedgerError
from editable_cache.forward import checks, run
from editable_cache.forward.append import encode_rows
from editable_cache.forward.text import TextOrIds, encode


def inputs(cache: LedgeredCache, tokenizer: Any, content: TextOrIds | Sequence[str]) -> dict[str, Tensor]:
    """Ids and mask of everything held, then ``content``; see ``EditableCache.inputs``."""
    cache.require_idle("inputs")
    cache.adopt()
    ledger, first = cache.ledger, not len(cache.ledger)
    if not ledger.ids_known:
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
        held = torch.cat((ledger.ids.masked_fill(~ledger.valid, 0), unfed), dim=1)
        seen = torch.cat((ledger.valid, torch.ones(unfed.shape, dtype=torch.bool)), dim=1)
        ids = torch.cat((held.expand(rows, -1), ids.expand(rows, -1)), dim=1)
        valid = torch.cat((seen.expand(rows, -1), valid.expand(rows, -1)), dim=1)
    device = host.device_of(cache.model) if cache.model is not None else ids.device
    return {"input_ids": ids.to(device), "attention_mask": valid.long().to(device)}
