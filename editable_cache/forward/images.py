"""Compile an image with the tokens around it alone, once, to be spliced anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from editable_cache.adapters import host, made_by, model_spec
from editable_cache.adapters.images import num_axes, number
from editable_cache.cache import LedgeredCache
from editable_cache.chunk import KVChunk, Provenance
from editable_cache.errors import Reason, SpanError, UnsupportedModelError
from editable_cache.forward import run
from editable_cache.forward.extract import image_spans

FARTHER = 29
"""Text tokens in front of an image; with as many more, all its positions must be as much larger."""


def precompile_images(
    model: nn.Module, tokenizer: Any, inputs: Mapping[str, Any], *, name: str, prefix_ids: Tensor
) -> KVChunk:
    """Compute the cells of an image and its marks by themselves, with the model's own attention inside the image.

    Args:
        model: in evaluation mode; not changed.
        tokenizer: its digest is recorded; may be None.
        inputs: what a processor makes of one text with images: ``input_ids`` ``[1, num_tokens]``, pixels, sizes.
        name: of the segment when spliced.
        prefix_ids: int64 ``[num_seen]``, what the chunk sees before it.

    Raises:
        UnsupportedModelError: if the self-test can't prove how the model's cells move, or if its positions of an image
            are not all counted from where the image starts.
        SpanError: without tokens that stand for an image, or beyond the model's positions.
    """
    model_spec(model)
    ids = torch.as_tensor(inputs["input_ids"]).cpu().long()
    if ids.dim() != 2 or ids.shape[0] != 1 or not ids.shape[1]:
        raise SpanError(f"precompile: expected input_ids [1, num_tokens] of one text, got {list(ids.shape)}.")
    given = {n: v for n, v in inputs.items() if n not in ("input_ids", "attention_mask") and v is not None}
    if not host.image_tensors(given):
        raise SpanError("precompile: expected pixels of an image, got none; compile text with Skill.precompile.")
    seen, cache = len(prefix_ids), LedgeredCache(model)
    run.require_model(cache, "precompile")
    cache.require_cells_only("precompile an image", "feed the image with the prompt")
    joined = torch.cat((prefix_ids, ids[0]))[None]
    run.check_ids(model, joined, "precompile")
    positions = _positions(model, ids, given, seen)
    run.check_limit(model, int(positions.max()), "precompile")
    for kind in host.TOKEN_KINDS:
        if isinstance(given.get(kind), Tensor):
            given[kind] = torch.nn.functional.pad(given[kind], (seen, 0))
    host.run(model, joined, cache, position_ids=positions, last_logits_only=True, images=given)
    ledger, stop = cache.ledger, seen + ids.shape[1]
    axes = ledger.axes[0, seen:]
    return KVChunk(
        layers=tuple(
            {key: tensor[..., seen:, :].clone() for key, tensor in layer.view().items()}
            for layer in cache.editable_layers
        ),
        token_ids=ids[0],
        position_ids=ledger.positions[0, seen:].clone(),
        **made_by(model, tokenizer, joined[0]),
        provenance=Provenance("precompiled", tuple(prefix_ids.tolist())),
        name=name,
        axes=axes.clone() if bool(axes.any()) else None,
        images=image_spans(ledger, seen, stop),
    )


def _positions(model: nn.Module, ids: Tensor, given: Mapping[str, Any], seen: int) -> Tensor:
    """``position_ids`` of what the chunk sees and of the chunk, by the model's own numbering.

    With several axes the chunk starts at 1 or later: MiniCPM-V puts the mark in front of an image one position back,
    and at 0 there is none.
    """
    count = num_axes(model)
    if count == 1:
        return torch.arange(seen + ids.shape[1])[None]
    first, valid = max(seen, 1), torch.ones(ids.shape, dtype=torch.bool)
    here, there = (number(model, ids, torch.tensor([at]), valid, given) for at in (first, first + FARTHER))
    if not torch.equal(here + FARTHER, there):
        moved = sorted({tuple(row) for row in (there - here)[:, 0].T.tolist()})
        raise UnsupportedModelError(
            f"precompile: this {type(model).__name__} does not count all positions of an image from where it starts, "
            "so that no one distance moves it. Feed the image with the prompt.",
            (Reason(f"{FARTHER} more tokens in front", f"{FARTHER} more on every axis", str(moved[:4])),),
        )
    before = torch.arange(seen).expand(count, 1, -1)
    return torch.cat((before, here), dim=-1)
