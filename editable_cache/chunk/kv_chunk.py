"""`KVChunk`: the cells of one token span, compiled somewhere, immutable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from editable_cache.chunk.compressed import Compressed
from editable_cache.chunk.provenance import ImageSpan, Part, Provenance
from editable_cache.chunk.recurrence import Recurrence
from editable_cache.errors import SpanError
from editable_cache.spec import LayerSpec, ModelIdentity, Origin

LayerStates = Mapping[str, Tensor]
"""Stored tensors of one layer by name, each ``[1, num_heads, seq_len, head_dim]``."""


@dataclass(frozen=True, eq=False)
class KVChunk:
    """Cells of a span of tokens at the positions where they were computed.

    Immutable by agreement: operations read the tensors and never write them, and two caches spliced from one chunk
    share nothing with it afterwards. Two chunks are compared by ``digest``, never by ``==``.

    Attributes:
        layers: one mapping for each holder of cells (see ``ModelSpec.layers``), tensor name to ``[1, num_heads,
            seq_len, head_dim]``; empty where the holder stores nothing.
        token_ids: int64 ``[seq_len]``; -1 where no token made a cell (a trained prefix).
        position_ids: int64 ``[seq_len]``, where the rotary embedding had placed them.
        model: who computed them.
        provenance: what they had seen.
        name: default segment name when spliced, or None.
        recurrence: what the chunk does to recurrent layers, or None where the model has none.
        axes: int64 ``[seq_len, num_axes - 1]``, how far the other positions of each token are from its first one, which
            is in ``position_ids``; None where tokens have one position, or all are equal.
        images: which tokens stand for which image, ascending; some tokens between may stand for none.
        compressed: what the chunk leaves in layers that compress windows of tokens, or None where there are none.
        layout: how each holder's tensors rotate, in the order of ``layers``; empty where it was not recorded.
        origin: circumstances of the compilation, for people and other programs.
    """

    layers: tuple[LayerStates, ...]
    token_ids: Tensor
    position_ids: Tensor
    model: ModelIdentity
    provenance: Provenance
    name: str | None = None
    recurrence: Recurrence | None = None
    axes: Tensor | None = None
    images: tuple[ImageSpan, ...] = ()
    compressed: Compressed | None = None
    layout: tuple[LayerSpec, ...] = ()
    origin: Origin = field(default_factory=Origin)

    def __post_init__(self) -> None:
        length = self.token_ids.shape[0]
        if self.token_ids.dim() != 1 or self.position_ids.shape != self.token_ids.shape:
            raise SpanError(
                f"A chunk needs one position for each token: expected [n] and [n], got {list(self.token_ids.shape)} "
                f"and {list(self.position_ids.shape)}."
            )
        if self.axes is not None and (self.axes.dim() != 2 or self.axes.shape[0] != length):
            raise SpanError(f"A chunk's axes: expected [{length}, num_axes - 1], got {list(self.axes.shape)}.")
        if self.recurrence is not None and self.recurrence.head + self.recurrence.tail > length:
            raise SpanError(
                f"A chunk of {length} tokens can't have {self.recurrence.head} live ones at its start and "
                f"{self.recurrence.tail} at its end."
            )
        if self.layout and self.layers and len(self.layout) != len(self.layers):
            raise SpanError(f"A chunk's layout: expected {len(self.layers)} holders, got {len(self.layout)}.")
        borders = [0, *(border for part in self.provenance.parts for border in (part.start, part.stop)), length]
        if self.provenance.parts and (borders[::2] != borders[1::2] or borders != sorted(borders)):
            raise SpanError(f"A merged chunk's parts: expected spans that cover {length} tokens, got {borders[1:-1]}.")
        for layer_idx, states in enumerate(self.layers):
            for name, tensor in states.items():
                if tensor.dim() != 4 or tensor.shape[0] != 1 or tensor.shape[-2] != length:
                    raise SpanError(
                        f"Layer {layer_idx} {name}: expected [1, num_heads, {length}, head_dim], got "
                        f"{list(tensor.shape)}."
                    )
        object.__setattr__(self, "layers", tuple(MappingProxyType(dict(states)) for states in self.layers))

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])

    def __reduce__(self) -> tuple[Any, ...]:
        """For ``copy.deepcopy`` and for sending a chunk to another process; files hold no pickles."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return _rebuilt, (type(self), {**values, "layers": tuple(map(dict, self.layers))})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name or 'unnamed'}, {len(self)} tokens, {self.provenance.how})"

    @property
    def nbytes(self) -> int:
        """Bytes of the stored cells, transitions and compressed entries."""
        cells = sum(tensor.nbytes for states in self.layers for tensor in states.values())
        return cells + sum(part.nbytes for part in (self.recurrence, self.compressed) if part is not None)

    @property
    def steps(self) -> Tensor:
        """int64 ``[seq_len]``: how far behind the chunk's start each token's first position is.

        Text follows without gaps; tokens of an image stay where the model put them.
        """
        if self.axes is None or not len(self):
            return torch.arange(len(self))
        return self.position_ids - self.position_ids.min()

    @property
    def extent(self) -> int:
        """How many positions the chunk takes: what follows goes on there."""
        if self.axes is None or not len(self):
            return len(self)
        return int((self.steps + self.axes.amax(dim=-1).clamp_min(0)).max()) + 1

    @property
    def parts(self) -> tuple[Part, ...]:
        """The chunks that were merged into this one, or the one that it is; each with every note about it.

        Cells of one part have seen nothing of the others.
        """
        whole = self.provenance
        if not whole.parts:
            return (Part(0, len(self), whole.prefix_ids, self.name, whole.note),)
        return tuple(replace(part, note="; ".join(filter(None, (part.note, whole.note)))) for part in whole.parts)

    @property
    def image_numbers(self) -> Tensor:
        """int64 ``[seq_len]``: for tokens that stand for an image, its number in ``images`` from 1 on; else 0."""
        numbers = torch.zeros(len(self), dtype=torch.int64)
        for number, image in enumerate(self.images, start=1):
            numbers[image.start : image.stop] = number
        return numbers

    @cached_property
    def digest(self) -> str:
        """Identity: ids, positions, producer and provenance, as 16 hex digits of a SHA-256 over unambiguous JSON."""
        content: dict[str, Any] = {
            "ids": self.token_ids.tolist(),
            "positions": self.position_ids.tolist(),
            "model": self.model.to_dict(),
            "provenance": [self.provenance.how, list(self.provenance.prefix_ids), self.provenance.note],
        }
        if self.axes is not None or self.images:
            content["axes"] = None if self.axes is None else self.axes.tolist()
            content["images"] = [[image.start, image.stop, image.digest] for image in self.images]
        if self.provenance.parts:
            content["parts"] = [[part.start, part.stop, list(part.prefix_ids)] for part in self.provenance.parts]
        if self.recurrence is not None:
            content["live ends"] = [self.recurrence.head, self.recurrence.tail]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def slice(self, start: int, stop: int) -> KVChunk:
        """Tokens ``start`` to ``stop`` as a chunk of their own that has seen what stood before them; shares storage.

        Raises:
            SpanError: if the span is reversed or leaves the chunk, or if the chunk was compiled for recurrent layers,
                on which only the whole of it can act, or for compressed ones.
        """
        if (start, stop) != (0, len(self)):
            if self.recurrence is not None:
                raise SpanError(
                    f"Slice of {self!r}: it acts on recurrent layers as a whole; compile the part by itself."
                )
            if self.compressed is not None:
                raise SpanError(f"Slice of {self!r}: its entries can't be cut by token; compile the part by itself.")
        if not 0 <= start <= stop <= len(self):
            raise SpanError(f"Slice of {self!r}: expected 0 <= start <= stop <= {len(self)}, got {start}, {stop}.")
        cut = [i for i in self.images if i.start < start < i.stop or i.start < stop < i.stop]
        if cut:
            raise SpanError(f"Slice of {self!r}: [{start}, {stop}) cuts the image at [{cut[0].start}, {cut[0].stop}).")
        return self._derived(
            layers=tuple({name: t[..., start:stop, :] for name, t in states.items()} for states in self.layers),
            token_ids=self.token_ids[start:stop],
            position_ids=self.position_ids[start:stop],
            axes=None if self.axes is None else self.axes[start:stop],
            images=tuple(
                replace(image, start=image.start - start, stop=image.stop - start)
                for image in self.images
                if start <= image.start and image.stop <= stop
            ),
            provenance=self._provenance_of(start, stop),
        )

    def _provenance_of(self, start: int, stop: int) -> Provenance:
        ids, whole = self.token_ids.tolist(), self.provenance
        if not whole.parts:
            seen = (*whole.prefix_ids, *ids[:start])
            return replace(whole, how="extracted" if seen and whole.how != "trained" else whole.how, prefix_ids=seen)
        parts = tuple(
            replace(
                part,
                start=max(part.start, start) - start,
                stop=min(part.stop, stop) - start,
                prefix_ids=(*part.prefix_ids, *ids[part.start : max(part.start, start)]),
            )
            for part in whole.parts
            if part.start < stop and part.stop > start
        )
        return replace(whole, how="merged" if parts else "extracted", parts=parts)

    def renamed(self, name: str | None) -> KVChunk:
        """The same chunk under another name; shares storage."""
        return self._derived(name=name)

    def equal_cells(self, other: KVChunk) -> bool:
        """Whether ids, positions and every stored bit are the same."""
        same = (
            self.images == other.images
            and torch.equal(self.token_ids, other.token_ids)
            and torch.equal(self.position_ids, other.position_ids)
            and (self.axes is None) == (other.axes is None)
            and (self.axes is None or other.axes is None or torch.equal(self.axes, other.axes))
            and [set(states) for states in self.layers] == [set(states) for states in other.layers]
            and (self.compressed is None) == (other.compressed is None)
            and (self.compressed is None or other.compressed is None or self.compressed.equals(other.compressed))
        )
        return same and all(
            mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name])
            for mine, theirs in zip(self.layers, other.layers, strict=True)
            for name in mine
        )

    def _derived(self, **changes: Any) -> KVChunk:
        values = {each.name: getattr(self, each.name) for each in fields(KVChunk)}
        return KVChunk(**{**values, **changes})


def _rebuilt(kind: type[KVChunk], values: dict[str, Any]) -> KVChunk:
    return kind(**values)
