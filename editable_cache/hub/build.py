"""`Build`: everything that a stored chunk says about itself, checked, without its cells."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from editable_cache.chunk import ImageSpan, KVChunk, Provenance
from editable_cache.hub.facts import (
    UNKNOWN,
    identity_facts,
    layout_facts,
    origin_facts,
    provenance_facts,
    read_identity,
    read_layout,
    read_origin,
    read_provenance,
)
from editable_cache.hub.folder import open_manifest
from editable_cache.hub.payload import Payload
from editable_cache.hub.schema import MOST_ENTRIES, MOST_NAME, MOST_NUMBER, WORD, Section, is_printable, read_name
from editable_cache.hub.storage import COMPUTED, STORAGES, TensorFacts
from editable_cache.ops.quantize import Storage
from editable_cache.spec import LayerSpec, ModelIdentity, Origin

KIND = "editable_cache.chunk"
MOST_TEXT = 16 * 2**20
MOST_AXES = 15
FORMS = ("diagonal", "matrix", "replace")
INDEX = re.compile(r"0|[1-9][0-9]{0,4}", re.ASCII)
"""A number in a key, written in one way only."""


@dataclass(frozen=True, eq=False)
class Build:
    """One build of a skill: for one model, in one dtype, in one storage.

    Attributes:
        folder: where it lies.
        name: of the chunk, or None.
        text: what it was compiled from, for people only; the ids are the truth.
        token_ids, position_ids, axes, images, model, provenance, layout, origin: as in ``KVChunk``.
        layers: dtype and shape of every tensor as it was computed, by holder.
        storage: how the cells are stored: ``"original"``, ``"int8"`` or ``"fp8"``.
        live_ends: for recurrent models, how many tokens run live at the start and at the end, else None.
        forms: for recurrent models, the form of each transition by layer and state.
        compressed: indices of layers that compress windows of tokens.
        payload: the file that holds the cells, and what the manifest says about it.
    """

    folder: Path
    name: str | None
    text: str | None
    token_ids: Tensor
    position_ids: Tensor
    axes: Tensor | None
    images: tuple[ImageSpan, ...]
    model: ModelIdentity
    provenance: Provenance
    layout: tuple[LayerSpec, ...]
    origin: Origin
    layers: tuple[TensorFacts, ...]
    storage: Storage
    live_ends: tuple[int, int] | None
    forms: Mapping[tuple[int, int], str]
    compressed: tuple[int, ...]
    payload: Payload

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])


def chunk_facts(chunk: KVChunk, *, text: str | None, storage: Storage) -> dict[str, Any]:
    """The manifest of a chunk, without the facts of its payload."""
    recurrence, compressed = chunk.recurrence, chunk.compressed
    return {
        "kind": KIND,
        "version": 1,
        "name": chunk.name,
        "text": text,
        "token_ids": chunk.token_ids.tolist(),
        "position_ids": chunk.position_ids.tolist(),
        "axes": None if chunk.axes is None else chunk.axes.tolist(),
        "images": [[image.start, image.stop, image.digest] for image in chunk.images],
        "model": identity_facts(chunk.model),
        "origin": origin_facts(chunk.origin),
        "provenance": provenance_facts(chunk.provenance),
        "layout": layout_facts(chunk.layout),
        "storage": storage,
        "layers": [
            {
                name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
                for name, tensor in states.items()
            }
            for states in chunk.layers
        ],
        "recurrence": None
        if recurrence is None
        else {
            "head": recurrence.head,
            "tail": recurrence.tail,
            "forms": {f"{layer}.{state}": each.form for (layer, state), each in recurrence.transitions.items()},
        },
        "compressed": None if compressed is None else sorted(compressed.layers),
    }


def open_build(folder: str | Path) -> Build:
    """Read and check the manifest of a folder; its payload need not be there yet.

    Raises:
        ArtifactError: if it is missing, damaged, or contradicts itself.
    """
    facts = open_manifest(folder, KIND)
    token_ids = torch.tensor(facts.integers("token_ids", UNKNOWN), dtype=torch.int64)
    length = len(token_ids)
    position_ids = torch.tensor(facts.integers("position_ids", 0), dtype=torch.int64)
    facts.require(len(position_ids) == length, "position_ids", f"{length} integers", len(position_ids))
    live_ends, forms = _recurrence(facts.optional_section("recurrence"), length)
    build = Build(
        folder=Path(folder),
        name=read_name(facts),
        text=facts.optional_text("text", most=MOST_TEXT, printable=False),
        token_ids=token_ids,
        position_ids=position_ids,
        axes=_axes(facts, position_ids),
        images=_images(facts, length),
        model=read_identity(facts.section("model")),
        provenance=read_provenance(facts.section("provenance"), length),
        layout=read_layout(facts.optional_section("layout")),
        origin=read_origin(facts.section("origin")),
        layers=_layers(facts, length),
        storage=facts.choice("storage", STORAGES),
        live_ends=live_ends,
        forms=forms,
        compressed=_compressed(facts),
        payload=Payload.of(folder, facts),
    )
    wanted = (0, len(build.layers)) if build.layers else (len(build.layout),)
    facts.require(len(build.layout) in wanted, "layout", f"{len(build.layers)} holders", len(build.layout))
    for idx, (holder, states) in enumerate(zip(build.layout, build.layers, strict=False)):
        facts.require(_turns(holder, states), f"layout of holder {idx}", f"that of {list(states)}", holder)
    facts.done()
    return build


def _layers(facts: Section, length: int) -> tuple[TensorFacts, ...]:
    layers = []
    for holder in facts.sections("layers"):
        tensors = {}
        for name in holder.keys():  # noqa: SIM118
            holder.require(WORD.fullmatch(name) is not None, "tensor", "the name of one", name)
            tensor = holder.section(name)
            dtype, shape = tensor.choice("dtype", tuple(COMPUTED)), tensor.integers("shape", 0, most=4)
            fits = len(shape) == 4 and shape[0] == 1 and shape[2] == length
            tensor.require(fits, "shape", f"[1, num_heads, {length}, head_dim]", shape)
            tensor.done()
            tensors[name] = (str(dtype), tuple(shape))
        layers.append(tensors)
    return tuple(layers)


def _turns(holder: LayerSpec, states: TensorFacts) -> bool:
    """Whether the layout of a holder speaks of its tensors, and turns channels that they have."""
    facts = {tensor.name: tensor for tensor in holder.tensors}
    if not states:
        return True
    return facts.keys() == states.keys() and all(
        tensor.counter == (states[name][0] == "int64")
        and (tensor.rotary is None or (not tensor.counter and tensor.rotary.stop <= states[name][1][-1]))
        for name, tensor in facts.items()
    )


def _axes(facts: Section, position_ids: Tensor) -> Tensor | None:
    rows, length = facts.take("axes"), len(position_ids)
    if rows is None:
        return None
    fine = isinstance(rows, list) and len(rows) == length > 0
    fine = fine and all(isinstance(row, list) and 0 < len(row) == len(rows[0]) <= MOST_AXES for row in rows)
    fine = fine and all(type(value) is int and abs(value) < MOST_NUMBER for row in rows for value in row)
    facts.require(bool(fine), "axes", f"null, or for {length} tokens 1 to {MOST_AXES} integers each", rows)
    axes = torch.tensor(rows, dtype=torch.int64)
    facts.require(bool((axes + position_ids[:, None] >= 0).all()), "axes", "positions >= 0 on all axes", rows)
    return axes


def _images(facts: Section, length: int) -> tuple[ImageSpan, ...]:
    spans, end = [], 0
    for span in facts.items("images"):
        fine = isinstance(span, list) and [type(value) for value in span] == [int, int, str]
        fine = fine and len(span[2]) <= MOST_NAME and is_printable(span[2])
        facts.require(fine and end <= span[0] < span[1] <= length, "images", "ascending [start, stop, digest]", span)
        spans.append(ImageSpan(*span))
        end = span[1]
    return tuple(spans)


def _recurrence(facts: Section | None, length: int) -> tuple[tuple[int, int] | None, dict[tuple[int, int], str]]:
    if facts is None:
        return None, {}
    ends, named = (facts.integer("head", 1, length), facts.integer("tail", 0, length)), facts.section("forms")
    facts.require(sum(ends) <= length, "recurrence", f"live ends inside of {length} tokens", ends)
    forms = {}
    for key in named.keys():  # noqa: SIM118
        indices = key.split(".")
        known = len(indices) == 2 and all(INDEX.fullmatch(index) for index in indices)
        named.require(known, "key", "'<layer>.<state>'", key)
        forms[int(indices[0]), int(indices[1])] = str(named.choice(key, FORMS))
    facts.done()
    return ends, forms


def _compressed(facts: Section) -> tuple[int, ...]:
    layers = facts.take("compressed")
    if layers is None:
        return ()
    fine = isinstance(layers, list) and all(type(layer) is int and 0 <= layer < MOST_ENTRIES for layer in layers)
    fine = fine and 0 < len(layers) <= MOST_ENTRIES and layers == sorted(set(layers))
    facts.require(bool(fine), "compressed", "null, or an ascending list of layers", layers)
    return tuple(layers)
