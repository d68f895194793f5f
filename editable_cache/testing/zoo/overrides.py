"""What a model type needs beside the general rule, with a reason per row, and the extra named variants.

These rows only build test models: nothing outside the zoo reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from editable_cache.testing.zoo.sizes import FIRST_SPECIAL_ID, MAX_POSITION


@dataclass(frozen=True)
class Row:
    """Changes to one model type's small config.

    Attributes: reason: why the general rule isn't enough. text: arguments of the language model's config. top:
        arguments of the outer config. towers: arguments of its other parts, by name. tower: arguments of this type
        where it is a tower itself. replaced: towers of another type, by name. default: arguments without which the
        default config can't be made.
    """

    reason: str
    text: Mapping[str, Any] = field(default_factory=dict)
    top: Mapping[str, Any] = field(default_factory=dict)
    towers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tower: Mapping[str, Any] = field(default_factory=dict)
    replaced: Mapping[str, str] = field(default_factory=dict)
    default: Mapping[str, Any] = field(default_factory=dict)


_LINEAR, _FULL, _SLIDING, _CONV, _HYBRID = "linear_attention", "full_attention", "sliding_attention", "conv", "hybrid"
_FULL_SIZE = "the size of heads in full layers is no field of the config class"
_ONE_KIND = "the default config has only one kind of layer, the type has two"
_SECTIONS = "the model's own M-RoPE sections are meant for a larger head, and its default config names none"
_IMAGE_IDS = "ids of images are listed by name"
_NO_TIMM = "the default tower needs timm; text doesn't pass through it"


def _rope(theta: float = 10_000.0, rope_type: str = "default", **rest: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": theta, **rest}


_FAR = {"max_position_embeddings": MAX_POSITION}
"""For a type without a rotation whose default limit is low, though it has no table of positions."""

_PER_KIND = {_SLIDING: _rope(mrope_section=[2, 3, 3]), _FULL: _rope(1e6, mrope_section=[2, 3, 3])}
_SWA_LATENT = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 40,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 12,
}

ROWS: dict[str, Row] = {
    "apertus1p5": Row(
        "token ranges of image and audio codes must fill the upper half of the vocabulary",
        top={"image_token_offset": FIRST_SPECIAL_ID + 16, "audio_token_offset": FIRST_SPECIAL_ID + 48},
        towers={
            "vision_config": {"codebook_size": 32, "base_channels": 32, "channel_multiplier": [1, 1]},
            "audio_config": {"codebook_size": 32, "codebook_dim": 64},
        },
    ),
    "bamba": Row("the default config has no attention layer", {"attn_layer_indices": [1, 3]}),
    "blt": Row(
        "the cache asks the outer config for its depth",
        top={"num_hidden_layers": 4, "encoder_hash_byte_group_vocab": 64},
    ),
    "chameleon": Row(_IMAGE_IDS, top={"vocabulary_map": {"<image>": FIRST_SPECIAL_ID}}),
    "cohere_compass_text": Row(
        "its RoPE has a set per kind of layer, which the default config leaves out",
        {"layer_types": [_SLIDING, _FULL] * 2, "rope_parameters": _PER_KIND},
    ),
    "dbrx": Row(
        "its attention has sizes of its own, and reads a RoPE base that the config class leaves out",
        top={
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "deepseek_ocr2_text": Row(
        "the default config leaves its experts out",
        {"n_routed_experts": 4, "n_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"] * 2},
    ),
    "deepseek_v4": Row(
        "four kinds of attention; compressed windows short enough to fill",
        {
            "layer_types": [
                _SLIDING,
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
            "head_dim": 32,
            "num_key_value_heads": 1,
            "partial_rotary_factor": 0.25,
        },
    ),
    "diffusion_gemma_text": Row(
        "the default config leaves its experts out",
        {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32, "global_head_dim": 32},
    ),
    "dots1": Row(
        "the default config leaves its experts out; " + _ONE_KIND,
        {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "layer_types": [_SLIDING, _FULL] * 2,
            "sliding_window": 8,
        },
    ),
    "dots3_note_text": Row("layers with a window have sizes of their own, under legacy names", _SWA_LATENT),
    "dory": Row(
        "the layers of its loop are counted apart",
        {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1, "n_recurrent_loops": 2},
    ),
    "emu3": Row(_IMAGE_IDS, top={"vocabulary_map": {"<image>": FIRST_SPECIAL_ID}}),
    "ernie4_5_vl_moe_text": Row(_SECTIONS, {"rope_parameters": _rope(mrope_section=[3, 3, 2])}),
    "gemma4_assistant": Row(
        "the default config contradicts its own checks",
        {"num_kv_shared_layers": 4},
        default={"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    ),
    "fast_vlm": Row(_NO_TIMM, replaced={"vision_config": "siglip_vision_model"}),
    "gemma4_text": Row(_FULL_SIZE, {"global_head_dim": 32}),
    "gemma4_unified_text": Row(_FULL_SIZE, {"global_head_dim": 32}),
    "gpt_neo": Row("its kinds of layers are given as a pattern", {"attention_types": [[["global", "local"], 2]]}),
    "granite4_vision": Row(
        "image features enter at layers of the language model, which is shallower here",
        top={"deepstack_layer_map": [[0, 1]], "downsample_rate": "1/2", "spatial_target_layers": [2]},
    ),
    "granitemoehybrid": Row(
        "the default config has no attention layer and no RoPE",
        {"layer_types": [_LINEAR, _FULL] * 2, "position_embedding_type": "rope", "rope_parameters": _rope()},
    ),
    "hunyuan_vl_text": Row(_SECTIONS, {"rope_parameters": _rope(mrope_section=[2, 2, 2, 2])}),
    "inkling_vision": Row(
        "fewer layers than scales of its patches need scipy", tower={"num_hidden_layers": 4, "patch_size": 4}
    ),
    "jamba": Row(
        "its kinds of layers are periods that need more depth", {"attn_layer_period": 2, "attn_layer_offset": 1}
    ),
    "laguna": Row(_ONE_KIND, {"layer_types": [_FULL, _SLIDING] * 2, "sliding_window": 8}),
    "lfm2": Row("the default config has no convolution layer", {"layer_types": [_CONV, _FULL] * 2}),
    "lfm2_moe": Row("the default config names no layers", {"layer_types": [_CONV, _FULL] * 2}),
    "mamba2": Row("heads must fill twice the hidden size", {"num_heads": 8}),
    "mellum": Row(_ONE_KIND, {"layer_types": [_FULL, _SLIDING] * 2, "sliding_window": 8}),
    "minimax_m3_vl_text": Row(
        _ONE_KIND + "; blocks of keys short enough to fill, and enough of them to hold all; as many index as key heads",
        {
            "layer_types": [_FULL, "minimax_m3_sparse"] * 2,
            "index_block_size": 2,
            "index_topk_blocks": 32,
            "index_n_heads": 2,
        },
    ),
    "mllama_text_model": Row("cross-attention layers are counted by index", {"cross_attention_layers": [1, 3]}),
    "musicgen_decoder": Row("with one codebook its ids are plain ids", {"num_codebooks": 1}),
    "musicgen_melody_decoder": Row("with one codebook its ids are plain ids", {"num_codebooks": 1}),
    "muse_spark_audio": Row(
        "its depth is the length of its lists",
        tower={"num_hidden_layers": 4, "hidden_sizes": [16, 16, 32, 64], "depths": [1, 1, 1, 1]},
    ),
    "nemotron_h": Row(
        "the default config has every kind of layer once",
        {"layer_types": [_LINEAR, "moe", _FULL, "mlp", _LINEAR, "moe", _FULL, "mlp"]} | _FAR,
    ),
    "perception_lm": Row(
        _NO_TIMM + "; the projector reads its width from the arguments for timm",
        replaced={"vision_config": "siglip_vision_model"},
        towers={"vision_config": {"model_args": {"embed_dim": 64}}},
    ),
    "qwen4_exp_text": Row(
        "its indexer has no sizes by default; " + _SECTIONS,
        {
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 64,
            "indexer_compress_ratio": 2,
            "rope_parameters": _rope(mrope_section=[2, 3, 3]),
        },
    ),
    "recurrent_gemma": Row("its pattern of layers is three long", {"num_hidden_layers": 6}),
    "reformer": Row(
        "its table of positions is a product, and a sequence must fill it or be a multiple of its chunks",
        {
            "axial_pos_embds_dim": [32, 32],
            "axial_pos_shape": [32, 64],
            "attn_layers": ["local", "lsh"] * 2,
            "num_buckets": 4,
        },
    ),
    "step3p5": Row(_ONE_KIND, {"layer_types": [_FULL, _SLIDING] * 2, "sliding_window": 8}),
    "xlstm": Row("its heads are rounded up to a multiple of 64, of queries too", {"qk_dim_factor": 1.0}),
    "xmod": Row("a forward needs a language", {"default_language": "en_XX"}),
    "zamba": Row(
        "attention runs at twice the hidden size",
        {
            "layers_block_type": [_LINEAR, _HYBRID] * 2,
            "attention_hidden_size": 128,
            "attention_head_dim": 32,
            "num_key_value_heads": 4,
        }
        | _FAR,
    ),
    "zamba2": Row("keys have no groups", {"num_key_value_heads": 4}),
    "zaya": Row("one expert per token is all it supports", {"num_experts_per_tok": 1}),
}
"""By model type of the config (a nested language model has its own row)."""


@dataclass(frozen=True)
class Variant:
    """A model type with one feature changed.

    Attributes: reason: what the variant is for. text: arguments of its language model's config.
    """

    reason: str
    text: Mapping[str, Any] = field(default_factory=dict)


_LONGROPE = {
    "rope_parameters": _rope(
        rope_type="longrope",
        short_factor=[1.0 + 0.05 * place for place in range(8)],
        long_factor=[1.5 + 0.75 * place for place in range(8)],
        original_max_position_embeddings=256,
        factor=4.0,
    )
}
_YARN = _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=2_048, beta_fast=32.0, beta_slow=1.0)
_QUERY_SCALE = {**_YARN, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1, "mscale": 1.0}

VARIANTS: dict[str, Variant] = {
    "bamba:attn": Variant("attention in the first and the last layer", {"attn_layer_indices": [0, 3]}),
    "deepseek_v32:topk4": Variant("the indexer leaves tokens out after four", {"index_topk": 4}),
    "falcon:alibi": Variant("a bias by distance instead of a rotation", {"alibi": True}),
    "falcon:new_arch": Variant("grouped keys", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gemma3n_text:shared": Variant(
        "half of the layers read the keys and values of earlier ones", {"num_kv_shared_layers": 4}
    ),
    "gemma4_text:shared": Variant(
        "the last two layers read the keys and values of earlier ones", {"num_kv_shared_layers": 2}
    ),
    "glm_moe_dsa:topk4": Variant("the indexer leaves tokens out after four", {"index_topk": 4}),
    "granite_swa:thetas": Variant(
        "a frequency set per layer, one layer without", {"layer_rope_theta": [0.0, 10_000.0, 1_000_000.0, 10_000.0]}
    ),
    "inkling2_text:scale": Variant("the query scale starts at 16", {"log_scaling_n_floor": 16}),
    "inkling_text:scale": Variant("the query scale starts at 16", {"log_scaling_n_floor": 16}),
    "llama4_text:notemp": Variant("no query scale", {"attn_temperature_tuning": False}),
    "llama4_text:temp_early": Variant("the query scale starts at 4 cached tokens", {"floor_scale": 4}),
    "llama:dynamic": Variant(
        "frequencies follow the longest position seen, beyond 64",
        {
            "rope_parameters": _rope(rope_type="dynamic", factor=4.0, original_max_position_embeddings=64),
            "max_position_embeddings": 256,
        },
    ),
    "llama:linear": Variant("positions divided by four", {"rope_parameters": _rope(rope_type="linear", factor=4.0)}),
    "llama:llama3": Variant(
        "low frequencies divided",
        {
            "rope_parameters": _rope(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=2_048,
            )
        },
    ),
    "llama:longrope": Variant("two frequency sets with the border at 256", _LONGROPE),
    "llama:yarn": Variant("mixed frequencies and a gain on the rotation", {"rope_parameters": _YARN}),
    "minimax_m3_vl_text:blocks2": Variant("all but two blocks of two keys are left out", {"index_topk_blocks": 2}),
    "minimax_m3_vl_text:nolocal": Variant("no block is chosen for being near", {"index_local_blocks": 0}),
    "ministral3:qscale": Variant("the query scale starts at position 64", {"rope_parameters": _QUERY_SCALE}),
    "mistral4:qscale": Variant("the query scale starts at position 64", {"rope_parameters": _QUERY_SCALE}),
    "mistral:sliding": Variant("a window of eight in every layer", {"sliding_window": 8}),
    "phi3:longrope": Variant(
        "two frequency sets with the border at 256", {**_LONGROPE, "original_max_position_embeddings": 256}
    ),
    "phi3:partial": Variant("half of the head rotates", {"rope_parameters": _rope(partial_rotary_factor=0.5)}),
    "qwen4_exp_text:ple": Variant(
        "embeddings of n-grams with a convolution, in the first layer",
        {
            "ple_layer_ids": [1],
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 256,
            "split_ngram_parts": 1,
            "eos_token_id": 2,
        },
    ),
    "qwen2:sliding": Variant(
        "full layers first, then a window", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    ),
    "zamba2:rope": Variant("rotation in the shared attention", {"use_mem_rope": True}),
}
"""By name, ``"model_type:feature"``."""
