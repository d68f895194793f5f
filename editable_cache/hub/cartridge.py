"""PEFT cartridges (Eyuboglu et al., 2025; ``peft.CartridgeConfig``): trained keys and values as chunks, and back.

A folder holds ``adapter_config.json`` and ``adapter_model.safetensors`` with one tensor ``prompt_embeddings``
``[num_tokens, num_layers * 2 * num_heads * head_dim]``: for each token the key, then the value, of every layer, keys
turned to positions 0 to ``num_tokens - 1``. PEFT 0.21's own ``generate`` drops a cartridge with transformers
5.24, because it passes the cache under its old name; its ``forward`` reads it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from editable_cache.chunk import KVChunk, Provenance
from editable_cache.errors import ArtifactError, CompatibilityError, Reason, TrustWarning
from editable_cache.hub.header import read_header
from editable_cache.hub.manifest import read_bounded, require_own, unique
from editable_cache.hub.payload import file_digest
from editable_cache.hub.remote import is_repo_id
from editable_cache.hub.schema import MOST_TOKENS, Section
from editable_cache.ops import rotate_into, rotation

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
TENSOR = "prompt_embeddings"
MAX_CONFIG_BYTES = 2**20
DTYPES = ("F32", "F16", "BF16")
MOST_LAYERS, MOST_DIM = 65_536, 2**20


@dataclass(frozen=True)
class Shape:
    """What the cells of a cartridge share: number of layers, of key/value heads, and head size."""

    num_layers: int
    num_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Numbers that a cartridge holds for one token."""
        return self.num_layers * 2 * self.num_heads * self.head_dim


def read_cartridge(folder: str | Path, empty: KVChunk) -> KVChunk:
    """The cartridge of a folder as a chunk.

    Args:
        folder: written by PEFT's ``save_pretrained`` or by ``write_cartridge``.
        empty: a chunk without tokens of the model that it is for: says who made the chunk, and the shape and dtype of
            each layer's cells.

    Returns:
        A chunk at positions 0 to ``num_tokens - 1`` with unknown ids, in the dtype of ``empty``, in new tensors.

    Raises:
        ArtifactError: for a missing, damaged, truncated or pickled file, one that holds something else, or numbers that
            are not finite.
        CompatibilityError: if the model's cells have another shape, or are not plain keys and values.

    Warns:
        TrustWarning: if it was trained for a model of another repository.
    """
    folder, shape = Path(folder), shape_of(empty, "from_cartridge")
    config = _read_config(folder / CONFIG)
    count, base = _check_config(config, shape, folder)
    embeddings = _read_weights(folder, count, shape)
    if is_repo_id(base) and is_repo_id(empty.origin.repo) and base != empty.origin.repo:
        warnings.warn(
            f"{folder}: trained for {base}, read for {empty.origin.repo}; unless both have the same weights, what it "
            "says means nothing to this model.",
            TrustWarning,
            stacklevel=3,
        )
    dtype = next(tensor.dtype for states in empty.layers for tensor in states.values())
    cells = embeddings.to(dtype)
    for tensor, of in ((embeddings, "of the file"), (cells, f"in {dtype}")):
        if not bool(tensor.isfinite().all()):
            raise ArtifactError(f"{folder / WEIGHTS}: expected finite numbers, got others {of}.")
    provenance = Provenance("trained", note=f"PEFT cartridge, sha256 {file_digest(folder / WEIGHTS)[:16]}")
    if dtype != embeddings.dtype:
        names = [str(each).removeprefix("torch.") for each in (embeddings.dtype, dtype)]
        provenance = provenance.noted(f"converted from {names[0]} to {names[1]}")
    by_layer = cells.view(count, shape.num_layers, 2, shape.num_heads, shape.head_dim).permute(1, 2, 3, 0, 4)
    changes = {
        "layers": tuple({"keys": pair[:1].clone(), "values": pair[1:].clone()} for pair in by_layer),
        "token_ids": torch.full((count,), -1),
        "position_ids": torch.arange(count),
        "provenance": provenance,
    }
    return KVChunk(**{**{field.name: getattr(empty, field.name) for field in fields(KVChunk)}, **changes})


def write_cartridge(chunk: KVChunk, folder: str | Path) -> None:
    """Write a chunk as a cartridge, its keys turned to positions 0 to ``num_tokens - 1``.

    Raises:
        CompatibilityError: if the format can't hold the chunk, with every reason.
        ArtifactError: if the folder can't be written, or without ``peft``.
    """
    try:
        from peft import CartridgeConfig
    except ImportError as error:
        raise ArtifactError(
            "save_cartridge: expected peft 0.21 or newer, which is not installed: pip install 'editable-cache[peft]'"
        ) from error
    shape = shape_of(chunk, "save_cartridge")
    if not len(chunk):
        raise CompatibilityError("save_cartridge: expected at least one token, got none.")
    target = torch.arange(len(chunk))
    packed = torch.empty((len(chunk), shape.num_layers, 2, shape.num_heads, shape.head_dim), dtype=_dtype(chunk))
    for index, (states, holder) in enumerate(zip(chunk.layers, chunk.layout, strict=True)):
        for tensor in holder.tensors:
            cells, out = states[tensor.name].cpu(), packed[:, index, int(tensor.name == "values")].transpose(0, 1)[None]
            if tensor.rotary is None or torch.equal(chunk.position_ids, target):
                out.copy_(cells)
            else:
                rotate_into(out, cells, rotation(tensor.rotary, chunk.position_ids, target))
    config = CartridgeConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=chunk.origin.repo or None,
        revision=chunk.origin.revision or None,
        inference_mode=True,
        num_virtual_tokens=len(chunk),
        num_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        token_dim=shape.num_heads * shape.head_dim,
        num_transformer_submodules=1,
    )
    _write(Path(folder), config, packed.view(len(chunk), shape.width))


def shape_of(chunk: KVChunk, operation: str) -> Shape:
    """The shape that the cells of all layers share.

    Raises:
        CompatibilityError: if the format can't hold such a chunk.
    """
    reasons = _against(chunk)
    if reasons:
        raise CompatibilityError(
            f"{operation}: a PEFT cartridge holds keys and values of one shape for every layer, nothing else; save "
            "such a chunk with save_pretrained. What it can't hold:",
            tuple(reasons),
        )
    heads, dim = chunk.layers[0]["keys"].shape[1], chunk.layers[0]["keys"].shape[3]
    return Shape(len(chunk.layers), heads, dim)


def _against(chunk: KVChunk) -> list[Reason]:
    facts = (
        ("layers", "cells only", "recurrent layers", chunk.recurrence is not None),
        ("layers", "cells only", "compressed layers", chunk.compressed is not None),
        ("positions", "one for each token", "several (images)", chunk.axes is not None),
        ("adapters", "none: the base model reads it", "active ones", bool(chunk.model.adapters)),
        ("layout", "how its tensors rotate", "none recorded", not chunk.layout),
        ("layers", "at least one that holds cells", "none", not chunk.layers),
    )
    reasons = [Reason(what, expected, got) for what, expected, got, against in facts if against]
    first = next((t for states in chunk.layers for t in states.values()), None)
    for index, (states, holder) in enumerate(zip(chunk.layers, chunk.layout, strict=bool(chunk.layout))):
        names = [tensor.name for tensor in holder.tensors]
        if sorted(states) != ["keys", "values"] or sorted(names) != ["keys", "values"] or holder.layer_idx != index:
            what = f"layer {holder.layer_idx}"
            reasons.append(Reason(what, "keys and values", ", ".join(sorted({*states, *names})) or "nothing"))
            continue
        for name, tensor in states.items():
            assert first is not None
            mine, wanted = (
                (f"{t.shape[1]} heads of {t.shape[3]} channels in {str(t.dtype).removeprefix('torch.')}")
                for t in (tensor, first)
            )
            if mine != wanted:
                reasons.append(Reason(f"layer {index} {name}", wanted, mine))
    if first is not None and str(first.dtype).removeprefix("torch.") not in ("float32", "float16", "bfloat16"):
        reasons.append(Reason("dtype", "float32, float16 or bfloat16", str(first.dtype)))
    return reasons


def _dtype(chunk: KVChunk) -> torch.dtype:
    return chunk.layers[0]["keys"].dtype


def _read_config(path: Path) -> Section:
    content = read_bounded(path, MAX_CONFIG_BYTES, "PEFT's save_pretrained")
    try:
        return Section(json.loads(content.decode("utf-8"), object_pairs_hook=unique), str(path))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: not readable as JSON: {str(error)[:200]!r}.") from error


def _check_config(config: Section, shape: Shape, folder: Path) -> tuple[int, str]:
    """Number of tokens and base model of a cartridge whose other facts fit ``shape``."""
    config.choice("peft_type", ("CARTRIDGE",))
    count = config.integer("num_virtual_tokens", 1, MOST_TOKENS)
    stated = {"num_layers": MOST_LAYERS, "num_attention_heads": MOST_DIM, "token_dim": MOST_DIM}
    fits = {
        "num_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "token_dim": shape.num_heads * shape.head_dim,
    }
    found = {key: _optional_integer(config, key, most) for key, most in stated.items()}
    reasons = [
        Reason(key, str(fits[key]), str(value)) for key, value in found.items() if value not in (None, fits[key])
    ]
    if reasons:
        raise CompatibilityError(
            f"{folder}: this cartridge was trained for a model of another shape. What differs:", tuple(reasons)
        )
    submodules = _optional_integer(config, "num_transformer_submodules", 2)
    config.require(submodules in (None, 1), "num_transformer_submodules", "1 (a decoder)", submodules)
    return count, config.optional_text("base_model_name_or_path") or ""


def _optional_integer(config: Section, key: str, most: int) -> int | None:
    if key not in config.keys():  # noqa: SIM118
        return None
    value = config.take(key)
    fits = value is None or (type(value) is int and 0 < value <= most)
    config.require(fits, key, f"null, or an integer of 1 to {most}", value)
    return None if value is None else int(value)


def _read_weights(folder: Path, count: int, shape: Shape) -> Tensor:
    """``[count, width]``, memory-mapped; the header is checked before anything is read."""
    path = folder / WEIGHTS
    require_own(path)
    if not path.is_file():
        pickled = (folder / PICKLED).exists()
        got = f"{PICKLED}, a pickle, which can run code; save it again with safe_serialization=True" if pickled else ""
        raise ArtifactError(f"{path}: expected safetensors, got {got or 'no such file'}.")
    try:
        with path.open("rb") as file:
            entries = read_header(path, file, os.fstat(file.fileno()).st_size)
        if set(entries) != {TENSOR}:
            raise ArtifactError(
                f"{path}: expected one tensor {TENSOR!r} and nothing else, got {ascii(sorted(entries)[:3])[:200]}."
            )
        entry, wanted = entries[TENSOR], (count, shape.width)
        if entry.shape != wanted or entry.dtype not in DTYPES:
            raise ArtifactError(
                f"{path}: expected {list(wanted)} (tokens; layers x 2 x heads x channels) in one of {list(DTYPES)}, "
                f"got {list(entry.shape)} in {entry.dtype}."
            )
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(TENSOR)
    except (SafetensorError, ValueError, TypeError, RuntimeError, OSError, OverflowError) as error:
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"{path}: not a readable safetensors file: {error}.") from error
    return tensor


def _write(folder: Path, config: Any, packed: Tensor) -> None:
    """Both files, each whole or not at all."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        drafts = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
        try:
            save_file({TENSOR: packed}, drafts / WEIGHTS, metadata={"format": "pt"})
            config.save_pretrained(str(drafts))
            (drafts / WEIGHTS).chmod((drafts / CONFIG).stat().st_mode & 0o777)  # safetensors lets nobody else read
            for name in (WEIGHTS, CONFIG):
                with (drafts / name).open("rb+") as file:
                    os.fsync(file.fileno())
                os.replace(drafts / name, folder / name)
        finally:
            shutil.rmtree(drafts, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{folder}: can't be written: {error}.") from error
