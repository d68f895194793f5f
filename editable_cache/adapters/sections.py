"""Which position axis turns which frequency, found by measurement.

Multimodal rotary embeddings (M-RoPE, Wang et al. 2024, Qwen2-VL, section 2.1) give every token one position for each of
several axes, and every frequency follows one of them: in blocks (Qwen2-VL, GLM-4V) or in turn (Qwen3-VL). Nothing here
knows which: one axis is shifted for all tokens alike, and the pairs of channels that turn are those that follow it.
Such a shift leaves all differences as they were, so every layer may be asked. In 16 bits ask the first rotated one,
where all other pairs stay equal bit for bit; below it, rounding outweighs the turn of slow frequencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from editable_cache.adapters.sample import Sample, prefill
from editable_cache.errors import Reason, UnsupportedModelError
from editable_cache.spec import LayerSpec, RotarySpec

LONGEST_SHIFT = 4096


def with_axes(
    model: nn.Module, ids: Tensor, base: Sample, layers: Sequence[LayerSpec], count: int, reach: int
) -> tuple[tuple[LayerSpec, ...], list[Reason]]:
    """``layers`` with the axis of each frequency, measured on the first layer that rotates; or why it can't be told.

    Args:
        ids: ``[1, num_tokens]``, which ``base`` holds at position 0 and on.
        count: number of axes.
        reach: no position may be as large.
    """
    found: dict[RotarySpec, RotarySpec] = {}
    for index, (cells, layer) in enumerate(zip(base.cells, layers, strict=True)):
        for tensor in layer.tensors:
            rotary = tensor.rotary
            if rotary is None or rotary in found:
                continue
            at = torch.arange(ids.shape[1]).expand(count, 1, -1)
            shift = telling_shift(rotary, min(LONGEST_SHIFT, reach - ids.shape[1] - 1))
            try:
                samples = [
                    prefill(model, ids, None, positions=shift_axis(at, axis, shift)).cells[index][tensor.name]
                    for axis in range(count)
                ]
                axes = axis_of_frequency(rotary, cells[tensor.name], samples)
            except UnsupportedModelError as error:
                return tuple(layers), list(error.reasons)
            except Exception as error:  # a model that takes no positions of this shape may raise anything
                what = f"{type(error).__name__}: {error}"[:200]
                return tuple(layers), [Reason(f"position_ids of {count} axes", "a forward", what)]
            found[rotary] = replace(rotary, axes=axes)
    return tuple(
        replace(
            layer,
            tensors=tuple(replace(t, rotary=found[t.rotary]) if t.rotary is not None else t for t in layer.tensors),
        )
        for layer in layers
    ), []


def axis_of_frequency(
    rotary: RotarySpec, base: Tensor, shifted: Sequence[Tensor], *, margin: float = 16.0
) -> tuple[int, ...]:
    """The axis that turns each frequency of ``rotary``, one number for each frequency.

    Args:
        rotary: slice, layout and frequencies of the stored tensor; found before by shifting all axes alike.
        base: one layer's keys ``[..., seq_len, head_dim]`` of a prefill.
        shifted: the same layer's keys of prefills of the same tokens, ``shifted[a]`` with axis ``a`` of every position
            moved by one and the same amount (``shift_axis``, ``telling_shift``), all other axes as in ``base``.
        margin: how many times more than any other axis the axis of a frequency must turn it.

    Raises:
        UnsupportedModelError: if a frequency follows no axis, or several, with a reason for each such frequency.
    """
    reaction = torch.stack([_reaction(rotary, base, keys) for keys in shifted])  # [axes, frequencies]
    strongest, axes = reaction.max(dim=0)
    others = reaction.scatter(0, axes[None], 0.0).amax(dim=0)
    clear = (strongest > 0) & (strongest >= margin * others)
    if not clear.all():
        raise UnsupportedModelError(
            "axes of a rotary embedding: expected every frequency to follow one position axis, but some follow none or "
            "several; keys of this model can be moved only where all axes move alike.",
            tuple(
                Reason(
                    f"frequency {index}",
                    "a turn by one axis",
                    ", ".join(f"{value:.1e}" for value in reaction[:, index].tolist()) + " by axis",
                )
                for index in torch.nonzero(~clear)[:, 0].tolist()
            ),
        )
    return tuple(axes.tolist())


def shift_axis(positions: Tensor, axis: int, by: int) -> Tensor:
    """A copy of integer ``positions`` ``[axes, ..., seq_len]`` with ``axis`` moved by ``by`` for all tokens."""
    moved = positions.clone()
    moved[axis] += by
    return moved


def telling_shift(rotary: RotarySpec, longest: int = LONGEST_SHIFT) -> int:
    """The shift up to ``longest`` that turns the least turned frequency most.

    A slow frequency hardly turns over a short distance, and a fast one may come full circle.
    """
    inv_freq = torch.tensor(rotary.inv_freq, dtype=torch.float64)
    shifts = torch.arange(1, longest + 1, dtype=torch.float64)
    turn = (shifts[:, None] * inv_freq / 2).sin().abs()
    return int(turn.amin(dim=1).argmax()) + 1


def _reaction(rotary: RotarySpec, base: Tensor, keys: Tensor) -> Tensor:
    """Root mean square of the change of each pair, relative to the pair; float64 ``[frequencies]``."""
    before, after = (_squares(rotary, states) for states in (base.double(), keys.double() - base.double()))
    return (after / before.clamp_min(torch.finfo(torch.float64).tiny)).sqrt()


def _squares(rotary: RotarySpec, states: Tensor) -> Tensor:
    part = states[..., rotary.start : rotary.stop].square().flatten(0, -2).sum(dim=0)
    count = len(rotary.inv_freq)
    return part.view(2, count).sum(dim=0) if rotary.layout == "half" else part.view(count, 2).sum(dim=1)
