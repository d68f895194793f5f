"""The small value of every size field that a config may have, by field name.

A size is used only where the type's default config has the feature on: what is None, 0 or False there stays so.
"""

from __future__ import annotations

import re
from typing import Any

VOCAB_SIZE = 256
"""Size of every vocabulary. Text ids lie in the lower half, ids of images and the like in the upper half."""

WINDOW = 8
"""Sliding window and chunk of chunked attention: small, so that a dozen tokens already leave it."""

MAX_POSITION = 131_072
"""Positions of a rotary model: large, so that far moves can be tested."""

MAX_TABLE_POSITION = 2_048
"""Positions of a model with a table of learned positions, which costs memory."""

LONGEST_TABLE = 8_192
"""No type has a learned table of more positions: a default limit above it costs no memory, rotation or not."""

LAYERS = 4
"""Least depth; more where the type has more kinds of layers."""

MAX_LAYERS = 8

POSITION_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_target_positions",
    "context_length",
    "model_max_length",
)

DEPTH_FIELDS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "layers",
    "decoder_layers",
    "num_decoder_layers",
    "encoder_layers",
    "num_encoder_layers",
)
"""Names of the number of layers of a language model; an encoder that comes along has as many as the decoder."""

TOWER_DEPTH_FIELDS = (*DEPTH_FIELDS, "depth", "num_blocks")

_HIDDEN = (
    "hidden_size n_embd d_model embed_dim embedding_size embedding_dim emb_dim word_embed_proj_dim lru_width "
    "input_embedding_size output_embedding_size dim_model_base projection_dim mm_hidden_size ple_embed_dim "
    "text_hidden_size out_hidden_size output_hidden_size vision_output_dim output_dim llm_hidden_size lm_hidden_size "
    "language_model_hidden_size encoder_hidden_size projector_hidden_size vision_hidden_size adapter_out_dim "
    "adapter_in_dim adapter_input_size backbone_hidden_size image_text_hidden_size hidden_size_global "
    "patch_embed_hidden_size decoder_hidden_size audio_hidden_size projection_hidden_size image_token_embed_dim"
)
_INTERMEDIATE = (
    "intermediate_size ffn_dim d_ff dff dim_ff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim d_inner "
    "feed_forward_size n_inner intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size "
    "alignment_intermediate_size projection_intermediate_size mlp_dim downsample_hidden_size projection_hidden_dim "
    "prompt_mid_dim"
)
_EXPERT_INTERMEDIATE = (
    "moe_intermediate_size moe_hidden_size expert_ffn_hidden_size shared_expert_intermediate_size "
    "shared_experts_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size share_expert_dim "
    "moe_latent_size"
)
_HEADS = (
    "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads num_sliding_attention_heads "
    "linear_num_heads linear_num_value_heads"
)
_KV_HEADS = (
    "num_key_value_heads num_kv_heads swa_num_key_value_heads num_global_key_value_heads kv_n_heads "
    "linear_num_key_heads"
)
_HEAD_DIM = (
    "head_dim swa_head_dim d_head kv_channels attention_head_dim attention_head_size d_kv dim_head linear_head_dim "
    "linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim mamba_headdim v_head_dim index_head_dim "
    "indexer_head_dim resampler_head_dim resampler_dim_head query_pre_attn_scalar"
)
_EXPERTS = "num_experts num_local_experts n_routed_experts moe_num_experts"
_EXPERTS_PER_TOKEN = "num_experts_per_tok num_experts_per_token moe_k moe_topk top_k_experts moe_top_k"
_WINDOWS = "sliding_window sliding_window_size attention_window_size window_size attention_chunk_size"
_STATES = "mamba_d_state ssm_state_size state_size"


def _named(names: str, value: int) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


SIZES: dict[str, Any] = {
    **_named(_HIDDEN, 64),
    **_named(_INTERMEDIATE, 96),
    **_named(_EXPERT_INTERMEDIATE, 32),
    **_named(_HEADS, 4),
    **_named(_KV_HEADS, 2),
    **_named(_HEAD_DIM, 16),
    **_named(_EXPERTS, 4),
    **_named(_EXPERTS_PER_TOKEN, 2),
    **_named(_WINDOWS, WINDOW),
    **_named(_STATES, 16),
    **_named("vocab_size unpadded_vocab_size vocab_size_per_layer_input output_vocab_size", VOCAB_SIZE),
    "local_attention": 2 * WINDOW,
    "global_head_dim": 32,
    # latent attention and its indexer
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "o_lora_rank": 16,
    "o_groups": 2,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "index_n_heads": 16,  # with two, both scores are often below zero, and the indexer picks among equals
    "index_topk": 64,
    # mixture of experts
    "topk_group": 1,
    "n_group": 1,
    "num_expert_group": 1,
    "moe_num_shared_experts": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "zero_expert_num": 2,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "router_hidden_size": 16,
    # recurrent and convolution layers
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "n_mamba_heads": 2,
    "mamba_n_groups": 1,
    "mamba_ngroups": 1,
    "mamba_d_ssm": 128,
    "mamba_expand": 2,
    "mamba_dt_rank": 8,
    "time_step_rank": 8,
    "mamba_chunk_size": 4,
    "chunk_size": 4,
    "n_groups": 1,
    # small parts that a few families have
    "rotary_dim": 8,
    "num_codebooks": 2,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    "num_kv_shared_layers": 2,
    "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0,
    "type_vocab_size": 2,
    "adapter_rank": 8,
    "gated_norm_rank": 8,
    "d_rel": 8,
    "rel_extent": 64,
    "hc_mult": 2,
    "hc_count": 2,
    "hc_lowrank": 16,
    "loop_gate_rank": 8,
    "pronunciation_embed_dim": 16,
    "pronunciation_vocab_size": 32,
    "shape_embed_dim": 16,
    "shape_vocab_size": 32,
    "additional_vocab_size": 8,
    "keep_window_size": 64,
    "attention_multiplier": 0.25,
    "is_decoder": True,
    "use_mamba_kernels": False,
    "tie_word_embeddings": False,
}
"""Small values of the language model's fields."""

TOWER_SIZES: dict[str, Any] = {
    **{name: value for name, value in SIZES.items() if name not in _WINDOWS.split()},
    **_named("qformer_hidden_size resampler_n_latents resampler_num_latents num_query_tokens latent_query_num", 8),
    **_named("resampler_n_heads resampler_heads", 4),
    "resampler_depth": 1,
    "num_key_value_heads": 4,
    "codebook_size": 64,
    "num_embeddings": 64,
    "base_channels": 32,
    "num_res_blocks": 1,
    "aligner_num_add_layers": 2,
    "local_num_hidden_layers": 1,
    "global_num_hidden_layers": 1,
    "num_global_layers": 1,
    "num_global_hidden_layers": 1,
}
"""Small values of vision, audio and other towers. Their windows are spans of patches and stay."""

DROPOUTS = re.compile(r"(dropout|_pdrop|layerdrop|dropout_rate|drop_path_rate|jitter_noise|dropout_prob)$")
"""Names of fields that make a forward random in training mode."""

UNKNOWN: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"(hidden_size|hidden_dim)$"), 64),
    (re.compile(r"(intermediate_size|intermediate_dim|ffn_dim)$"), 96),
    (re.compile(r"vocab_size$"), VOCAB_SIZE),
    (re.compile(r"experts$"), 4),
    (re.compile(r"lora_rank$"), 16),
)
"""The value of an integer field that `SIZES` does not name and that is above 256, so that a new type stays small."""

SPECIAL_TOKEN = re.compile(
    r"(image|video|audio|vision|boi|eoi|boa|eoa|img|im|frame|speech|patch|row|col|slice|newline|low_res|placeholder|mask)"
    r".*_(id|index|token)$"
)
"""Names of token ids that text must not hold. They get ids in the upper half of the vocabulary."""

FIRST_SPECIAL_ID = 160
"""First id that is given to an image token and the like."""
