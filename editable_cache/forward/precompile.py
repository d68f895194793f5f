"""Compile a text alone, once, to be spliced anywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from editable_cache.adapters import made_by, model_spec
from editable_cache.adapters.wrappers import inner_model
from editable_cache.cache import LedgeredCache, Segment
from editable_cache.chunk import KVChunk, LayerStates, Provenance
from editable_cache.errors import SpanError
from editable_cache.forward import run
from editable_cache.forward.checks import check_text
from editable_cache.forward.compressed import compile_compressed
from editable_cache.forward.recurrent import compile_recurrent
from editable_cache.forward.text import TextOrIds, adds_bos, encode


def precompile(
    model: nn.Module,
    tokenizer: Any,
    content: TextOrIds,
    *,
    name: str | None = None,
    prefix: TextOrIds | None = None,
    head_tokens: int | None = None,
    tail_tokens: int | None = None,
) -> KVChunk:
    """Compute the cells of a text by itself.

    Args:
        model: in evaluation mode; not changed.
        tokenizer: needed for text; its digest is recorded.
        content: the text, without a BOS in front of it, or ids as they are.
        name: default segment name when spliced.
        prefix: what the chunk sees before it while it is compiled; its own cells are dropped. By default the BOS
            token where the tokenizer puts one in front of every text (Gemma): attention leans on that token, and a
            chunk compiled without it takes its own first tokens for it. Pass ``""`` to compile alone. Where a model
            compresses windows of tokens, the default is none, and a prefix must fill whole windows.
        head_tokens, tail_tokens: how many tokens at its start and end will run live when the chunk is spliced into a
            model with recurrent layers; see ``forward.recurrent.compile_recurrent``. Not for other models.

    Returns:
        A chunk in the model's dtype whose positions start behind those of ``prefix``, which start at 0. Its tensors
        are ``[1, num_key_value_heads, num_tokens, head_dim]``, detached, and shared with nobody.

    Raises:
        UnsupportedModelError: if the self-test cannot prove how the model's cells move.
        SpanError: if the text does not fit the model's positions.
    """
    model = inner_model(model)
    spec = model_spec(model)
    ids = encode(tokenizer, content, first=False)
    if prefix is None and spec.compressed is not None:
        prefix = ""  # a BOS alone would shift the borders of all windows
    seen = _prefix_ids(tokenizer, content, prefix)
    # An empty text is run with one token that is cut off again: its layers still need heads and dims.
    joined = torch.cat((seen, ids)) if len(ids) else torch.zeros(1, dtype=torch.int64)
    check_text(model, joined, "precompile")
    cache, recurrence, compressed = LedgeredCache(model), None, None
    run.require_model(cache, "precompile")
    layers: tuple[LayerStates, ...] = ()
    if cache.state_layers and len(ids) and spec.compressed is None:
        run.check_ids(model, joined, "precompile")
        run.check_limit(model, len(joined) - 1, "precompile")
        layers, recurrence = compile_recurrent(model, seen, ids, head_tokens, tail_tokens)
    else:
        if head_tokens is not None or tail_tokens is not None:
            raise SpanError(
                "precompile: head_tokens= and tail_tokens= are for models with recurrent layers; this has none (see "
                "splice's seam_tokens=)."
            )
        if spec.compressed is not None and len(ids):
            compressed = compile_compressed(cache, spec.compressed, seen, ids)
        else:
            with cache.operation("precompile"):
                run.extend(cache, joined[None], Segment("precompiled", 0, 0, "prefilled"))
        first = len(joined) - len(ids)
        layers = tuple(_cut(layer.view(), first) for layer in cache.editable_layers)
    return KVChunk(
        layers=layers,
        recurrence=recurrence,
        compressed=compressed,
        token_ids=ids,
        position_ids=torch.arange(len(seen), len(seen) + len(ids)),
        **made_by(model, tokenizer, torch.cat((seen, ids))),
        provenance=Provenance("precompiled", tuple(seen.tolist())),
        name=name,
    )


def _prefix_ids(tokenizer: Any, content: TextOrIds, prefix: TextOrIds | None) -> torch.Tensor:
    if prefix is not None:
        return encode(tokenizer, prefix, first=False)
    if isinstance(content, str) and tokenizer is not None and adds_bos(tokenizer):
        return torch.tensor([tokenizer.bos_token_id])
    return torch.empty(0, dtype=torch.int64)


def _cut(states: LayerStates, start: int) -> LayerStates:
    return {
        name: tensor[..., start:, :].clone(memory_format=torch.contiguous_format) for name, tensor in states.items()
    }
