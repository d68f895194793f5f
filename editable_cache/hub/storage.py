"""How cells lie in a file: as they were computed, or in 8 bits with scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from editable_cache.chunk import LayerStates
from editable_cache.errors import ArtifactError, CompatibilityError
from editable_cache.ops.quantize import DTYPES, Quantized, Storage, dequantize, grouping, quantize

STORAGES: tuple[Storage, ...] = ("original", "int8", "fp8")
CELLS, SCALES = "layers.", "scales."
COMPUTED = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)
}
"""The dtypes that cells may have been computed in, by name."""

TensorFacts = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of the tensors of one holder, by name, as they were computed."""


def pack(layers: Sequence[LayerStates], storage: Storage) -> dict[str, Tensor]:
    """The tensors of a file: ``layers.<holder>.<name>``, and for quantized ones ``scales.<holder>.<name>``."""
    tensors = {}
    for idx, states in enumerate(layers):
        for name, tensor in states.items():
            key = f"{idx}.{name}"
            if storage == "original" or not tensor.is_floating_point():
                tensors[CELLS + key] = tensor
            else:
                tensors[CELLS + key], tensors[SCALES + key] = quantize(tensor, storage, per=grouping(name))
    return tensors


def unpack(
    tensors: dict[str, Tensor], layers: Sequence[TensorFacts], storage: Storage, where: str
) -> tuple[dict[str, Tensor], ...]:
    """The cells of a file as they were computed; what was stored so stays mapped.

    Args:
        tensors: of the file; those used here are taken out.
        layers: what the manifest says of every tensor, by holder; its dtypes are among ``COMPUTED``.

    Raises:
        ArtifactError: if a tensor is missing, of another dtype or shape than the manifest says, or has scales that
            can't be its own.
    """
    found: list[dict[str, Tensor]] = []
    for idx, facts in enumerate(layers):
        found.append({})
        for name, (dtype, shape) in facts.items():
            key, computed = f"{idx}.{name}", COMPUTED[dtype]
            packed = storage != "original" and computed.is_floating_point
            values, scales = tensors.pop(CELLS + key, None), tensors.pop(SCALES + key, None) if packed else None
            wanted = DTYPES[storage] if packed else computed
            if values is None or values.dtype != wanted or tuple(values.shape) != shape:
                got = "none" if values is None else f"{values.dtype} {list(values.shape)}"
                raise ArtifactError(f"{where}: {CELLS}{key}: expected {wanted} {list(shape)}, got {got}.")
            if packed:
                if scales is None:
                    raise ArtifactError(f"{where}: {SCALES}{key}: expected scales, got none.")
                try:
                    values = dequantize(Quantized(values, scales), computed)
                except (ArtifactError, CompatibilityError) as error:
                    raise ArtifactError(f"{where}: {CELLS}{key}: {error}") from error
            found[-1][name] = values
    return tuple(found)
