"""Tiny models with recurrent layers, with weights strong enough that a lost state shows; and a splice by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer

from editable_cache.adapters.continuation import run_in_steps
from editable_cache.adapters.states import recurrent_state, write_state
from editable_cache.adapters.transitions import Captured
from editable_cache.ops import relative_error
from editable_cache.testing.threaded import tensors

VOCAB = 97
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
DELTA: dict[str, Any] = {
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MOE: dict[str, Any] = {"moe_intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
    "mlp_layer_types": ["dense"] * 3,
}
LAYERS = [LINEAR, FULL, LINEAR]

CONFIGS: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1], **MAMBA2},
    "falcon_h1": {"num_hidden_layers": 2, "mamba_d_ssm": 96, "mamba_rms_norm": True, **MAMBA2},
    "zamba": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"],
        "n_mamba_heads": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"],
        "n_mamba_heads": 6,
        "mamba_d_state": 12,
        "mamba_ngroups": 1,
        "chunk_size": 16,
        "use_mem_rope": True,
        "num_mem_blocks": 1,
    },
    "jamba": {
        "num_hidden_layers": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 100,
        "expert_layer_offset": 99,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 3,
        "layer_types": LAYERS,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 64,
        **MAMBA2,
    },
    "nemotron_h": {
        "layers_block_type": [LINEAR, "mlp", FULL, LINEAR],
        "head_dim": 12,
        "ssm_state_size": 12,
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "qwen3_next": {
        "num_hidden_layers": 3,
        "layer_types": LAYERS,
        "head_dim": 12,
        "mlp_only_layers": [0, 1, 2],
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        **MOE,
        **DELTA,
    },
    "qwen3_5_text": {"num_hidden_layers": 3, "layer_types": LAYERS, "head_dim": 12, **DELTA},
    "olmo_hybrid": {
        "num_hidden_layers": 3,
        "layer_types": LAYERS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **DELTA,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 20,
    },
    "kimi_linear": {
        "num_hidden_layers": 3,
        "layer_types": LAYERS,
        "linear_head_dim": 12,
        "linear_num_heads": 4,
        **LATENT,
        **MOE,
    },
    "bailing_hybrid": {
        "num_hidden_layers": 3,
        "layer_types": LAYERS,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 12,
        "num_mtp_layers": 0,
        **LATENT,
        **MOE,
    },
    "lara_mini": {
        "num_hidden_layers": 4,
        "layer_types": [LINEAR, SLIDING, LINEAR, FULL],
        "head_dim": 12,
        "sliding_window": 16,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        **MOE,
        **DELTA,
    },
    "lfm2": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", FULL, "conv"],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
    },
    "zaya": {
        "num_hidden_layers": 3,
        "head_dim": 12,
        "moe_intermediate_size": 32,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
    },
    "mamba2": {
        "num_hidden_layers": 2,
        "state_size": 12,
        "num_heads": 6,
        "head_dim": 16,
        "n_groups": 1,
        "chunk_size": 16,
        "expand": 2,
    },
}
CONFIGS = {name: config for name, config in CONFIGS.items() if name in CONFIG_MAPPING}  # older versions know fewer
"""What each model type needs beyond `COMMON`."""

UNKNOWN = {
    "zaya": {"intermediate_size"},
    "lara_mini": {"intermediate_size"},
    "mamba2": {
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    },
}
"""Common arguments that a config does not take."""


@cache
def build(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A tiny float32 model of this type; shared, leave it unchanged."""
    common = {name: value for name, value in COMMON.items() if name not in UNKNOWN.get(model_type, ())}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**common, **CONFIGS[model_type]})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        _draw(name, parameter.data, generator)
    return model


def _draw(name: str, weight: Tensor, generator: torch.Generator) -> None:
    """Gains near 1, decays that keep a state for tens of tokens, steps between 0.001 and 0.1."""
    uniform = torch.rand(weight.shape, generator=generator)
    leaf = name.split(".")[-1]
    if "embed" in name and weight.dim() == 2:
        weight.copy_(torch.randn(weight.shape, generator=generator))
    elif leaf == "A_log" and weight.dim() == 1:
        weight.copy_(torch.log(0.5 + 7.5 * uniform))
    elif leaf in ("dt_bias", "dt_proj_bias") or name.endswith("dt_proj.bias"):
        step = torch.exp(uniform * math.log(100.0) + math.log(0.001))
        weight.copy_(step + torch.log(-torch.expm1(-step)))
    elif leaf == "temp":  # ZAYA's scale of the keys, zero from the config
        weight.copy_(0.5 + uniform)
    elif weight.dim() >= 2 and leaf != "A_log":
        weight.copy_(torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[-1]))


def ids(num_tokens: int, seed: int) -> Tensor:
    """Token ids `[1, num_tokens]` without special tokens."""
    return torch.randint(3, VOCAB, (1, num_tokens), generator=torch.Generator().manual_seed(seed))


def cache_factory(model: PreTrainedModel) -> Callable[[], DynamicCache]:
    return lambda: DynamicCache(config=model.config)


def positions(start: int, num_tokens: int) -> Tensor:
    return torch.arange(start, start + num_tokens)[None]


def append_keys(live: Any, alone: Any, num_body: int) -> None:
    """Add the keys and values of the last `num_body` tokens of `alone` to `live`; positions are already right."""
    for layer, source in zip(live.layers, alone.layers, strict=True):
        keys = getattr(source, "keys", None)
        if keys is None or not keys.numel():
            continue
        keys, values = keys[..., -num_body:, :], source.values[..., -num_body:, :]
        layer.update(keys.clone(), values.clone())
        if isinstance(layer, DynamicIndexedLayer):
            layer.update_indexer(source.indexer_keys[:, -num_body:].clone())
            places = source.indexer_position_ids
            if places is not None:
                layer.indexer_position_ids = torch.cat([layer.indexer_position_ids, places[..., -num_body:]], dim=-1)
        if getattr(layer, "cumulative_length", None) is not None:
            layer.cumulative_length += num_body - keys.shape[-2]


class Spliced(NamedTuple):
    """A chunk that was composed by hand, and what followed it."""

    logits: Tensor  # [1, vocab_size] of the last query token
    body: dict[str, Tensor]  # every tensor of the cache after the body
    end: dict[str, Tensor]  # the same after tail and query


def splice(
    model: PreTrainedModel,
    alone: Captured,
    parts: tuple[Tensor, Tensor, Tensor],
    *,
    head: int,
    tail: int,
    step: int | None,
    without: str = "",
) -> Spliced:
    """On a stock cache: prefix from position 1 and head live, body composed, tail and query live.

    `parts` are prefix, chunk and query. `without` leaves out one thing: the live "state", the chunk's "offset", the
    "factor" or the "conv" window.
    """
    prefix, chunk, query = parts
    start, stop = 1 + prefix.shape[1], chunk.shape[1] - tail
    cache = DynamicCache(config=model.config)
    run_in_steps(model, prefix, positions(1, prefix.shape[1]), cache, step=None)
    run_in_steps(model, chunk[:, :head], positions(start, head), cache, step=step)
    for slot, each in alone.transitions.items():
        live, offset = recurrent_state(cache, slot), each.offset
        state = None
        if live is not None and offset is not None:
            state = {"state": offset, "offset": live, "factor": live + offset}.get(without, each.apply(live))
        write_state(cache, slot, recurrent=state, conv=None if without == "conv" else each.conv)
    append_keys(cache, alone.cache, stop - head)
    body = tensors(cache)
    rest = torch.cat([chunk[:, stop:], query], dim=1)
    logits = run_in_steps(model, rest, positions(start + stop, rest.shape[1]), cache, step=step)
    return Spliced(logits, body, tensors(cache))


def largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative, over all tensors of a cache."""
    assert found.keys() == expected.keys()
    return max(relative_error(found[name], expected[name]) for name in expected)
