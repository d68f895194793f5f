"""What each layer stores, which of it rotates, what speaks against moving it, and how the model wants its masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from editable_cache.errors import Reason
from editable_cache.spec.compressed import CompressedSpec
from editable_cache.spec.rotary import RotarySpec

MaskForm = Literal["tensor", "dict", "none"]


@dataclass(frozen=True)
class TensorSpec:
    """One stored per-token tensor ``[batch, num_heads, seq_len, head_dim]``.

    Attributes:
        name: attribute of the cache layer that holds it (``"keys"``, ``"values"``, ``"indexer_keys"``, ...).
        rotary: how it rotates with the position, or None if it does not rotate.
        counter: it holds the positions themselves, as integers, and is moved by adding the distance.
    """

    name: str
    rotary: RotarySpec | None = None
    counter: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """The cells of one holder: a cache layer, or the part of one that holds the keys of an indexer.

    Attributes:
        tensors: every per-token tensor of the holder, in storage order; empty where the layer stores none.
        layer_idx: index of the cache layer.
    """

    tensors: tuple[TensorSpec, ...]
    layer_idx: int


@dataclass(frozen=True)
class MaskKind:
    """What the layers of one type let a query see among the slots up to its own.

    Attributes:
        layer_type: transformers' name (``"full_attention"``, ``"sliding_attention"``, ...): the key of its mask.
        sliding_window: number of slots that a query sees, itself included, or None for no window.
        chunk_size: a query sees its own block of this many slots (``attention_chunk_size``), or None.
    """

    layer_type: str
    sliding_window: int | None = None
    chunk_size: int | None = None


@dataclass(frozen=True)
class PositionLimit:
    """Cells move exactly only below a position from which on the model itself computes differently.

    Attributes:
        value: first position that is out of reach.
        name: the config field that says so.
    """

    value: int
    name: str


@dataclass(frozen=True)
class ModelSpec:
    """What the self-test proved about one model.

    Attributes:
        layers: one entry for each holder of cells, in the order of ``EditableCache.editable_layers``.
        masks: what its layers let a query see, one entry for each kind.
        mask_form: ``"tensor"`` if the model takes one 4-D mask, ``"dict"`` if it takes one for each layer type,
            ``"none"`` if it ignores or refuses masks over chosen cells (then chosen cells can't be recomputed, but
            everything from a cell on can).
        max_positions: number of positions that the model was built for.
        worst_error: largest relative error that the self-test saw between a moved and a computed tensor.
        positions: ``"given"`` if the model takes ``position_ids``; ``"slots"`` if its positions are, or must be, the
            slots of the cache.
        against_moving: why cells can't be moved; empty if they can.
        against_recompute: why chosen cells can't be recomputed; empty if they can.
        against_continuing: why tokens can't rightly be put behind others in a cache; empty if they can. If they can't,
            nothing but a plain cache is offered.
        limit: from which position on cells don't move exactly, or None.
        has_states: some layers fold all tokens into a recurrent state or compressed entries, which can't be cut by
            token.
        step_tokens: most tokens that a forward on such a state may have for the model to continue rightly, or None.
        compressed: how layers that compress windows of tokens move, or None where there are none.
    """

    layers: tuple[LayerSpec, ...]
    masks: tuple[MaskKind, ...]
    mask_form: MaskForm
    max_positions: int
    worst_error: float
    positions: Literal["given", "slots"] = "given"
    against_moving: tuple[Reason, ...] = ()
    against_recompute: tuple[Reason, ...] = ()
    against_continuing: tuple[Reason, ...] = ()
    limit: PositionLimit | None = None
    has_states: bool = False
    step_tokens: int | None = None
    compressed: CompressedSpec | None = None

    def rotaries(self) -> tuple[RotarySpec, ...]:
        """The distinct rotations of the model, in order of first use."""
        found = (tensor.rotary for layer in self.layers for tensor in layer.tensors)
        return tuple(dict.fromkeys(rotary for rotary in found if rotary is not None))

    @property
    def counts_slots(self) -> bool:
        """Whether cells depend on the slot itself that a token stands in, so that padding in front changes them."""
        return self.positions == "slots" and bool(self.against_moving or self.rotaries())

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Sizes of the blocks of chunked attention, ascending."""
        return tuple(sorted({kind.chunk_size for kind in self.masks if kind.chunk_size is not None}))
