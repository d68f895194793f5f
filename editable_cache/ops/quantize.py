"""Cells in one byte each: int8 or fp8 values with float32 scales, and the way back.

Symmetric: a value is stored as ``x / scale``, and ``scale`` maps the largest magnitude of its group to the largest
stored one, 127 or 448. A group is the head of one token, or one channel of one head over all tokens (KIVI, Liu et al.
2024, section 3).

With ``s`` the scale, ``y`` the result in float32 before it is cast to the wanted dtype:

* int8: ``|y - x| <= s (1/2 + 2**-15)``; the second part is the rounding of float32 arithmetic.
* fp8 (e4m3fn: 3 bits of mantissa, smallest normal number 2**-6): ``|y - x| <= max(2**-4 |x|, 2**-10 s) (1 + 2**-20)``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from editable_cache.errors import ArtifactError, CompatibilityError, Reason, SpanError

Storage = Literal["original", "int8", "fp8"]
"""How cells are kept: as they are, or in one byte each."""

Grouping = Literal["token", "channel"]
"""What shares a scale: the channels of one head of a token, or the tokens of one channel of a head."""

DTYPES: dict[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST: dict[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class Quantized(NamedTuple):
    """Cells in one byte each.

    Attributes:
        values: int8 or float8_e4m3fn ``[1, num_heads, seq_len, head_dim]``.
        scales: float32, all positive; ``[1, num_heads, seq_len, 1]`` per token, ``[1, num_heads, 1, head_dim]`` per
            channel.
    """

    values: Tensor
    scales: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes


def quantize(states: Tensor, storage: Storage, *, per: Grouping) -> Quantized:
    """``states`` in one byte each; the module says how large the error may be. New, contiguous tensors.

    Arithmetic is float32, or float64 for float64 states. int8 rounds to nearest even and uses -127 to 127; fp8 keeps
    the sign of zero, int8 does not. Groups of zeros, and groups without tokens, have scale 1.

    Args:
        states: floating ``[1, num_heads, seq_len, head_dim]`` on any device; never written.
        storage: ``"int8"`` or ``"fp8"``.
        per: what shares a scale; ``grouping`` says what measured best.

    Raises:
        SpanError: for another storage or grouping, another shape, integers, values that are not finite, or float64
            values so large that their scale leaves float32.
    """
    if storage not in DTYPES or per not in ("token", "channel"):
        raise SpanError(f"quantize: expected 'int8' or 'fp8' per 'token' or 'channel', got {storage!r} per {per!r}.")
    if states.dim() != 4 or states.shape[0] != 1 or not states.is_floating_point():
        raise SpanError(
            f"quantize: expected floating states [1, num_heads, seq_len, head_dim], got {states.dtype} "
            f"{list(states.shape)}; store them as they are."
        )
    dtype = DTYPES[storage]
    wide = states.detach().to(torch.promote_types(states.dtype, torch.float32))
    scales = _scales(wide, LARGEST[dtype], -1 if per == "token" else -2)
    quotient = wide / scales
    if dtype == torch.int8:
        quotient = quotient.round_()
    quotient = quotient.clamp_(-LARGEST[dtype], LARGEST[dtype])
    return Quantized(quotient.to(dtype, memory_format=torch.contiguous_format), scales)


def dequantize(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    """The cells in ``dtype``, a new contiguous tensor ``[1, num_heads, seq_len, head_dim]``.

    Values times scales in float32 (float64 for float64), then cast once.

    Raises:
        ArtifactError: if values and scales are no pair that ``quantize`` can have made: wrong dtypes or shapes, scales
            that are not positive and finite, a value of -128 or one that is not a number.
        CompatibilityError: if ``dtype`` is not floating, or can't hold the largest cell.
    """
    values, scales = quantized
    _require_sound(values, scales)
    _require_room(values, scales, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    if values.dtype == torch.int8:
        return values.to(wide, memory_format=torch.contiguous_format).mul_(scales).to(dtype)
    return _as_float16(values).to(wide, memory_format=torch.contiguous_format).mul_(scales * 256).to(dtype)


def _as_float16(values: Tensor) -> Tensor:
    """e4m3fn numbers over 256, exactly, as float16: on a processor some times as fast as torch's own conversion.

    The sign moves from bit 7 to 15, exponent and mantissa from bit 0 to 7; the biases of the exponents, 7 and 15, make
    the factor, for subnormal numbers too.
    """
    bits = values.view(torch.int8).to(torch.int16)  # the sign fills bits 7 to 15
    return bits.bitwise_left_shift_(7).bitwise_and_(~(1 << 14)).view(torch.float16)


def grouping(tensor_name: str) -> Grouping:
    """What shares a scale by default: per channel for ``"keys"``, per token for everything else.

    Some channels of keys are large at every token: in the median head the largest is 4 (SmolLM2-135M) and 8 times
    (Gemma 3 270M) the median channel, the largest token 1.4 and 1.7 times the median token. Keys are stored turned to
    their positions, which spreads a large channel over its pair (before the rotation it is 4 and 11 times the median),
    but costs little: int8 error per channel 0.61% and 0.77%, before the rotation 0.59% and 0.71%, per token 1.3% and
    2.7% (root mean square of the worst layer).

    Behind int8 skills of 1,024 tokens the mean KL divergence from the full skill falls from 2.3e-4 to 4.9e-5 nats
    (SmolLM2) and from 5.7e-4 to 6.2e-5 (Gemma 3) as keys go from per token to per channel; values per channel instead
    of per token raise it to 7.1e-5 and 8.2e-5. fp8 has its own exponent for each value: neither grouping of keys is
    best for both models (per channel 1.0e-3 and 9.5e-4, per token 2.6e-3 and 4.1e-4). Measured by
    `benchmarks/storage.py`.
    """
    return "channel" if tensor_name == "keys" else "token"


def _scales(wide: Tensor, largest: float, dim: int) -> Tensor:
    """Float32 scales, one for each group of ``wide`` along ``dim``."""
    if not wide.shape[dim]:
        shape = list(wide.shape)
        shape[dim] = 1
        return torch.ones(shape, dtype=torch.float32, device=wide.device)
    absmax = wide.abs().amax(dim, keepdim=True)
    scales = (absmax / largest).to(torch.float32)
    if not bool(scales.isfinite().all()):  # amax hands on what is not a number
        wrong = int((~wide.isfinite()).sum())
        raise SpanError(
            f"quantize: expected finite states that float32 can hold, got {wrong} of {wide.numel()} not finite, "
            f"largest magnitude {float(absmax.nan_to_num(nan=0.0).max()):.3g}; store them as they are."
        )
    # The largest value must come back finite: a scale that was rounded up may carry it beyond float32.
    scales = torch.where((scales * largest).isfinite(), scales, scales.nextafter(torch.zeros_like(scales)))
    # Scales below the smallest normal number would be coarse, or zero.
    return torch.where(absmax > 0, scales.clamp_min(SMALLEST_SCALE), 1.0)


def _require_sound(values: Tensor, scales: Tensor) -> None:
    if values.dtype not in LARGEST or values.dim() != 4 or values.shape[0] != 1 or scales.dtype != torch.float32:
        raise ArtifactError(
            "Quantized cells: expected int8 or float8_e4m3fn [1, num_heads, seq_len, head_dim] with float32 scales, "
            f"got {values.dtype} {list(values.shape)} with {scales.dtype}."
        )
    _, num_heads, seq_len, head_dim = values.shape
    expected = [1, num_heads, seq_len, 1], [1, num_heads, 1, head_dim]
    if list(scales.shape) not in expected:
        raise ArtifactError(f"Scales: expected {expected[0]} or {expected[1]}, got {list(scales.shape)}.")
    if not bool(((scales > 0) & scales.isfinite()).all()):
        raise ArtifactError("Scales: expected positive finite numbers, got others; the file is damaged.")
    if not values.numel():
        return
    if values.dtype == torch.int8:
        wrong = bool(values.amin() == -128)
    else:
        wrong = bool((values.view(torch.uint8) & 0x7F).amax() == 0x7F)
    if wrong:
        raise ArtifactError(
            f"Quantized cells: expected magnitudes up to {LARGEST[values.dtype]:g}, got -128 or not a number; the file "
            "is damaged."
        )


def _require_room(values: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise CompatibilityError("dequantize: pass a floating dtype.", (Reason("dtype", "floating", str(dtype)),))
    if not values.numel():
        return
    largest = scales.max().to(torch.promote_types(dtype, torch.float32)) * LARGEST[values.dtype]
    if not bool(largest.to(dtype).isfinite()):
        raise CompatibilityError(
            "dequantize: the cells don't fit; pass the dtype that they were computed in.",
            (Reason("largest cell", f"at most {torch.finfo(dtype).max:.3g} for {dtype}", f"{float(largest):.3g}"),),
        )
