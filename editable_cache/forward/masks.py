"""Masks for chosen tokens, in the form that the model takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from editable_cache.adapters import host
from editable_cache.cache import LedgeredCache
from editable_cache.spec import MaskKind, ModelSpec


def left_padding(valid: Tensor) -> Tensor:
    """Number of masked slots in front of each row of ``valid`` ``[batch, length]``, int64 ``[batch]``."""
    return (~valid).long().cumprod(dim=1).sum(dim=1)


def masks_for(cache: LedgeredCache, spec: ModelSpec, slots: Tensor, without: tuple[int, int] | None = None) -> Any:
    """Additive float masks ``[batch, 1, num_rows, length]``: one, or one for each layer type, with the window or block
    of the layer inside. Slots ``[start, stop)`` of ``without`` are seen by nobody.

    Additive because eager attention adds whatever it is given: a bool mask would be silently wrong.
    """
    assert cache.model is not None
    dtype, device = host.dtype_of(cache.model), host.device_of(cache.model)
    columns = torch.arange(len(cache.ledger))
    seen = (columns <= slots[:, None]) & cache.ledger.valid[:, None, None, :]
    if without is not None:
        seen = seen & ((columns < without[0]) | (columns >= without[1]))

    def additive(kind: MaskKind) -> Tensor:
        inside = seen
        if kind.sliding_window is not None:
            inside = inside & (columns > slots[:, None] - kind.sliding_window)
        if kind.chunk_size is not None:
            first = left_padding(cache.ledger.valid)[:, None, None, None]  # blocks begin behind it
            inside = inside & ((columns - first) // kind.chunk_size == (slots[:, None] - first) // kind.chunk_size)
        low = torch.tensor(torch.finfo(dtype).min, dtype=dtype)
        return torch.where(inside, torch.zeros((), dtype=dtype), low).to(device)

    if spec.mask_form == "tensor":
        return additive(spec.masks[0])
    return {kind.layer_type: additive(kind) for kind in spec.masks}
