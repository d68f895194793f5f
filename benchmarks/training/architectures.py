"""Small models of four attention families with random weights, whose heads begin by looking back and by matching."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

ROTARY: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
FASTEST, BIAS, MATCH = 4, 8.0, 3.0
"""Pairs that tell neighbours apart, the others turn once in 600 tokens or more; what heads begin with."""
COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "attention_bias": True,
    "rope_parameters": ROTARY,
}
SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 32,
    "query_pre_attn_scalar": 32,
    "rope_parameters": {"full_attention": ROTARY, "sliding_attention": ROTARY},
}
CONVOLUTIONS: dict[str, Any] = {
    "layer_types": ["conv", "full_attention"] * 2,
    "attention_bias": False,
    "conv_bias": True,
    "conv_L_cache": 4,
}


def build(model_type: str, own: dict[str, Any], tokenizer: Any, seed: int) -> PreTrainedModel:
    """The model with random weights, float32, whose heads begin by looking back and by matching.

    Looking some tokens back, and from a word to where the same word stood before, is what the task is made of. Both
    arise by themselves in larger models and longer trainings; here recall takes 30 steps with this beginning, and had
    not moved after 400 without.

    Args:
        own: settings of the family beside ``COMMON``.
    """
    torch.manual_seed(seed)
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model(model_type, **{**COMMON, **ids, **own})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    embedding = model.get_input_embeddings()
    torch.nn.init.normal_(embedding.weight, std=1 / float(getattr(embedding, "embed_scale", 1.0)))
    with torch.no_grad():
        embedding.weight[:, COMMON["head_dim"] :] *= 0.3
        first, *others = model.model.layers
        stood = _look_back_by_convolution(first.conv) if hasattr(first, "conv") else _look_back(first.self_attn)
        for layer in others[:-1] if config.attention_bias else others:
            if hasattr(layer, "self_attn"):
                _match(layer.self_attn, stood)
    return model  # type: ignore[no-any-return]


def _words() -> tuple[list[slice], Tensor, Tensor]:
    """The four blocks of a layer's inner dimensions, how a word is written into one ``[head_dim, hidden]``, and where
    what stood one, two and three tokens before is written ``[hidden, 3 * head_dim]``.
    """
    hidden, size = COMMON["hidden_size"], COMMON["head_dim"]
    basis = torch.eye(hidden).split(size)
    return [slice(size * block, size * (block + 1)) for block in range(4)], basis[0], torch.cat(basis[1:]).T


def _look_back(attention: Any) -> list[Tensor]:
    """Heads 1, 2 and 3 look as many tokens back: biases of the fastest pairs, turned against each other by so many.

    Rotary attention looks at places, whatever stands there, only through a part that all queries and all keys share.

    Returns:
        How to read the word at a token and at one, two, three tokens before it: each ``[head_dim, hidden]``.
    """
    blocks, written, places = _words()
    half = COMMON["head_dim"] // 2
    speeds = ROTARY["rope_theta"] ** (-torch.arange(half) / half)
    for back in (1, 2, 3):
        angle = 2 * math.pi * torch.rand(FASTEST)
        later = angle + back * speeds[:FASTEST]
        for linear, turned in ((attention.q_proj, angle), (attention.k_proj, later)):
            linear.bias[blocks[back]].view(2, half)[:, :FASTEST] = BIAS * torch.stack((turned.cos(), turned.sin()))
        attention.v_proj.weight[blocks[back]] = written
    attention.o_proj.weight[:, blocks[1].start :] = places
    _sharpen(attention)
    return [written, *places.T.chunk(3)]


def _look_back_by_convolution(conv: Any) -> list[Tensor]:
    """The same by a short convolution, whose gates begin open."""
    blocks, written, places = _words()
    gates = conv.in_proj.weight.chunk(3), conv.in_proj.bias.chunk(3)  # before it, behind it, what is convolved
    conv.conv.weight[blocks[1].start :] = 0.0
    for back in (1, 2, 3):
        for gate in (0, 1):
            gates[0][gate][blocks[back]], gates[1][gate][blocks[back]] = 0.0, 1.0
        gates[0][2][blocks[back]] = written
        conv.conv.weight[blocks[back], 0, -1 - back] = 1.0
    conv.out_proj.weight[:, blocks[1].start :] = places
    return [written, *places.T.chunk(3)]


def _match(attention: Any, stood: list[Tensor]) -> None:
    """Heads that find a word again, on the slow pairs: the call behind a value, and a call's value before it."""
    blocks, half = _words()[0], COMMON["head_dim"] // 2
    for block, query, key in ((blocks[0], 1, 2), (blocks[1], 0, 2), (blocks[3], 2, 0)):
        for linear, place in ((attention.q_proj, query), (attention.k_proj, key)):
            linear.weight[block] = MATCH * stood[place]
            linear.weight[block].view(2, half, -1)[:, :FASTEST] = 0.0
    _sharpen(attention)


def _sharpen(attention: Any) -> None:
    """Where queries and keys are normalized, a head begins sharp only through these weights."""
    for name, module in attention.named_children():
        if "norm" in name:
            module.weight += 1.0  # from 1 to 2, or from 0 to 1 where 1 is added to them
