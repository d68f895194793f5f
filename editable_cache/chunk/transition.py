"""`Transition`: what the tokens of a chunk do to one recurrent state, as a map that is applied to any live state.

For fixed layer inputs a linear recurrent layer is affine in its initial state: Mamba-1 and Mamba-2 scale it elementwise
(state space duality, Dao & Gu 2024, section 3), a gated delta net multiplies it by the product of its
`exp(g_t) (I - beta_t k_t k_t^T)` (Yang et al. 2025, section 3), a short convolution forgets it. So a span of tokens of
any length acts on the state in one step, and two spans act as one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from editable_cache.errors import CompatibilityError, Reason

Form = Literal["diagonal", "matrix", "replace"]


@dataclass(frozen=True, eq=False)
class Transition:
    """The affine map of one recurrent state of one layer, and the convolution window that the span leaves behind.

    Shapes: a state is `[batch, ...]`, for instance `[batch, num_heads, head_dim, state_size]` (Mamba-2),
    `[batch, intermediate_size, state_size]` (Mamba-1) or `[batch, num_heads, key_dim, value_dim]` (delta rules). The
    batch size of the stored tensors is that of the state, or 1. Immutable by agreement: nothing here writes a tensor.

    Attributes:
        form: `"diagonal"`: new state = factor * state + offset, elementwise. `"matrix"`: factor @ state + offset.
            `"replace"`: offset, whatever the state was.
        factor: float32. Diagonal: the rank of the state, size 1 along every dimension where it is constant (a Mamba-2
            state needs one number for each head). Matrix: `[batch, num_heads, key_dim, key_dim]`. Replace: None.
        offset: the span's own contribution, shaped as the state, in its dtype or float32. None where the layer keeps
            no recurrent state (form `"replace"`).
        conv: last inputs of the convolution, `[batch, num_channels, kernel_size]` oldest first, in the dtype of the
            cache; None where the layer has none. It replaces the live window.
    """

    form: Form
    factor: Tensor | None
    offset: Tensor | None
    conv: Tensor | None

    def __post_init__(self) -> None:
        if (self.factor is None) != (self.form == "replace"):
            raise ValueError(f"Transition {self.form!r}: expected a factor unless the form is 'replace'.")
        if self.factor is None:
            return
        if self.offset is None or self.offset.dim() != self.factor.dim():
            got = "None" if self.offset is None else list(self.offset.shape)
            raise ValueError(f"Transition {self.form!r}: expected an offset of rank {self.factor.dim()}, got {got}.")

    @property
    def nbytes(self) -> int:
        """Bytes of factor, offset and convolution window."""
        return sum(tensor.nbytes for tensor in (self.factor, self.offset, self.conv) if tensor is not None)

    def apply(self, state: Tensor) -> Tensor:
        """The state after the span, a new tensor with shape, dtype and device of `state`; computed in float32 or more.

        Raises:
            CompatibilityError: if the layer that the transition was captured on had no such state, or another shape.
        """
        if self.offset is None:
            raise self._misfit("a layer without a recurrent state", list(state.shape))
        if self.offset.shape[1:] != state.shape[1:] or self.offset.shape[0] not in (1, state.shape[0]):
            raise self._misfit(f"a state {list(self.offset.shape)}", list(state.shape))
        if self.factor is not None and not self._multiplies(state):
            raise self._misfit(f"a state for a factor {list(self.factor.shape)}", list(state.shape))
        dtype = torch.promote_types(state.dtype, torch.float32)
        offset = self.offset.to(state.device, dtype)
        if self.factor is None:
            return offset.expand_as(state).to(state.dtype, copy=True)
        factor, wide = self.factor.to(state.device, dtype), state.to(dtype)
        moved = factor * wide if self.form == "diagonal" else factor @ wide
        return (moved + offset).to(state.dtype)

    def then(self, other: Transition) -> Transition:
        """This transition followed by `other`, as one: (M2 M1, M2 S1 + S2), and the window of the later one.

        Raises:
            CompatibilityError: if they belong to different states, or a diagonal that varies along the value
                dimension meets a matrix.
        """
        conv = self.conv if other.conv is None else other.conv
        if other.offset is None or other.factor is None:
            return replace(other, conv=conv)
        if self.offset is None:
            raise self._misfit("a layer without a recurrent state", list(other.offset.shape))
        offset = other.apply(self.offset.to(torch.promote_types(self.offset.dtype, other.offset.dtype)))
        if self.factor is None:
            return Transition("replace", None, offset, conv)
        if self.form == other.form == "diagonal":
            return Transition("diagonal", other.factor * self.factor, offset, conv)
        return Transition("matrix", other._as_matrix() @ self._as_matrix(), offset, conv)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Transition:
        """The same transition on `device`, with factor and offset stored in `dtype`; the window keeps its own dtype."""

        def moved(tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device=device, dtype=dtype)

        return Transition(self.form, moved(self.factor, dtype), moved(self.offset, dtype), moved(self.conv, None))

    def _as_matrix(self) -> Tensor:
        assert self.factor is not None
        assert self.offset is not None
        if self.form == "matrix":
            return self.factor
        if self.factor.shape[-1] != 1:
            raise self._misfit("a diagonal that is constant along the last dimension", list(self.factor.shape))
        return torch.diag_embed(self.factor.expand(*self.offset.shape[:-1], 1)[..., 0])

    def _multiplies(self, state: Tensor) -> bool:
        """Whether the factor has the shape for such a state."""
        assert self.factor is not None
        factor, wanted = list(self.factor.shape), list(state.shape)
        if self.form == "matrix":
            wanted[-1] = wanted[-2]
        fits = len(factor) == len(wanted) and all(a in (1, b) for a, b in zip(factor, wanted, strict=True))
        return fits and (self.form == "diagonal" or factor[-2:] == wanted[-2:])

    def _misfit(self, expected: str, shape: list[int]) -> CompatibilityError:
        return CompatibilityError(
            f"Transition ({self.form}): it belongs to another state; compile the chunk with this model.",
            (Reason("recurrent state", expected, str(shape)),),
        )


def compacted(factor: Tensor, *, relative: float = 1e-5, absolute: float = 1e-8) -> Tensor:
    """`factor` with size 1 along every dimension in which it is constant, up to measurement noise.

    Constant means that all values along the dimension lie within `absolute + relative * |mean|` of their mean, which
    then stands for them. Measured factors of Mamba-2 spread by 6e-7 of their value.
    """
    for dim in reversed(range(factor.dim())):
        mean = factor.mean(dim, keepdim=True)
        if factor.shape[dim] > 1 and bool(((factor - mean).abs() <= absolute + relative * mean.abs()).all()):
            factor = mean
    return factor
