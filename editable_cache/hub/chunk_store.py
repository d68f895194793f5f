"""A chunk as a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from editable_cache.chunk import Compressed, ImageSpan, KVChunk, Provenance, Recurrence, Transition
from editable_cache.errors import ArtifactError
from editable_cache.hub.folder import read_folder, require, write_folder
from editable_cache.spec import ModelIdentity

KIND = "editable_cache.chunk"
PARTS = ("factor", "offset", "conv")
FORMS = ("diagonal", "matrix", "replace")
MOST_LAYERS = 65_536


def save_chunk(chunk: KVChunk, folder: str | Path, *, text: str | None = None) -> None:
    """Write a chunk; ``text`` is for people only, the ids are the truth."""
    tensors = {f"layers.{i}.{name}": t for i, states in enumerate(chunk.layers) for name, t in states.items()}
    recurrence = chunk.recurrence
    for (layer_idx, state_idx), transition in ({} if recurrence is None else recurrence.transitions).items():
        for part in PARTS:
            tensor = getattr(transition, part)
            if tensor is not None:
                tensors[f"transitions.{layer_idx}.{state_idx}.{part}"] = tensor
    compressed = {} if chunk.compressed is None else chunk.compressed.layers
    for layer_idx, held in compressed.items():
        tensors |= {f"compressed.{layer_idx}.{'.'.join(path)}": tensor for path, tensor in held.items()}
    manifest = {
        "kind": KIND,
        "version": 1,
        "name": chunk.name,
        "text": text,
        "num_layers": len(chunk.layers),
        "recurrence": None if recurrence is None else _recurrence_manifest(recurrence),
        "compressed": None if chunk.compressed is None else sorted(compressed),
        "token_ids": chunk.token_ids.tolist(),
        "position_ids": chunk.position_ids.tolist(),
        "axes": None if chunk.axes is None else chunk.axes.tolist(),
        "images": [[image.start, image.stop, image.digest] for image in chunk.images],
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
        recurrence=_recurrence(tensors, manifest, folder),
        axes=_axes(manifest, len(token_ids), folder),
        images=_images(manifest, len(token_ids), folder),
        compressed=_compressed(tensors, manifest, len(token_ids), folder),
    )
    return chunk, text


def _compressed(
    tensors: Mapping[str, Tensor], manifest: Mapping[str, Any], length: int, folder: str | Path
) -> Compressed | None:
    given = {key: tensor for key, tensor in tensors.items() if key.startswith("compressed.")}
    layers = manifest.get("compressed")
    if layers is None:
        require(not given, folder, "compressed", "a list of layers, for the file holds their entries", None)
        return None
    fine = isinstance(layers, list) and all(type(layer) is int and 0 <= layer < MOST_LAYERS for layer in layers)
    require(fine and layers, folder, "compressed", "a list of layers", str(layers)[:60])
    assert isinstance(layers, list)
    found: dict[int, dict[tuple[str, ...], Tensor]] = {layer: {} for layer in layers}
    for key, tensor in given.items():
        layer, *path = key.split(".")[1:]
        known = layer.isdecimal() and len(layer) < 6 and int(layer) in found and len(path) in (1, 2)
        require(known, folder, "tensor", f"compressed.<one of {layers}>.<name>", key)
        recent = len(path) == 2 or (tensor.dim() == 4 and 0 < tensor.shape[-2] <= length)
        fine = tensor.dim() > 1 and tensor.shape[0] == 1 and tensor.is_floating_point() and recent
        require(fine, folder, key, f"[1, ...], of up to {length} recent tokens", list(tensor.shape))
        found[int(layer)][tuple(path)] = tensor
    lost = [layer for layer, held in found.items() if ("keys",) not in held]
    require(not lost, folder, "compressed", "recent keys in every layer", f"none in {lost}")
    return Compressed(found)


def _axes(manifest: Mapping[str, Any], length: int, folder: str | Path) -> Tensor | None:
    rows = manifest.get("axes")
    if rows is None:
        return None
    wanted = f"null, or {length} rows of integers"
    require(isinstance(rows, list) and len(rows) == length, folder, "axes", wanted, str(rows)[:60])
    assert isinstance(rows, list)
    fine = all(isinstance(row, list) and len(row) == len(rows[0]) for row in rows)
    fine = fine and all(type(value) is int and abs(value) < 2**62 for row in rows for value in row)
    require(fine, folder, "axes", wanted, str(rows)[:60])
    return torch.tensor(rows, dtype=torch.int64)


def _images(manifest: Mapping[str, Any], length: int, folder: str | Path) -> tuple[ImageSpan, ...]:
    spans, end = manifest.get("images", []), 0
    require(isinstance(spans, list), folder, "images", "a list", spans)
    assert isinstance(spans, list)
    for span in spans:
        fine = isinstance(span, list) and [type(value) for value in span] == [int, int, str]
        require(fine and end <= span[0] < span[1] <= length, folder, "images", "ascending [start, stop, digest]", span)
        end = span[1]
    return tuple(ImageSpan(*span) for span in spans)


def _recurrence_manifest(recurrence: Recurrence) -> dict[str, Any]:
    forms = {f"{layer}.{state}": transition.form for (layer, state), transition in recurrence.transitions.items()}
    return {"head": recurrence.head, "tail": recurrence.tail, "forms": forms}


def _recurrence(tensors: Mapping[str, Tensor], manifest: Mapping[str, Any], folder: str | Path) -> Recurrence | None:
    given = {key: tensor for key, tensor in tensors.items() if key.startswith("transitions.")}
    if manifest.get("recurrence") is None:
        require(not given, folder, "recurrence", "an object, for the file holds transitions", None)
        return None
    values = _mapping(manifest, "recurrence", folder)
    head, tail, forms = values.get("head"), values.get("tail"), _mapping(values, "forms", folder)
    fine = type(head) is int and type(tail) is int and 1 <= head < 2**31 and 0 <= tail < 2**31
    require(fine, folder, "recurrence", "a head of 1 or more and a tail of 0 or more tokens", (head, tail))
    transitions, used = {}, set()
    for key, form in forms.items():
        indices = key.split(".")
        known = len(indices) == 2 and all(i.isdecimal() and len(i) < 6 for i in indices) and form in FORMS
        require(known, folder, "recurrence", "'<layer>.<state>': a form", (key, form))
        names = {part: f"transitions.{key}.{part}" for part in PARTS}
        used |= set(names.values())
        parts = {part: given.get(name) for part, name in names.items()}
        try:
            transitions[int(indices[0]), int(indices[1])] = Transition(form, **parts)
        except ValueError as error:
            raise ArtifactError(f"{folder}: transitions.{key}: {error}") from error
    require(given.keys() <= used, folder, "transitions", "those that the manifest names", sorted(given.keys() - used))
    assert type(head) is int
    assert type(tail) is int
    return Recurrence(head, tail, transitions)


def _layers(
    tensors: Mapping[str, Tensor], manifest: Mapping[str, Any], length: int, folder: str | Path
) -> tuple[dict[str, Tensor], ...]:
    count = manifest.get("num_layers")
    require(
        type(count) is int and 0 <= count <= MOST_LAYERS,
        folder,
        "num_layers",
        f"0 to {MOST_LAYERS}",
        count,
    )
    assert isinstance(count, int)
    layers: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for key, tensor in tensors.items():
        if key.startswith(("transitions.", "compressed.")):
            continue
        parts = key.split(".")
        known = len(parts) == 3 and parts[0] == "layers" and parts[1].isdecimal() and int(parts[1]) < count
        require(known, folder, "tensor", f"layers.<0..{count - 1}>.<name>", key)
        shape_ok = tensor.dim() == 4 and tensor.shape[0] == 1 and tensor.shape[-2] == length
        require(
            shape_ok and (tensor.is_floating_point() or tensor.dtype == torch.int64),
            folder,
            key,
            f"[1, heads, {length}, head_dim]",
            list(tensor.shape),
        )
        layers[int(parts[1])][parts[2]] = tensor
    require(
        not count or any(layers),
        folder,
        "tensors",
        "cells in at least one layer",
        "none",
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
