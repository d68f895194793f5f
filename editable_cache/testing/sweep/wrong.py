"""Wrong specs and wrong chunks: what a mistaken self-test would have said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import torch

from editable_cache.chunk import KVChunk
from editable_cache.spec import ModelSpec, RotarySpec, TensorSpec

OTHER_LAYOUT: dict[Literal["half", "interleaved"], Literal["half", "interleaved"]] = {
    "half": "interleaved",
    "interleaved": "half",
}


def wrong_specs(spec: ModelSpec, chunk: KVChunk) -> Iterator[tuple[str, ModelSpec]]:
    """Specs that differ from ``spec`` in one respect each, with a name that says in which."""
    rotaries = spec.rotaries()
    if not rotaries:
        dim = max(t.shape[-1] for cells in chunk.layers for t in cells.values())
        table = tuple(10_000.0 ** (-2 * i / dim) for i in range(dim // 2))
        yield "keys rotated", _changed(spec, lambda t: replace(t, rotary=RotarySpec(table, "half")), {"keys"})
        return
    if any(rotary.rotary_dim > 2 for rotary in rotaries):
        yield "other layout", _changed(spec, _other_layout)
    rotating = [t.name for layer in spec.layers for t in layer.tensors if t.rotary is not None]
    for name in dict.fromkeys(rotating):
        yield f"{name} not rotated", _changed(spec, lambda t: replace(t, rotary=None), {name})
    still = _first_still(spec, chunk, rotaries[0])
    if still is not None:
        where, name = still
        yield f"{name} rotated", _changed(spec, lambda t: replace(t, rotary=rotaries[0]), {name}, where)
    if len(rotaries) > 1:
        yield "other frequency set", _changed(spec, lambda t: _with_rotary(t, rotaries))


def one_too_far(chunk: KVChunk) -> KVChunk:
    """A chunk that believes it was compiled one position earlier than it was, so that every move goes one too far."""
    return replace(chunk, position_ids=chunk.position_ids - 1)


def shuffled(chunk: KVChunk) -> KVChunk:
    """A chunk whose values stand in the opposite order."""
    layers = tuple({n: t.flip(-2) if n == "values" else t for n, t in cells.items()} for cells in chunk.layers)
    return replace(chunk, layers=layers)


def _other_layout(tensor: TensorSpec) -> TensorSpec:
    if tensor.rotary is None:
        return tensor
    return replace(tensor, rotary=replace(tensor.rotary, layout=OTHER_LAYOUT[tensor.rotary.layout]))


def _with_rotary(tensor: TensorSpec, rotaries: tuple[RotarySpec, ...]) -> TensorSpec:
    """The tensor with another frequency set of the same size, where there is one."""
    mine = tensor.rotary
    if mine is None:
        return tensor
    others = (other.inv_freq for other in rotaries if other.rotary_dim == mine.rotary_dim)
    table = next((other for other in others if _apart(other, mine.inv_freq)), mine.inv_freq[::-1])
    return replace(tensor, rotary=replace(mine, inv_freq=table))


def _apart(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    """Whether two tables are more than two roundings of one."""
    return any(abs(a - b) > 1e-2 * abs(b) for a, b in zip(first, second, strict=True))


def _first_still(spec: ModelSpec, chunk: KVChunk, rotary: RotarySpec) -> tuple[int, str] | None:
    """Holder and name of the first stored tensor that does not rotate and on which the rotation would fit."""
    for index, (layer, cells) in enumerate(zip(spec.layers, chunk.layers, strict=True)):
        for tensor in layer.tensors:
            free = tensor.rotary is None and not tensor.counter and tensor.name in cells
            if free and cells[tensor.name].shape[-1] >= rotary.stop and bool(torch.any(cells[tensor.name] != 0)):
                return index, tensor.name
    return None


def _changed(
    spec: ModelSpec, change: Callable[[TensorSpec], TensorSpec], names: set[str] | None = None, where: int | None = None
) -> ModelSpec:
    """``spec`` with the tensors called ``names`` (None: all) changed, in every holder or in one."""
    layers = tuple(
        replace(
            layer,
            tensors=tuple(change(t) if names is None or t.name in names else t for t in layer.tensors),
        )
        if where in (None, index)
        else layer
        for index, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=layers)
