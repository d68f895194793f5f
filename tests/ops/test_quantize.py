"""Cells in one byte: how far they come back, for every size and dtype, and what is refused."""

from __future__ import annotations

import itertools
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from editable_cache import EditableCache, KVChunk, Skill
from editable_cache.errors import ArtifactError, CompatibilityError, SpanError
from editable_cache.ops.quantize import DTYPES, LARGEST, Grouping, Quantized, Storage, dequantize, grouping, quantize

STORAGES: tuple[Storage, ...] = ("int8", "fp8")
GROUPINGS: tuple[Grouping, ...] = ("token", "channel")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EVERY = list(itertools.product(STORAGES, GROUPINGS))


def excess(states: Tensor, quantized: Quantized, storage: Storage, dtype: torch.dtype | None = None) -> float:
    """By how much the worst cell that comes back exceeds the bound that the module states; at most 0 if none does."""
    dtype = states.dtype if dtype is None else dtype
    exact, scales = states.double(), quantized.scales.double()
    if storage == "int8":
        bound = scales * (0.5 + 2.0**-15) + torch.zeros_like(exact)
    else:
        bound = torch.maximum(2.0**-4 * exact.abs(), 2.0**-10 * scales) * (1 + 2.0**-20)
    info = torch.finfo(dtype)
    cast = info.eps / 2 * (exact.abs() + bound) + info.tiny * info.eps / 2
    error = (dequantize(quantized, dtype).double() - exact).abs()
    return float((error - bound - cast).max()) if error.numel() else 0.0


def absmax(states: Tensor, per: Grouping) -> Tensor:
    return states.double().abs().amax(-1 if per == "token" else -2, keepdim=True)


@st.composite
def cells(draw: st.DrawFn) -> Tensor:
    """States of any floating dtype and size: whole rows and single values huge, tiny, zero or negative zero."""
    dtype = draw(st.sampled_from(FLOATS))
    shape = (1, draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 9)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    states = torch.randn(shape, generator=generator, dtype=torch.float64)
    info = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)
    sizes = st.sampled_from([1.0, 1e-3, 1e3, info.tiny, info.tiny * info.eps, info.max / 8])
    rows = torch.tensor(draw(st.lists(sizes, min_size=shape[2], max_size=shape[2])), dtype=torch.float64)
    states *= rows[:, None]
    special = st.sampled_from([0.0, -0.0, info.max, info.min, info.tiny, -info.tiny * info.eps])
    for index in draw(st.lists(st.integers(0, states.numel() - 1), max_size=4)):
        states.view(-1)[index] = draw(special)
    return states.clamp(info.min, info.max).to(dtype)


@pytest.mark.parametrize(("storage", "per"), EVERY)
@given(states=cells())
def test_no_cell_comes_back_farther_than_the_bound(storage: Storage, per: Grouping, states: Tensor) -> None:
    quantized = quantize(states, storage, per=per)
    assert excess(states, quantized, storage) <= 0
    assert dequantize(quantized, states.dtype).isfinite().all()


@pytest.mark.parametrize(("storage", "per"), EVERY)
@given(states=cells())
def test_the_largest_of_every_group_keeps_its_size(storage: Storage, per: Grouping, states: Tensor) -> None:
    quantized = quantize(states, storage, per=per)
    expected = absmax(states, per)
    assert torch.all((quantized.scales == 1) | (expected > 0))
    normal = expected > LARGEST[DTYPES[storage]] * torch.finfo(torch.float32).tiny
    got = absmax(dequantize(quantized, torch.float64), per)
    torch.testing.assert_close(got[normal], expected[normal], rtol=2e-7, atol=0)


@pytest.mark.parametrize(("storage", "per"), EVERY)
def test_another_group_s_scales_break_the_bound(storage: Storage, per: Grouping) -> None:
    states = torch.randn(1, 2, 8, 16)
    quantized = quantize(states, storage, per=per)
    assert excess(states, quantized, storage) <= 0
    dim = -2 if per == "token" else -1
    swapped = Quantized(quantized.values, quantized.scales.roll(1, dim))
    assert excess(states, swapped, storage) > 0


@pytest.mark.parametrize("storage", STORAGES)
def test_the_bound_is_nearly_reached(storage: Storage) -> None:
    """A bound with much room to spare would let a worse rounding through."""
    states = torch.linspace(-1, 1, 4096).view(1, 1, 1, -1)
    quantized = quantize(states, storage, per="token")
    error = (dequantize(quantized, torch.float64) - states.double()).abs()
    if storage == "int8":
        assert error.max() > 0.49 * quantized.scales.max()
    else:
        assert (error / states.abs())[states.abs() > 2**-6 * quantized.scales].max() > 0.9 * 2**-4


@pytest.mark.parametrize("storage", STORAGES)
def test_a_worse_rounding_breaks_the_bound(storage: Storage) -> None:
    states = torch.randn(1, 2, 8, 64)
    quantized = quantize(states, storage, per="token")
    if storage == "int8":
        worse = (states / quantized.scales).trunc().to(torch.int8)
    else:
        worse = (states / quantized.scales).to(torch.float8_e5m2).float().clamp(-448, 448).to(torch.float8_e4m3fn)
    assert excess(states, Quantized(worse, quantized.scales), storage) > 0


def test_int8_rounds_halves_to_the_even_number() -> None:
    states = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0]).view(1, 1, 1, -1)
    values = quantize(states, "int8", per="token").values.flatten().tolist()
    assert values == [127, 0, 2, 2, 0, -2, -2, -127]


def test_fp8_maps_the_largest_value_to_448() -> None:
    states = torch.tensor([7.0, -7.0, 3.5, 0.0, -0.0]).view(1, 1, 1, -1)
    quantized = quantize(states, "fp8", per="token")
    assert quantized.values.float().flatten().tolist() == [448, -448, 224, 0, 0]
    assert dequantize(quantized, torch.float32).signbit().flatten().tolist() == [False, True, False, False, True]


@pytest.mark.parametrize(("storage", "per"), EVERY)
@pytest.mark.parametrize("dtype", FLOATS)
def test_shapes_dtypes_and_layout(storage: Storage, per: Grouping, dtype: torch.dtype) -> None:
    states = torch.randn(1, 5, 3, 4).transpose(1, 2).to(dtype)
    values, scales = quantized = quantize(states, storage, per=per)
    assert values.dtype == DTYPES[storage]
    assert scales.dtype == torch.float32
    assert list(scales.shape) == ([1, 3, 5, 1] if per == "token" else [1, 3, 1, 4])
    back = dequantize(quantized, dtype)
    assert back.dtype == dtype
    for tensor in (values, scales, back):
        assert tensor.is_contiguous()
    assert values.shape == back.shape == states.shape
    assert quantized.nbytes == 60 + 4 * scales.numel()


@pytest.mark.parametrize(("storage", "per"), EVERY)
def test_nothing_is_shared_or_changed(storage: Storage, per: Grouping) -> None:
    states = torch.randn(1, 2, 3, 4, requires_grad=True)
    before = states.detach().clone()
    quantized = quantize(states, storage, per=per)
    kept = Quantized(quantized.values.clone(), quantized.scales.clone())
    for dtype in FLOATS:
        dequantize(quantized, dtype).zero_()
    assert torch.equal(states, before)
    assert torch.equal(quantized.values.float(), kept.values.float())
    assert torch.equal(quantized.scales, kept.scales)
    assert not quantized.scales.requires_grad


@pytest.mark.parametrize(("storage", "per"), EVERY)
@pytest.mark.parametrize("shape", [(1, 2, 0, 4), (1, 2, 3, 0), (1, 0, 3, 4), (1, 1, 1, 1)])
def test_empty_and_single_states(storage: Storage, per: Grouping, shape: tuple[int, ...]) -> None:
    states = torch.full(shape, -3.0)
    quantized = quantize(states, storage, per=per)
    assert list(quantized.scales.shape) == [*shape[:2], *([shape[2], 1] if per == "token" else [1, shape[3]])]
    torch.testing.assert_close(dequantize(quantized, torch.float32), states, rtol=2e-7, atol=0)


@pytest.mark.parametrize(("storage", "per"), EVERY)
def test_zeros_come_back_as_zeros(storage: Storage, per: Grouping) -> None:
    quantized = quantize(torch.zeros(1, 2, 3, 4), storage, per=per)
    assert (quantized.scales == 1).all()
    assert not dequantize(quantized, torch.float32).any()


@pytest.mark.parametrize(("storage", "per"), EVERY)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_states_that_are_not_finite_are_refused(storage: Storage, per: Grouping, wrong: float) -> None:
    states = torch.randn(1, 2, 3, 4)
    states[0, 1, 2, 3] = wrong
    with pytest.raises(SpanError, match="1 of 24 not finite"):
        quantize(states, storage, per=per)


def test_what_can_t_be_stored_is_refused() -> None:
    states = torch.randn(1, 2, 3, 4)
    with pytest.raises(SpanError, match="'original'"):
        quantize(states, "original", per="token")
    with pytest.raises(SpanError, match="'head'"):
        quantize(states, "int8", per="head")  # type: ignore[arg-type]
    for wrong in (states[0], states.expand(2, 2, 3, 4), states.long()):
        with pytest.raises(SpanError, match="floating states"):
            quantize(wrong, "int8", per="token")
    with pytest.raises(SpanError, match="float32 can hold, got 0 of 24"):
        quantize(states.double() * 1e300, "int8", per="token")


def test_a_dtype_that_can_t_hold_the_cells_is_refused() -> None:
    quantized = quantize(torch.full((1, 1, 1, 4), 70_000.0), "int8", per="token")
    with pytest.raises(CompatibilityError, match="largest cell") as refused:
        dequantize(quantized, torch.float16)
    assert refused.value.reasons[0].what == "largest cell"
    assert dequantize(quantized, torch.bfloat16).isfinite().all()
    with pytest.raises(CompatibilityError, match="floating"):
        dequantize(quantized, torch.int64)


SOUND = Quantized(torch.ones(1, 2, 3, 4, dtype=torch.int8), torch.ones(1, 2, 3, 1))
DAMAGED = {
    "dtype of the values": (SOUND.values.short(), SOUND.scales),
    "rank": (SOUND.values[0], SOUND.scales),
    "batch": (SOUND.values.expand(2, 2, 3, 4), SOUND.scales),
    "dtype of the scales": (SOUND.values, SOUND.scales.double()),
    "shape of the scales": (SOUND.values, torch.ones(1, 2, 3, 4)),
    "scales that broadcast": (SOUND.values, torch.ones(1, 1, 1, 1)),
    "zero": (SOUND.values, SOUND.scales * 0),
    "negative": (SOUND.values, -SOUND.scales),
    "infinite": (SOUND.values, SOUND.scales * float("inf")),
    "nan scale": (SOUND.values, SOUND.scales * float("nan")),
    "-128": (torch.full((1, 2, 3, 4), -128, dtype=torch.int8), SOUND.scales),
    "nan": (torch.full((1, 2, 3, 4), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn), SOUND.scales),
    "-nan": (torch.full((1, 2, 3, 4), 0xFF, dtype=torch.uint8).view(torch.float8_e4m3fn), SOUND.scales),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_damaged_pairs_are_refused(how: str) -> None:
    assert dequantize(SOUND, torch.float32).eq(1).all()
    with pytest.raises(ArtifactError):
        dequantize(Quantized(*DAMAGED[how]), torch.float32)


def test_every_byte_that_is_a_number_is_read() -> None:
    bytes_ = torch.arange(256).to(torch.uint8)
    numbers = bytes_[(bytes_ & 0x7F) != 0x7F].view(torch.float8_e4m3fn).view(1, 1, 1, -1)
    back = dequantize(Quantized(numbers, torch.ones(1, 1, 1, 1)), torch.float32)
    assert torch.equal(back, numbers.float())
    assert back.abs().max() == 448


POLICY = (Path(__file__).parents[2] / "examples" / "refund_policy.txt").read_text(encoding="utf-8")


def brought_back(skill: KVChunk, storage: Storage, *, steps: int = 0) -> KVChunk:
    """The skill with quantized cells; with ``steps``, every token has the scale of another."""

    def back(name: str, states: Tensor) -> Tensor:
        values, scales = quantize(states, storage, per=grouping(name) if not steps else "token")
        return dequantize(Quantized(values, scales.roll(steps, -2)), states.dtype)

    content = {field.name: getattr(skill, field.name) for field in fields(KVChunk)}
    layers = tuple({name: back(name, states) for name, states in layer.items()} for layer in skill.layers)
    return KVChunk(**{**content, "layers": layers})


@torch.no_grad()
def test_a_real_skill_in_bytes_answers_as_the_full_one(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    skill = Skill.precompile(model, tokenizer, POLICY, name="policy")
    question = tokenizer("\nCustomer: please refund my pending order.\nDecision of the agent:", return_tensors="pt")
    start = EditableCache(model, tokenizer=tokenizer)
    start.append("You are a support agent. Follow the policy.\n\n")

    def worst_cosine(chunk: KVChunk) -> float:
        return float(torch.cosine_similarity(logits(chunk), logits(skill), dim=-1).min())

    def logits(chunk: KVChunk) -> Tensor:
        cache = start.fork()
        cache.splice(chunk)
        return model(question["input_ids"], cache=cache).logits[0]

    assert worst_cosine(brought_back(skill, "int8")) > 0.9995
    assert worst_cosine(brought_back(skill, "fp8")) > 0.99
    assert worst_cosine(brought_back(skill, "int8", steps=1)) < 0.95


def test_keys_of_a_real_skill_are_nearer_per_channel(smollm2: tuple[Any, Any]) -> None:
    skill = Skill.precompile(*smollm2, POLICY, name="policy")
    assert (grouping("keys"), grouping("values"), grouping("indexer_keys")) == ("channel", "token", "token")

    def worst_error(per: Grouping) -> float:
        """Root mean square over that of the keys, of the worst layer."""
        keys = [layer["keys"] for layer in skill.layers]
        errors = [dequantize(quantize(k, "int8", per=per), k.dtype) - k for k in keys]
        return max(
            float(error.square().mean() / k.square().mean()) ** 0.5 for error, k in zip(errors, keys, strict=True)
        )

    assert worst_error("channel") < 0.7 * worst_error("token")
