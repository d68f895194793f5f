"""Which position axis turns which frequency: measured on vision-language models, and refused where it is not clear."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from editable_cache.adapters import host
from editable_cache.adapters.sections import axis_of_frequency, shift_axis, telling_shift
from editable_cache.errors import UnsupportedModelError
from editable_cache.ops import rotate_into, rotation
from editable_cache.spec import RotarySpec
from editable_cache.testing import oracles

MODELS = Path(__file__).parents[2] / "benchmarks" / "mrope_models.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mrope_models", MODELS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


vision = load()

AXES = {
    "Qwen2-VL": ("half", (0, 0, 1, 1, 1, 2, 2, 2)),
    "Qwen2.5-VL": ("half", (0, 0, 1, 1, 1, 2, 2, 2)),
    "Qwen3-VL": ("half", (0, 1, 2, 0, 1, 2, 0, 0)),
    "GLM-4V": ("interleaved", (0, 1, 2, 2)),
}
"""What the sections of the tiny configs mean, in blocks or in turn."""


def keys_of(model: PreTrainedModel) -> Callable[[Tensor], list[Tensor]]:
    """Keys of each layer of six tokens at positions ``[3, 6]``."""
    ids = torch.randint(5, 290, (1, 6), generator=torch.Generator().manual_seed(0))

    def prefill(positions: Tensor) -> list[Tensor]:
        cache = DynamicCache()
        host.run(model, ids, cache, position_ids=positions[:, None])
        return [layer.keys for layer in cache.layers]

    return prefill


def rotary_of(model: PreTrainedModel, layout: str) -> RotarySpec:
    (table,) = (b for name, b in model.named_buffers() if name.endswith("language_model.rotary_emb.inv_freq"))
    return RotarySpec(tuple(table.tolist()), "half" if layout == "half" else "interleaved")


GRID = torch.tensor([[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]])
"""Text, an image of two by two tokens, text."""


@pytest.mark.parametrize("name", AXES)
def test_axes_are_found_in_every_layer(name: str) -> None:
    layout, expected = AXES[name]
    model = vision.tiny_vision_model(name)
    rotary, prefill = rotary_of(model, layout), keys_of(model)
    base = prefill(GRID)
    shifted = [prefill(shift_axis(GRID, axis, telling_shift(rotary))) for axis in range(3)]
    for index, keys in enumerate(base):
        assert axis_of_frequency(rotary, keys, [one[index] for one in shifted]) == expected
    assert axis_of_frequency(rotary, base[0], [one[0] for one in reversed(shifted)]) != expected


@pytest.mark.parametrize("name", AXES)
def test_angles_follow_from_axes(name: str) -> None:
    """``position[axis] * inv_freq`` gives the model's keys to 1e-6, and another axis does not."""
    layout, axes = AXES[name]
    model = vision.tiny_vision_model(name)
    rotary, prefill = rotary_of(model, layout), keys_of(model)
    far = GRID * torch.tensor([[3], [5], [7]]) + torch.tensor([[1_000], [90_000], [262_144]])
    plain, expected = prefill(GRID * 0)[0], prefill(far)[0]

    def computed(axes: tuple[int, ...]) -> Tensor:
        out = plain.clone()
        for index, axis in enumerate(axes):
            turned = torch.empty_like(plain)
            rotate_into(turned, plain, rotation(rotary, far[axis] * 0, far[axis]))
            count = len(axes)
            for channel in (index, index + count) if layout == "half" else (2 * index, 2 * index + 1):
                out[..., channel] = turned[..., channel]
        return out

    oracles.check(computed(axes), expected, 1e-6)
    assert oracles.relative_error(computed(axes[::-1]), expected) > 1e-2


def test_sixteen_bits_are_enough_in_the_first_layer() -> None:
    layout, expected = AXES["Qwen3-VL"]
    model = vision.tiny_vision_model("Qwen3-VL")
    rotary = rotary_of(model, layout)
    prefill = keys_of(model.to(torch.bfloat16))
    shifted = [prefill(shift_axis(GRID, axis, telling_shift(rotary)))[0] for axis in range(3)]
    assert axis_of_frequency(rotary, prefill(GRID)[0], shifted) == expected


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_an_unclear_axis_is_refused(layout: str) -> None:
    rotary = RotarySpec((1.0, 0.1), "half" if layout == "half" else "interleaved", start=2)
    base = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    first, second = base.clone(), base.clone()
    pair = [2, 4] if layout == "half" else [2, 3]
    first[..., pair] += 1.0
    with pytest.raises(UnsupportedModelError) as nothing:
        axis_of_frequency(rotary, base, [first, second])
    assert [reason.what for reason in nothing.value.reasons] == ["frequency 1"]
    second[..., 2:6] += 1.0
    with pytest.raises(UnsupportedModelError) as both:
        axis_of_frequency(rotary, base, [first, second])
    assert [reason.what for reason in both.value.reasons] == ["frequency 0"]
    second[..., pair] = base[..., pair]
    assert axis_of_frequency(rotary, base, [first, second]) == (0, 1)


def test_a_telling_shift_turns_every_frequency() -> None:
    rotary = RotarySpec(tuple((1e6 ** (-torch.arange(0, 64, dtype=torch.float64) / 64)).tolist()), "half")
    shift = telling_shift(rotary)
    turn = (shift * torch.tensor(rotary.inv_freq, dtype=torch.float64) / 2).sin().abs()
    assert turn.min() > 2e-3
    assert (710 * torch.tensor(1.0, dtype=torch.float64) / 2).sin().abs() < 1e-4  # a full circle, nearly: unseen
