"""A tiny DeepSeek V4 and references for it: plain forwards of the stock model, with nothing of the package in them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from editable_cache.testing import compressed
from editable_cache.testing.tiny_models import VOCAB_SIZE
from editable_cache.testing.zoo import weights

SPARSE, HEAVY, WINDOW = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
RATES = {SPARSE: 4, HEAVY: 6}
ALIGNMENT = 12
"""The least slot at which windows of both lengths start: neither rate is a multiple of the other."""

SIZE = VOCAB_SIZE


@functools.cache
def model() -> Any:
    """16 heads of the indexer, so that no two entries have the same score, where topk would choose by storage order."""
    config = DeepseekV4Config(
        vocab_size=SIZE,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        q_lora_rank=32,
        num_experts_per_tok=2,
        n_routed_experts=4,
        layer_types=[WINDOW, SPARSE, HEAVY, SPARSE, HEAVY],
        mlp_layer_types=["hash_moe"] + ["moe"] * 4,
        compress_rates=RATES,
        sliding_window=10,
        hc_mult=2,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=16,
        index_head_dim=16,
        index_topk=5,
        partial_rotary_factor=0.25,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        max_position_embeddings=2048,
        attn_implementation="eager",
    )
    built = DeepseekV4ForCausalLM(config).eval()
    weights.draw(built, "deepseek_v4", 0)
    generator = torch.Generator().manual_seed(0)
    for name, buffer in built.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.randint(0, 4, buffer.shape, generator=generator))
    return built


def ids_of(count: int, seed: int = 1) -> Tensor:
    return torch.randint(5, SIZE, (count,), generator=torch.Generator().manual_seed(seed))


def forward(cache: Any, ids: Tensor) -> Tensor:
    """Logits ``[1, n, vocab]`` of a plain call; fills the cache."""
    return compressed.forward(model(), cache, ids)


def stock(*parts: Tensor) -> tuple[DynamicCache, Tensor]:
    """A stock cache behind all parts, one forward each, and the logits of the last part."""
    cache, logits = DynamicCache(config=model().config), torch.zeros(0)
    for part in parts:
        if len(part):
            logits = forward(cache, part)
    return cache, logits


def attention_layers() -> list[Any]:
    return [layer.self_attn for layer in model().model.layers]


def frozen_reference(prefix: Tensor, chunk: Tensor, seen: Tensor | None = None, *, cut: bool = True) -> DynamicCache:
    """A stock cache behind ``prefix`` and ``chunk``, which ran alone, or behind ``seen``."""
    found: DynamicCache = compressed.frozen_behind(model(), stock(prefix)[0], chunk, seen, cut=cut)
    return found


def cut_overlap(cache: DynamicCache) -> None:
    """The next window takes nothing of the one before it."""
    for layer in cache.layers:
        for name in compressed.OVERLAP:
            vars(layer).get(name, {}).update(dict.fromkeys(vars(layer).get(name, {})))


@contextmanager
def blind(patch: pytest.MonkeyPatch, start: int) -> Iterator[None]:
    """During forwards of tokens from position ``start`` on, nobody sees a key or an entry of an earlier token."""
    own_mask = modeling_deepseek_v4.create_sliding_window_causal_mask

    def mask(**kwargs: Any) -> Tensor:
        made: Tensor = own_mask(**kwargs).clone()
        first = int(kwargs["position_ids"][0, -1]) + 1 - made.shape[-1]
        made[..., : max(0, start - first)] = torch.finfo(made.dtype).min
        return made

    def entries(module: Any, _: Any, output: Any) -> Any:
        kv, bias = output
        bias = bias.clone()
        bias[..., : start // module.compress_rate] = float("-inf")
        return kv, bias

    def scores(_: Any, __: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[..., : start // RATES[SPARSE]] = float("-inf")
        return output

    hooks = []
    for each in attention_layers():
        if each.compressor is not None:
            hooks.append(each.compressor.register_forward_hook(entries))
            indexer = getattr(each.compressor, "indexer", None)
            if indexer is not None:
                hooks.append(indexer.scorer.register_forward_hook(scores))
    with patch.context() as patched:
        patched.setattr(modeling_deepseek_v4, "create_sliding_window_causal_mask", mask)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
