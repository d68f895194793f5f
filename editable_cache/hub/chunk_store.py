"""A chunk as a folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from editable_cache.chunk import Compressed, KVChunk, Recurrence, Transition
from editable_cache.errors import ArtifactError
from editable_cache.hub.build import INDEX, Build, chunk_facts, open_build
from editable_cache.hub.folder import write_folder
from editable_cache.hub.payload import read_payload
from editable_cache.hub.schema import WORD
from editable_cache.hub.storage import STORAGES, pack, unpack
from editable_cache.ops.quantize import Storage

PARTS = ("factor", "offset", "conv")
STATES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def save_chunk(chunk: KVChunk, folder: str | Path, *, text: str | None = None, storage: Storage = "original") -> None:
    """Write a chunk; ``text`` is for people only, the ids are the truth.

    Transitions of recurrent layers and compressed entries are always stored as they were computed.

    Raises:
        ArtifactError: if the folder can't be written, or nobody could read it again: a name that can't be stored, more
            than a million tokens, an unknown storage, or more of anything than the format allows.
        SpanError: if cells that are not finite are to be stored in 8 bits.
    """
    if storage not in STORAGES:
        raise ArtifactError(f"storage: expected one of {list(STORAGES)}, got {storage!r:.80}.")
    facts = chunk_facts(chunk, text=text, storage=storage)
    tensors = pack(chunk.layers, storage)
    transitions = {} if chunk.recurrence is None else chunk.recurrence.transitions
    for (layer_idx, state_idx), transition in transitions.items():
        for part in PARTS:
            tensor = getattr(transition, part)
            if tensor is not None:
                tensors[f"transitions.{layer_idx}.{state_idx}.{part}"] = tensor
    for layer_idx, held in ({} if chunk.compressed is None else chunk.compressed.layers).items():
        tensors |= {f"compressed.{layer_idx}.{'.'.join(path)}": tensor for path, tensor in held.items()}
    write_folder(folder, tensors, facts, check=open_build)


def load_chunk(source: str | Path | Build, *, exact: bool = False) -> tuple[KVChunk, Build]:
    """Read a chunk, and what it says about itself; tensors stored as they were computed are memory-mapped.

    Args:
        source: a folder, or what ``open_build`` read from it already.
        exact: compare the payload's SHA-256 too, at a tenth of the speed.

    Raises:
        ArtifactError: if anything is missing, damaged, or contradicts itself.
    """
    build = source if isinstance(source, Build) else open_build(source)
    tensors = read_payload(build.payload, exact=exact)
    layers = unpack(tensors, build.layers, build.storage, str(build.payload.path))
    recurrence, compressed = _recurrence(build, tensors), _compressed(build, tensors)
    if tensors:
        raise ArtifactError(f"{build.payload.path}: expected no other tensors, got {ascii(sorted(tensors)[:3])[:200]}.")
    if len(build) and not any(layers) and recurrence is None and compressed is None:
        raise ArtifactError(f"{build.payload.path}: expected cells in at least one layer, got none.")
    provenance = build.provenance
    if build.storage != "original" and f"stored as {build.storage}" not in provenance.note:
        provenance = provenance.noted(f"stored as {build.storage}")
    try:
        chunk = KVChunk(
            layers=layers,
            token_ids=build.token_ids,
            position_ids=build.position_ids,
            model=build.model,
            provenance=provenance,
            name=build.name,
            recurrence=recurrence,
            axes=build.axes,
            images=build.images,
            compressed=compressed,
            layout=build.layout,
            origin=build.origin,
        )
    except ValueError as error:
        raise ArtifactError(f"{build.folder}: the chunk contradicts itself: {error}") from error
    return chunk, build


def _recurrence(build: Build, tensors: dict[str, Tensor]) -> Recurrence | None:
    if build.live_ends is None:
        return None
    transitions = {}
    for (layer_idx, state_idx), form in build.forms.items():
        key = f"transitions.{layer_idx}.{state_idx}"
        parts = {part: tensors.pop(f"{key}.{part}", None) for part in PARTS}
        for part, tensor in parts.items():
            _require_state(tensor, f"{build.payload.path}: {key}.{part}")
        try:
            transitions[layer_idx, state_idx] = Transition(form, **parts)  # type: ignore[arg-type]
        except ValueError as error:
            raise ArtifactError(f"{build.payload.path}: {key}: {error}") from error
    return Recurrence(*build.live_ends, transitions)


def _compressed(build: Build, tensors: dict[str, Tensor]) -> Compressed | None:
    if not build.compressed:
        return None
    found: dict[int, dict[tuple[str, ...], Tensor]] = {layer: {} for layer in build.compressed}
    for key in [key for key in tensors if key.startswith("compressed.")]:
        layer, *path = key.split(".")[1:]
        known = (
            INDEX.fullmatch(layer) and int(layer) in found and len(path) in (1, 2) and all(map(WORD.fullmatch, path))
        )
        tensor = tensors.pop(key)
        where = f"{build.payload.path}: {ascii(key)[:200]}"
        _require_state(tensor, where)
        recent = len(path) == 2 or (tensor.dim() == 4 and 0 < tensor.shape[-2] <= len(build))
        if not known or tensor.dim() < 2 or tensor.shape[0] != 1 or not recent:
            raise ArtifactError(
                f"{where}: expected compressed.<layer>.<name> [1, ...] of up to {len(build)} recent tokens, in layers "
                f"{list(found)[:9]}, got {list(tensor.shape)}."
            )
        found[int(layer)][tuple(path)] = tensor
    lost = [layer for layer, held in found.items() if ("keys",) not in held]
    if lost:
        raise ArtifactError(
            f"{build.payload.path}: expected recent keys in every compressed layer, got none in {lost[:9]}."
        )
    return Compressed(found)


def _require_state(tensor: Tensor | None, where: str) -> None:
    """Refuse what no recurrent state or compressed entry is made of."""
    if tensor is not None and tensor.dtype not in STATES:
        raise ArtifactError(f"{where}: expected one of {[str(dtype) for dtype in STATES]}, got {tensor.dtype}.")
