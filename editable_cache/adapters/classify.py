"""Which rotation, if any, explains how a stored tensor changes with the position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from editable_cache.ops import relative_error, rotate_into, rotation
from editable_cache.spec import RotarySpec, TensorSpec


def frequency_tables(model: nn.Module, configs: Iterable[Any]) -> tuple[tuple[float, ...], ...]:
    """Every frequency table that the model may use: its ``inv_freq`` buffers, then plain ones by formula.

    The formula ``theta ** (-2 i / dim)`` (RoFormer, Su et al., 2021, section 3.2) serves models that keep tables of
    sines instead of frequencies.
    """
    found: dict[tuple[float, ...], None] = {}
    for name, buffer in model.named_buffers():
        if "inv_freq" in name and "original" not in name and buffer.dim() == 1 and buffer.numel():
            found[tuple(buffer.float().tolist())] = None
    for dim, theta in sorted(_dims_and_thetas(configs)):
        exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        found[tuple((1.0 / theta**exponent).tolist())] = None
    return _distinct(tuple(found))


def _distinct(tables: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
    """The tables without those that differ from an earlier one by rounding only."""
    kept: list[Tensor] = []
    for table in map(torch.tensor, tables):
        if not any(one.shape == table.shape and torch.allclose(one, table, rtol=1e-6, atol=0.0) for one in kept):
            kept.append(table)
    return tuple(tuple(table.tolist()) for table in kept)


def _dims_and_thetas(configs: Iterable[Any]) -> set[tuple[int, float]]:
    found = set()
    for config in configs:
        values = {name: value for name, value in vars(config).items() if isinstance(value, int | float)}
        heads = values.get("num_attention_heads") or values.get("n_head") or 1
        hidden = values.get("hidden_size") or values.get("n_embd") or 0
        dims = {values.get("rotary_dim"), values.get("head_dim"), hidden // heads if hidden else None}
        rope = getattr(config, "rope_parameters", None) or {}
        sections = [rope, *(section for section in rope.values() if isinstance(section, Mapping))]
        thetas = {10_000.0, *(float(section["rope_theta"]) for section in sections if section.get("rope_theta"))}
        found |= {(int(dim), theta) for dim in dims if dim for theta in thetas if dim > 1}
    return found


def rotations_for(head_dim: int, tables: Sequence[tuple[float, ...]]) -> tuple[RotarySpec, ...]:
    """Every table in every layout, at both ends of the head; then the same with the opposite sense of rotation."""
    found: dict[RotarySpec, None] = {}
    for table in (*tables, *(tuple(-frequency for frequency in table) for table in tables)):
        if 2 * len(table) <= head_dim:
            for start in dict.fromkeys((0, head_dim - 2 * len(table))):
                found[RotarySpec(table, "half", start)] = None
                found[RotarySpec(table, "interleaved", start)] = None
    return tuple(found)


def classify(
    name: str,
    base: Tensor,
    samples: Mapping[int, Tensor],
    tables: Sequence[tuple[float, ...]],
    likely: Sequence[RotarySpec],
    tolerance: float,
) -> tuple[TensorSpec, float]:
    """How a tensor moves, and the worst relative error of that explanation.

    Args:
        name: of the tensor.
        base: ``[1, num_heads, num_tokens, head_dim]`` at the first positions.
        samples: the same at further ones, by the distance.
        tables: frequency tables to try.
        likely: rotations to try before all others.
        tolerance: an explanation a tenth of this off, or less, is taken without looking further.
    """
    if not base.is_floating_point():
        shifted = max((_counting_error(base, sample, offset) for offset, sample in samples.items()), default=0.0)
        still = max((relative_error(s.double(), base.double()) for s in samples.values()), default=0.0)
        return TensorSpec(name, counter=shifted <= still), min(shifted, still)
    error = max((relative_error(sample, base) for sample in samples.values()), default=0.0)
    best: tuple[float, RotarySpec | None] = (error, None)
    candidates = [r for r in likely if r.stop <= base.shape[-1]]
    candidates += [r for r in rotations_for(base.shape[-1], tables) if r not in candidates]
    for rotary in candidates:
        if best[0] <= tolerance / 10:
            break
        error = max(move_error(base, sample, rotary, offset) for offset, sample in samples.items())
        best = min(best, (error, rotary), key=lambda pair: pair[0])
    return TensorSpec(name, best[1]), best[0]


def move_error(base: Tensor, sample: Tensor, rotary: RotarySpec, offset: int) -> float:
    """Relative error of ``base``, turned ahead by ``offset`` positions, against ``sample``."""
    positions = torch.arange(base.shape[-2])
    moved = torch.empty_like(base)
    rotate_into(moved, base, rotation(rotary, positions, positions + offset, base.device))
    return relative_error(moved, sample)


def _counting_error(base: Tensor, sample: Tensor, offset: int) -> float:
    return relative_error(base.double() + offset, sample.double())
