"""Tiny random models and a tiny tokenizer, built from configs in memory: no hub, no files.

The weights are drawn strong enough that a fault shows. A default-initialised tiny model hides almost every
fault (attention is flat, positions hardly matter), so every weight is drawn anew: matrices with std 0.35 (0.2
where queries and keys are made, so that the softmax is neither flat nor one-hot), norm weights around their
neutral value, biases different from zero. Families are rows of one table, and a refusal test names its row
too.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 320
"""Size of every tiny model's vocabulary, and the most that `tiny_tokenizer` uses."""

SLIDING_WINDOW = 8
"""Window of every sliding layer: small, so that a dozen tokens already leave it."""

MAX_POSITION = 131_072
"""Positions that a tiny model accepts: large, so that far moves can be tested."""

MATRIX_STD = 0.35
QUERY_KEY_STD = 0.2
EMBEDDING_STD = 0.3
VECTOR_STD = 0.1


@dataclass(frozen=True)
class TinyFamily:
    """One row of the table.

    Attributes: model_type: transformers' name of the architecture. config: Arguments of its config.
        set_after: Attributes set on the finished config, past its checks and its own defaults. attention:
        Attention implementations that transformers has for it and that take a mask tensor, default first.
        refused_because: Why its cells can't be moved; None where they can.
        kind: "rotation" of its keys; "latent": its keys stay and its values rotate; "hybrid": recurrent layers;
        "position-free": nothing rotates, and it takes no mask over chosen cells; "limited": it moves below a position.
    """

    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    set_after: Mapping[str, Any] = field(default_factory=dict)
    attention: tuple[str, ...] = ("sdpa", "eager")
    refused_because: str | None = None
    kind: Literal["rotation", "latent", "hybrid", "position-free", "limited"] = "rotation"


_SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITION,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _small(*without: str, **changes: Any) -> dict[str, Any]:
    """The common small sizes without the names that a family does not know, plus what it adds."""
    return {name: value for name, value in _SMALL.items() if name not in without} | changes


def _rope(rope_type: str = "default", *, theta: float = 10_000.0, **rest: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": theta, **rest}


_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_NO_GROUPS = ("num_key_value_heads", "head_dim")  # families with one KV head per query head

FAMILIES: dict[str, TinyFamily] = {
    "llama": TinyFamily("llama", _small(rope_parameters=_rope())),
    "qwen3": TinyFamily("qwen3", _small(rope_parameters=_rope(theta=1e6))),
    "mistral": TinyFamily("mistral", _small(sliding_window=SLIDING_WINDOW, rope_parameters=_rope())),
    "gemma2": TinyFamily(
        "gemma2",
        _small(
            num_hidden_layers=4,
            layer_types=_ALTERNATING,
            sliding_window=SLIDING_WINDOW,
            query_pre_attn_scalar=16,
            rope_parameters=_rope(),
        ),
        attention=("eager",),  # its soft cap on the scores has no sdpa form
    ),
    "gemma3": TinyFamily(
        "gemma3_text",
        _small(
            num_hidden_layers=4,
            layer_types=_ALTERNATING,
            sliding_window=SLIDING_WINDOW,
            query_pre_attn_scalar=16,
            rope_parameters={"sliding_attention": _rope(), "full_attention": _rope(theta=1e6)},
        ),
    ),
    "gpt_neox": TinyFamily("gpt_neox", _small(*_NO_GROUPS, rope_parameters=_rope(partial_rotary_factor=0.25))),
    "phi": TinyFamily("phi", _small("head_dim", rope_parameters=_rope(partial_rotary_factor=0.5))),
    "cohere": TinyFamily(
        "cohere", _small("head_dim", logit_scale=1.0, tie_word_embeddings=True, rope_parameters=_rope())
    ),
    "glm": TinyFamily(
        "glm",
        _small(rope_parameters=_rope(partial_rotary_factor=0.5)),
        set_after={"eos_token_id": None},  # GLM puts its own ids where it is given None
    ),
    "smollm3": TinyFamily(
        "smollm3",
        _small(
            "head_dim",
            num_hidden_layers=4,
            no_rope_layers=[1, 0, 1, 0],
            tie_word_embeddings=True,
            rope_parameters=_rope(),
        ),
    ),
    "llama_yarn": TinyFamily(
        "llama",
        _small(
            max_position_embeddings=256,
            rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=64),
        ),
        set_after={"max_position_embeddings": MAX_POSITION},  # 4 x 64 would be too near for far moves
    ),
    "llama_llama3": TinyFamily(
        "llama",
        _small(
            rope_parameters=_rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            )
        ),
    ),
    "llama_linear": TinyFamily("llama", _small(rope_parameters=_rope("linear", factor=4.0))),
    "gpt2": TinyFamily(
        "gpt2",
        {
            "vocab_size": VOCAB_SIZE,
            "n_embd": 64,
            "n_inner": 96,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 2048,
            "tie_word_embeddings": True,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        refused_because="learned absolute positions are part of the hidden state",
    ),
    "llama_dynamic": TinyFamily(
        "llama",
        _small(max_position_embeddings=64, rope_parameters=_rope("dynamic", factor=2.0)),
        kind="limited",
    ),
    "deepseek_v3": TinyFamily(
        "deepseek_v3",
        _small(
            "head_dim",
            num_key_value_heads=4,
            kv_lora_rank=24,
            q_lora_rank=32,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=12,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            rope_parameters=_rope(),
        ),
        kind="latent",
    ),
    "falcon_h1": TinyFamily(
        "falcon_h1",
        _small(
            "head_dim",
            mamba_d_ssm=128,
            mamba_n_heads=8,
            mamba_d_head=16,
            mamba_d_state=16,
            mamba_n_groups=1,
            mamba_chunk_size=4,
            rope_parameters=_rope(),
        ),
        kind="hybrid",
    ),
    "bloom": TinyFamily(
        "bloom",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "n_layer": 3,
            "n_head": 4,
            "tie_word_embeddings": True,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        attention=("eager",),
        kind="position-free",
    ),
}

TINY_FAMILIES: tuple[str, ...] = tuple(
    name for name, row in FAMILIES.items() if row.refused_because is None and row.kind == "rotation"
)
"""Families that store keys, which rotate, and values, which do not."""

LATENT_FAMILIES: tuple[str, ...] = tuple(name for name, row in FAMILIES.items() if row.kind == "latent")
"""Families with latent attention."""

HYBRID_FAMILIES: tuple[str, ...] = tuple(name for name, row in FAMILIES.items() if row.kind == "hybrid")
"""Families with recurrent layers."""

POSITION_FREE_FAMILIES: tuple[str, ...] = tuple(name for name, row in FAMILIES.items() if row.kind == "position-free")
"""Families whose cells do not depend on the position."""

REFUSED_FAMILIES: tuple[str, ...] = tuple(name for name, row in FAMILIES.items() if row.refused_because is not None)
"""Families whose cells can't be moved; `FAMILIES[name].refused_because` says why."""


def tiny_config(family: str) -> PreTrainedConfig:
    """Return a fresh config of `family` without end, begin or pad token: generation never stops early."""
    if family not in FAMILIES:
        raise KeyError(f"no tiny family {family!r}; there are {', '.join(FAMILIES)}")
    row = FAMILIES[family]
    # Copied, because transformers completes nested rope dictionaries in place.
    config = AutoConfig.for_model(row.model_type, **copy.deepcopy(dict(row.config)))
    for name, value in row.set_after.items():
        setattr(config, name, value)
    return config


def tiny_model(
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """Return a tiny random model of `family` in eval mode.

    `attn_implementation` None means sdpa where transformers has it for the family, else eager
    (`FAMILIES[family].attention[0]`); one that is named is used, or transformers refuses it.

    The weights depend on `family` and `seed` only: another `dtype` holds the same weights rounded, and
    buffers such as `inv_freq` stay what `from_config(dtype=)` makes them (float32). The caller's random state
    is not touched.
    """
    config = tiny_config(family)
    implementation = attn_implementation or FAMILIES[family].attention[0]
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=implementation
        )
    draw_weights(model, seed=seed)
    model.generation_config.eos_token_id = None
    model.eval()
    return model


def draw_weights(model: PreTrainedModel, *, seed: int = 0) -> None:
    """Draw every weight of `model` anew, in place, so that attention, positions and values all matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(_drawn(name, weight.detach().float(), noise))


def _drawn(name: str, weight: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The new float32 value of the parameter `name`, from its old value and standard normal `noise`."""
    if "norm" in name or re.search(r"\bln_", name):
        return weight + VECTOR_STD * noise  # around the neutral value, which is 0 for Gemma and 1 elsewhere
    if name.endswith("dt_bias"):
        return torch.zeros_like(weight)  # a Mamba time step that lets the state through
    if weight.ndim == 1:
        return VECTOR_STD * noise if name.endswith("bias") else weight
    if re.search(r"embed|wte|wpe|lm_head", name):
        return EMBEDDING_STD * noise
    if re.search(r"q_proj|k_proj|q_[ab]_|kv_[ab]_|query_key_value|c_attn", name):
        return QUERY_KEY_STD * noise
    return MATRIX_STD * noise


_SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")

_TRAINING_TEXT = (
    "You are a support agent. The customer asked for the refund of the order, and the order was delivered.",
    "order_status: pending, order_status: delivered, the status of the order is the status of the refund",
    "If the order is pending the agent must not refund it; if it is delivered the agent may refund it.",
)

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def _tokenizer_json() -> str:
    """Byte-level BPE of at most `VOCAB_SIZE` tokens, trained here on three sentences, as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    return tokenizer.to_str()


def tiny_tokenizer(*, add_bos: bool = False) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with ids below `VOCAB_SIZE`; it takes any unicode and knows offsets.

    Common words of a support dialogue are one token and everything else falls apart into bytes, so a field's
    value can have any token count. With `add_bos` every encoding starts with `<|bos|>`, as Llama's does. The
    chat template is ChatML.
    """
    backend = Tokenizer.from_str(_tokenizer_json())
    byte_level = processors.ByteLevel(trim_offsets=False)
    if add_bos:
        bos = ("<|bos|>", _SPECIAL_TOKENS.index("<|bos|>"))
        template = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A <|bos|>:1 $B:1", special_tokens=[bos]
        )
        backend.post_processor = processors.Sequence([byte_level, template])
    else:
        backend.post_processor = byte_level
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITION,
    )
