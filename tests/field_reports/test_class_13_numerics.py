"""Field reports, class 13: numerics."""

from __future__ import annotations

import pytest
import torch
from cache_support import forward, shared_model, some_ids
from transformers import DynamicCache

from editable_cache import EditableCache
from editable_cache.testing.oracles import relative_error


def chunkings(family: str, dtype: torch.dtype, make: object) -> list[torch.Tensor]:
    """Last logits of one prompt, prefilled whole and in two pieces."""
    model, ids = shared_model(family, dtype=dtype), some_ids(24)
    found = []
    for pieces in ([24], [11, 13]):
        cache = make(model)  # type: ignore[operator]
        found.append([forward(cache, part, model=model) for part in ids.split(pieces, dim=1)][-1][:, -1].float())
    return found


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_b69_float32_decides(family: str) -> None:
    """vllm-project/vllm#5543, #40896, #34046; huggingface/transformers#25420, #36536: real faults hide in "noise"."""
    stock = chunkings(family, torch.float32, lambda model: DynamicCache())
    ours = chunkings(family, torch.float32, EditableCache)
    for a, b in zip(ours, stock, strict=True):
        assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_b69_sixteen_bits_are_judged_by_stock_noise(family: str, dtype: torch.dtype) -> None:
    """kekzl/imp#1492: a flip is allowed only where the margin is below the noise of stock prefill itself."""
    exact = chunkings(family, torch.float32, lambda model: DynamicCache())[0]
    stock = chunkings(family, dtype, lambda model: DynamicCache())
    ours = chunkings(family, dtype, EditableCache)
    noise = max(relative_error(one, exact) for one in stock)
    assert noise > 0
    for one in ours:
        assert relative_error(one, exact) <= 1.5 * noise
        best = exact.argmax(-1)
        if one.argmax(-1) != best:
            top = exact.topk(2).values[0]
            assert (top[0] - top[1]) <= noise * exact.abs().max()
    # control: a real fault, one position off, is far above that noise
    model, ids = shared_model(family, dtype=dtype), some_ids(24)
    cache = EditableCache(model)
    forward(cache, ids[:, :12], model=model)
    shifted = torch.arange(13, 25)[None]
    wrong = forward(cache, ids[:, 12:], model=model, position_ids=shifted)[:, -1].float()
    assert relative_error(wrong, exact) > 1.5 * noise
