"""Whether a chunk can be what it says: its tensors have the names, shapes and dtypes that this model would make.

A chunk names its producer, and whoever wrote it can name any. So everything that would show half-way through a splice,
or in a later forward, is compared before anything changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from editable_cache.adapters import host
from editable_cache.adapters.held import Shape, cell_shapes, entry_shapes
from editable_cache.cache import UNKNOWN, LedgeredCache
from editable_cache.chunk import KVChunk
from editable_cache.errors import CompatibilityError, Reason
from editable_cache.spec import ModelSpec

SHOWN = 12


def check_fits(cache: LedgeredCache, model: nn.Module, spec: ModelSpec, chunk: KVChunk, operation: str) -> None:
    """Refuse a chunk whose ids, positions or tensors are none that ``model`` could have made.

    Raises:
        CompatibilityError: with what does not fit.
    """
    if not len(chunk):
        return
    reasons = [*_ids(model, chunk), *_axes(spec, chunk), *_cells(cache, model, spec, chunk)]
    reasons += _entries(model, spec, chunk)
    if reasons:
        more = len(reasons) - SHOWN
        rest = (Reason("and", "the same", f"{more} more that differ"),) if more > 0 else ()
        raise CompatibilityError(
            f"{operation}: {chunk!r} says that this model computed it, but holds what the model would not; it is "
            "damaged or forged. Compile it again (Skill.precompile). What does not fit:",
            (*reasons[:SHOWN], *rest),
        )


def _ids(model: nn.Module, chunk: KVChunk) -> Iterator[Reason]:
    size = host.num_embeddings(model)
    seen = [torch.tensor(ids, dtype=torch.int64) for ids in {part.prefix_ids for part in chunk.parts}]
    text = chunk.token_ids[chunk.image_numbers == 0]
    for what, ids in (("token ids", text), *(("ids before the chunk", ids) for ids in seen)):
        wrong = ids[(ids < UNKNOWN) | (ids >= size)]
        if wrong.numel():
            yield Reason(what, f"ids below {size}", str(int(wrong[0])))


def _axes(spec: ModelSpec, chunk: KVChunk) -> Iterator[Reason]:
    most = max((max(rotary.axes, default=0) for rotary in spec.rotaries() if rotary.axes is not None), default=0)
    found = 0 if chunk.axes is None else chunk.axes.shape[1]
    if found not in (0, most):
        yield Reason("axes", f"{most + 1} positions for each token", str(found + 1))


def _cells(cache: LedgeredCache, model: nn.Module, spec: ModelSpec, chunk: KVChunk) -> Iterator[Reason]:
    if len(chunk.layers) != len(spec.layers):
        yield Reason("holders of cells", str(len(spec.layers)), str(len(chunk.layers)))
        return
    wanted = cell_shapes(model) if spec.layers else ()
    for idx, (shapes, states, layer) in enumerate(zip(wanted, chunk.layers, cache.editable_layers, strict=True)):
        live = {name: tensor.dtype for name, tensor in layer.view().items()}
        yield from _named(f"holder {idx}", shapes, states)
        for name in shapes.keys() & states.keys():
            want, have = shapes[name], states[name]
            if want.shape[1::2] != tuple(have.shape[1::2]) or have.dtype not in (want.dtype, live.get(name)):
                expected = f"[1, {want.shape[1]}, {len(chunk)}, {want.shape[3]}] {want.dtype}"
                yield Reason(f"holder {idx} {name}", expected, f"{list(have.shape)} {have.dtype}")


def _entries(model: nn.Module, spec: ModelSpec, chunk: KVChunk) -> Iterator[Reason]:
    if spec.compressed is None or chunk.compressed is None:
        return  # splice_compressed says what is missing
    wanted = entry_shapes(model, spec.compressed, len(chunk), behind=bool(chunk.provenance.prefix_ids))
    held = chunk.compressed.layers
    if wanted.keys() != held.keys():
        yield Reason("compressed layers", f"{len(wanted)} of them", f"{len(held)}, others")
        return
    for layer_idx, shapes in wanted.items():
        where = f"layer {layer_idx}"
        named = {".".join(path): shape for path, shape in shapes.items()}
        states = {".".join(path): tensor for path, tensor in held[layer_idx].items()}
        yield from _named(where, named, states)
        for name in named.keys() & states.keys():
            have = Shape(states[name].dtype, tuple(states[name].shape))
            if named[name] != have:
                yield Reason(
                    f"{where} {name}",
                    f"{list(named[name].shape)} {named[name].dtype}",
                    f"{list(have.shape)} {have.dtype}",
                )


def _named(where: str, wanted: Mapping[str, Shape], found: Mapping[str, Tensor]) -> Iterator[Reason]:
    if wanted.keys() != found.keys():
        yield Reason(where, f"{sorted(wanted)[:5]}", f"{sorted(found)[:5]}")
