"""A chunk in another dtype."""

from __future__ import annotations

from dataclasses import fields

import torch

from editable_cache.chunk import KVChunk
from editable_cache.errors import CompatibilityError, Reason
from editable_cache.spec import ModelIdentity


def converted(chunk: KVChunk, model: ModelIdentity) -> KVChunk:
    """The same cells in the dtype of ``model``, whose chunk it becomes, with a note that says so.

    Cells are new tensors of the same shapes ``[1, num_heads, seq_len, head_dim]``; integer ones (counters), ids and
    positions are shared with ``chunk``. The caller has made sure that ``model`` has the same weights in another dtype.

    Raises:
        CompatibilityError: for chunks of recurrent or compressing layers, whose states are not converted, and for cells
            that the dtype can't hold.
    """
    if chunk.recurrence is not None or chunk.compressed is not None:
        raise CompatibilityError(
            f"{chunk!r}: its recurrent states or compressed entries can't be converted; compile it with this model.",
            (Reason("dtype", model.dtype, chunk.model.dtype),),
        )
    dtype = getattr(torch, model.dtype)
    layers = tuple(
        {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in states.items()}
        for states in chunk.layers
    )
    for states in layers:
        for name, tensor in states.items():
            if not bool(tensor.isfinite().all()):
                raise CompatibilityError(
                    f"{chunk!r}: some {name} are not finite in {model.dtype}; compile it with this model.",
                    (Reason("dtype", model.dtype, chunk.model.dtype),),
                )
    values = {field.name: getattr(chunk, field.name) for field in fields(KVChunk)}
    note = f"converted from {chunk.model.dtype} to {model.dtype}"
    return KVChunk(**{**values, "layers": layers, "model": model, "provenance": chunk.provenance.noted(note)})
