"""A chunk as a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from editable_cache.chunk import KVChunk, Provenance
from editable_cache.errors import ArtifactError
from editable_cache.hub.folder import read_folder, require, write_folder
from editable_cache.spec import ModelIdentity

KIND = "editable_cache.chunk"


def save_chunk(chunk: KVChunk, folder: str | Path, *, text: str | None = None) -> None:
    """Write a chunk; ``text`` is for people only, the ids are the truth."""
    tensors = {f"layers.{i}.{name}": t for i, states in enumerate(chunk.layers) for name, t in states.items()}
    manifest = {
        "kind": KIND,
        "version": 1,
        "name": chunk.name,
        "text": text,
        "num_layers": len(chunk.layers),
        "token_ids": chunk.token_ids.tolist(),
        "position_ids": chunk.position_ids.tolist(),
        "model": chunk.model.to_dict(),
        "provenance": {
            "how": chunk.provenance.how,
            "prefix_ids": list(chunk.provenance.prefix_ids),
            "note": chunk.provenance.note,
        },
    }
    write_folder(folder, tensors, manifest)


def load_chunk(folder: str | Path) -> tuple[KVChunk, str | None]:
    """Read a chunk and its text; the tensors are memory-mapped.

    Raises:
        ArtifactError: if anything is missing, damaged, or contradicts itself.
    """
    tensors, manifest = read_folder(folder, KIND)
    name, text = manifest.get("name"), manifest.get("text")
    require(name is None or isinstance(name, str), folder, "name", "a text or null", name)
    require(text is None or isinstance(text, str), folder, "text", "a text or null", text)
    token_ids = _integers(manifest, "token_ids", folder)
    position_ids = _integers(manifest, "position_ids", folder)
    require(
        len(position_ids) == len(token_ids), folder, "position_ids", f"{len(token_ids)} integers", len(position_ids)
    )
    provenance = _mapping(manifest, "provenance", folder)
    note, how = provenance.get("note", ""), provenance.get("how")
    require(
        isinstance(how, str) and isinstance(note, str),
        folder,
        "provenance",
        "texts 'how' and 'note'",
        provenance,
    )
    chunk = KVChunk(
        layers=_layers(tensors, manifest, len(token_ids), folder),
        token_ids=token_ids,
        position_ids=position_ids,
        model=_identity(_mapping(manifest, "model", folder), folder),
        provenance=Provenance(str(how), tuple(_integers(provenance, "prefix_ids", folder).tolist()), note),
        name=name,
    )
    return chunk, text


def _layers(
    tensors: Mapping[str, Tensor], manifest: Mapping[str, Any], length: int, folder: str | Path
) -> tuple[dict[str, Tensor], ...]:
    count = manifest.get("num_layers")
    require(
        isinstance(count, int) and 0 < count <= len(tensors),
        folder,
        "num_layers",
        f"1 to {len(tensors)}",
        count,
    )
    assert isinstance(count, int)
    layers: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for key, tensor in tensors.items():
        parts = key.split(".")
        known = len(parts) == 3 and parts[0] == "layers" and parts[1].isdecimal() and int(parts[1]) < count
        require(known, folder, "tensor", f"layers.<0..{count - 1}>.<name>", key)
        shape_ok = tensor.dim() == 4 and tensor.shape[0] == 1 and tensor.shape[-2] == length
        require(
            shape_ok and tensor.is_floating_point(),
            folder,
            key,
            f"[1, heads, {length}, head_dim]",
            list(tensor.shape),
        )
        layers[int(parts[1])][parts[2]] = tensor
    names = {frozenset(states) for states in layers}
    require(
        len(names) == 1 and frozenset() not in names,
        folder,
        "tensors",
        "the same names in every layer",
        names,
    )
    return tuple(layers)


def _integers(source: Mapping[str, Any], key: str, folder: str | Path) -> Tensor:
    values = source.get(key)
    fine = isinstance(values, list) and all(type(v) is int and 0 <= v < 2**62 for v in values)
    require(fine, folder, key, "a list of integers >= 0", str(values)[:60])
    return torch.tensor(values, dtype=torch.int64)


def _mapping(source: Mapping[str, Any], key: str, folder: str | Path) -> Mapping[str, Any]:
    value = source.get(key)
    if not isinstance(value, dict):
        raise ArtifactError(f"{folder}: {key}: expected an object, got {value!r}.")
    return value


def _identity(values: Mapping[str, Any], folder: str | Path) -> ModelIdentity:
    names = {field.name for field in fields(ModelIdentity)}
    fine = set(values) == names and all(isinstance(value, str) for value in values.values())
    require(fine, folder, "model", f"texts {sorted(names)}", sorted(values))
    return ModelIdentity(**values)
