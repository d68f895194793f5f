"""Chunks side by side in one chunk, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from editable_cache.chunk import KVChunk, LayerStates, Part, Provenance
from editable_cache.errors import CompatibilityError, Reason, SpanError
from editable_cache.ops.rotate import Rotation, rotate_into, rotation
from editable_cache.spec import LayerSpec, ModelIdentity, Origin, RotarySpec, compare


def merged(chunks: Sequence[KVChunk], name: str | None = None) -> KVChunk:
    """One chunk that holds the cells of several side by side; see ``Skill.merge``.

    Args:
        chunks: of one model and layout, in this order; those without tokens are left out.

    Returns:
        A chunk in new tensors. The first part begins where the first chunk did; its bits are kept if its positions
        have no gaps. Keys of the others are turned to the positions behind it, in float32 and rounded once to their
        dtype.

    Raises:
        SpanError: if there is no token.
        CompatibilityError: for chunks of different models or layouts, without a layout, or with recurrent or
            compressed layers.
    """
    for number, chunk in enumerate(chunks):
        if not isinstance(chunk, KVChunk):
            raise CompatibilityError(f"merge: expected chunks, got {type(chunk).__name__} as number {number}.")
    chunks = [chunk for chunk in chunks if len(chunk)]
    if not chunks:
        raise SpanError("merge: expected at least one chunk with a token, got none.")
    model = _one_model(chunks)
    placed = list(_placed(chunks))
    return KVChunk(
        layers=_layers(placed, chunks[0].layout),
        token_ids=torch.cat([chunk.token_ids for chunk in chunks]),
        position_ids=torch.cat([each.position_ids for each in placed]),
        model=model,
        provenance=Provenance("merged", parts=tuple(part for each in placed for part in each.parts)),
        name=name,
        axes=_axes(chunks),
        images=tuple(
            replace(image, start=each.start + image.start, stop=each.start + image.stop)
            for each in placed
            for image in each.chunk.images
        ),
        layout=chunks[0].layout,
        origin=_origin(chunks),
    )


class _Placed(NamedTuple):
    """A chunk, the index of its first token in the whole, and where its tokens go, ``[num_tokens]``."""

    chunk: KVChunk
    start: int
    position_ids: Tensor

    @property
    def parts(self) -> list[Part]:
        return [replace(p, start=self.start + p.start, stop=self.start + p.stop) for p in self.chunk.parts]

    def turns(self) -> dict[RotarySpec, Rotation]:
        """The rotation of each kind that moves the chunk; none if it stays."""
        if torch.equal(self.chunk.position_ids, self.position_ids):
            return {}
        kinds = (tensor.rotary for layer in self.chunk.layout for tensor in layer.tensors)
        return {
            kind: rotation(kind, self.chunk.position_ids, self.position_ids, axes=self.chunk.axes)
            for kind in dict.fromkeys(kinds)
            if kind is not None
        }


def _placed(chunks: Sequence[KVChunk]) -> list[_Placed]:
    first, start = int((chunks[0].position_ids - chunks[0].steps)[0]), 0
    found = []
    for chunk in chunks:
        found.append(_Placed(chunk, start, first + chunk.steps))
        first, start = first + chunk.extent, start + len(chunk)
    return found


def _layers(placed: Sequence[_Placed], layout: Sequence[LayerSpec]) -> tuple[LayerStates, ...]:
    """The cells of all holders, each chunk moved to its place; every tensor is allocated once."""
    total, layers = sum(len(each.chunk) for each in placed), []
    turns = [each.turns() for each in placed]
    for index, holder in enumerate(layout):
        states = {}
        for tensor in holder.tensors:
            like = placed[0].chunk.layers[index][tensor.name]
            whole = states[tensor.name] = like.new_empty((*like.shape[:2], total, like.shape[-1]))
            for each, turn in zip(placed, turns, strict=True):
                source = each.chunk.layers[index][tensor.name].to(like.device)
                out = whole[..., each.start : each.start + len(each.chunk), :]
                if turn and tensor.rotary is not None:
                    rotate_into(out, source, turn[tensor.rotary].to(like.device))
                    continue
                out.copy_(source)
                if tensor.counter:
                    distance = each.position_ids - each.chunk.position_ids
                    out += distance[None, None, :, None].to(out.device, out.dtype)
        layers.append(states)
    return tuple(layers)


def _one_model(chunks: Sequence[KVChunk]) -> ModelIdentity:
    """Who made all of them, with the tokenizer that any of them names."""
    model, reasons = chunks[0].model, []
    for number, chunk in enumerate(chunks):
        differences = compare(model, chunk.model)
        reasons += [replace(each, what=f"chunk {number}: {each.what}") for each in differences]
        model = replace(model, tokenizer=model.tokenizer or chunk.model.tokenizer)
        reasons += [Reason(f"chunk {number}", *pair) for pair in _against(chunk, chunks[0])]
    if reasons:
        raise CompatibilityError(
            "merge: expected chunks of one model whose cells can stand side by side; splice these one after the other, "
            "or compile them with one model (Skill.precompile). What differs:",
            tuple(reasons),
        )
    return model


def _against(chunk: KVChunk, first: KVChunk) -> list[tuple[str, str]]:
    """What speaks against merging a chunk with others, as pairs of what was expected and found."""
    if chunk.recurrence is not None:
        return [("cells only", "recurrent layers, which need a live seam between two chunks")]
    if chunk.compressed is not None:
        return [("cells only", "compressed layers, which need a live seam between two chunks")]
    if not chunk.layout:
        return [("a layout", "none: nobody recorded how its tensors rotate")]
    if chunk.layout != first.layout:
        return [("the layout of the first chunk", "another")]
    mine, theirs = _shapes(chunk), _shapes(first)
    if mine != theirs:
        return [(f"heads, head_dim and dtype {theirs}"[:200], f"{mine}"[:200])]
    names = [{tensor.name for tensor in holder.tensors} for holder in chunk.layout]
    if names != [set(states) for states in chunk.layers]:
        return [("the tensors of its layout", f"{[sorted(states) for states in chunk.layers]}"[:200])]
    return []


def _shapes(chunk: KVChunk) -> list[dict[str, tuple[int, int, str]]]:
    return [{n: (t.shape[1], t.shape[3], str(t.dtype)) for n, t in states.items()} for states in chunk.layers]


def _axes(chunks: Sequence[KVChunk]) -> Tensor | None:
    """Distances of the other positions of all tokens; zeros for text, None if there are none."""
    columns = max(0 if chunk.axes is None else chunk.axes.shape[-1] for chunk in chunks)
    if not columns:
        return None
    parts = [chunk.token_ids.new_zeros((len(chunk), 0)) if chunk.axes is None else chunk.axes for chunk in chunks]
    return torch.cat([torch.nn.functional.pad(part, (0, columns - part.shape[-1])) for part in parts])


def _origin(chunks: Sequence[KVChunk]) -> Origin:
    special = {idx: text for chunk in reversed(chunks) for idx, text in chunk.origin.special_ids}
    return replace(chunks[0].origin, special_ids=tuple(sorted(special.items())))
