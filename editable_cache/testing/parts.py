"""Stock references that need no mask over chosen cells: the prefix is hidden from the chunk by a padding mask."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from editable_cache.testing import oracles
from editable_cache.testing.oracles import OracleResult


def frozen(model: PreTrainedModel, texts: Sequence[Tensor], *, given: bool) -> OracleResult:
    """FROZEN of prefix, chunk and tail: one forward with a mask over chosen cells where the model takes one.

    Args:
        texts: their ids, int64 ``[n]`` each.
        given: whether the model takes ``position_ids``.
    """
    ids = torch.cat(list(texts))
    groups = torch.repeat_interleave(torch.tensor([0, 1, 0]), torch.tensor([len(text) for text in texts]))
    if given and _mask_changes_nothing(model, ids):
        return oracles.frozen(model, ids, torch.arange(len(ids)), groups)
    return frozen_in_parts(model, texts, given=given)


def _mask_changes_nothing(model: PreTrainedModel, ids: Tensor) -> bool:
    """Whether a mask over chosen cells that hides nothing is what the model does without one. It is not where the
    mask is ignored, where the config names a window that the model does not apply (Moshi), or where an error says so.
    """
    positions = torch.arange(len(ids))
    try:
        masked = oracles.frozen(model, ids, positions, torch.zeros_like(ids))
    except Exception:  # whatever a model raises on a form of mask that it does not know
        return False
    return oracles.relative_error(masked.logits, oracles.full(model, ids, positions).logits) <= 1e-4


def frozen_in_parts(model: PreTrainedModel, texts: Sequence[Tensor], *, given: bool) -> OracleResult:
    """FROZEN in three forwards: prefix; chunk, with the prefix declared padding; tail, which sees everything."""
    cache, logits, start = oracles.fresh_cache(model), [], 0
    names = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    for ids, hidden in zip(texts, (0, len(texts[0]), 0), strict=True):
        stop = start + len(ids)
        mask = torch.ones((1, stop), dtype=torch.int64)
        mask[:, :hidden] = 0
        arguments: dict[str, Any] = {next(n for n in ("cache", "past_key_values", "cache_params") if n in names): cache}
        if given:
            arguments["position_ids"] = torch.arange(start, stop)[None]
        with torch.no_grad():
            logits.append(model(input_ids=ids[None], attention_mask=mask, use_cache=True, **arguments).logits)
        start = stop
    return OracleResult(torch.cat(logits, dim=1), oracles.token_tensors(cache, start))
