"""A tiny configuration of each of mlx-lm's model types: one dictionary that most can read, and what others need.

mlx-lm takes from a configuration what it knows by name, so one superset builds most types. Knows names and sizes only.
"""

from __future__ import annotations

import pkgutil
from typing import Any

import mlx_lm.models

VOCAB_SIZE = 258
WINDOW = 12
LAYERS = 4

# Modules among mlx-lm's models that are parts of models.
PARTS = {
    "activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline", "rope_utils", "ssm",
    "switch_layers",
}  # fmt: skip

_MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_BY_LAYER = {"sliding_attention": _PLAIN_ROPE, "full_attention": _PLAIN_ROPE}

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
    # width and depth
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "mlp_bias": False,
    "attention_bias": False,
    "use_bias": False,
    # norms
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    # positions
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 8,
    # windows
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "sliding_window_pattern": 2,
    "window_size": WINDOW,
    "attention_window_size": WINDOW,
    "loop_window_size": WINDOW,
    "layer_types": _MIXED,
    # experts
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    # low-rank attention
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    # recurrence
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "layer_group_size": 2,
    "group_norm_size": 1,
    "conv_kernel": 4,
    "state_size": 16,
    "ssm_state_size": 16,
    "time_step_rank": 4,
    "use_conv_bias": True,
    "n_groups": 2,
    "conv_L_cache": 3,
    "conv_bias": False,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_n_groups": 1,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    # scales
    "embedding_multiplier": 1.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "query_pre_attn_scalar": 16,
    "scale_depth": 1.4,
    "scale_emb": 4.0,
    "dim_model_base": 64,
    "use_qk_norm": True,
    "qk_norm": True,
    "post_norm": True,
    "use_qkv_bias": False,
    "num_nextn_predict_layers": 0,
}  # fmt: skip

_GEMMA4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 2,
    "num_global_key_value_heads": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
_QWEN3_5 = {
    "tie_word_embeddings": False,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_GPT = {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 1024, "n_ctx": 1024, "n_inner": 96}
_KDA = {
    "linear_attn_config": {
        "kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4,
    },
    "model_max_length": 1024,
}  # fmt: skip
_LONGCAT = {
    "attention_method": "MLA", "zero_expert_type": "identity", "ffn_hidden_size": 96, "moe_topk": 2,
    "expert_ffn_hidden_size": 32, "zero_expert_num": 1, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
}  # fmt: skip
_CONV = {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)}

_OWN: dict[str, dict[str, Any]] = {
    "afm7": {"hidden_dim": 64, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2},
    "baichuan_m1": {"tie_word_embeddings": False, "sliding_window_layers": [0, 2], "conv_window": 2},
    "dbrx": {
        "d_model": 64, "n_layers": LAYERS, "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": _YARN},
    "deepseek_v3": {"rope_scaling": _YARN},
    "deepseek_v41": {
        "o_groups": 2, "o_lora_rank": 16, "head_dim": 32, "compress_ratios": [0, 4, 4, 1], "hc_mult": 2,
        "candidate_topk_blocks": 2, "candidate_block_size": 2,
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "exaone4": {"sliding_window_pattern": "LG"},
    "gear": {"layer_types": ["conv_mixer", "sliding_attention", "full_attention", "conv_mixer"]},
    "gemma3n": {
        "num_hidden_layers": 6, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB_SIZE, "rope_local_base_freq": 10000.0, "final_logit_softcapping": 30.0,
        "layer_types": _MIXED + _MIXED[:2], "activation_sparsity_pattern": [0.0] * 6, "altup_num_inputs": 2,
        "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0, "laurel_rank": 8,
    },
    "gemma4_text": _GEMMA4,
    "glm_moe_dsa": {"rope_parameters": _PLAIN_ROPE},
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gptj": _GPT,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * (LAYERS // 2)},
    "hunyuan": {
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        "moe_topk": 2, "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_cla": True, "cla_share_factor": 2,
    },
    "jamba": {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
        "layers_block_type": ["mamba", "attention", "mamba", "attention"],
    },
    "kimi_k3": {
        "hidden_act": "situ", "activation_situ_beta": 1.0, "activation_situ_linear_beta": 1.0, **_KDA,
        "attn_res_block_size": 2,
    },
    "kimi_linear": _KDA,
    "lfm2": {
        "block_dim": 64, "block_ff_dim": 96, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False, **_CONV,
    },
    "lfm2_moe": {"use_expert_bias": True, **_CONV},
    "lille-130m": {"block_size": 1024, "n_kv_heads": 2, **_GPT},
    "llama": {"layer_types": _MIXED},
    "llama4": {
        "attention_chunk_size": WINDOW, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 96,
        "num_experts_per_tok": 1, "rope_scaling": None,
    },
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": {**_LONGCAT, "emb_neighbor_num": 3, "emb_split_num": 2, "ngram_vocab_size_ratio": 2},
    "mamba2": {"num_heads": 4, "time_step_limit": [0.0, 100.0], "n_groups": 1},
    "mellum": {"rope_parameters": _BY_LAYER},
    "minicpm3": {
        "rope_scaling": {
            "type": "longrope", "original_max_position_embeddings": 256, "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
        },
    },
    "minicpm": {"tie_word_embeddings": False},
    "minimax_m3_vl": {
        "dense_intermediate_size": 96, "layer_types": None, "moe_layer_freq": [0, 1, 1, 1], "rotary_dim": 8,
        "sparse_attention_freq": [0, 1, 0, 1], "index_block_size": 4, "index_topk_blocks": 2,
    },
    "ministral3": {"rope_parameters": _YARN},
    "mistral4": {"rope_parameters": _YARN},
    "muse_spark": {
        "post_norm_eps": 1e-5, "rope_parameters": _PLAIN_ROPE, "layer_rope_theta": [10000.0, 0.0] * (LAYERS // 2),
        "final_logit_softcapping": 20.0, "output_multiplier": 1.0, "moe_hidden_size": 64, "num_shared_experts": 0,
    },
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {"no_op": False, "replace_with_linear": False, "n_heads_in_group": 2},
                "ffn": {"no_op": False, "replace_with_linear": False, "ffn_mult": 1.5},
            }
        ]
        * LAYERS,
    },
    "nemotron_h": {"layer_types": ["mamba", "attention", "mlp", "moe"], "mamba_num_heads": 4},
    "olmo_hybrid": {"linear_allow_neg_eigval": True, "layer_types": ["linear_attention", "full_attention"] * 2},
    "minimax": {"rotary_dim": 16},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0] * (LAYERS // 2), "moe_layer_freq": [0, 1, 1, 1], "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "swa_v_head_dim": 16,
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    },
    "openelm": {
        "num_transformer_layers": LAYERS, "model_dim": 64, "ffn_dim_divisor": 8, "num_query_heads": [4] * LAYERS,
        "num_kv_heads": [2] * LAYERS, "ffn_multipliers": [1.0] * LAYERS,
    },
    "phi3small": {
        "vocab_size": 100352,  # it writes at the places of its unused tokens
        "dense_attention_every_n_layers": 2, "ff_intermediate_size": 96, "gegelu_limit": 20.0,
        "blocksparse_block_size": 32, "blocksparse_num_local_blocks": 2, "blocksparse_vert_stride": 2,
    },
    "phixtral": {"num_vocab": VOCAB_SIZE, "model_dim": 64, "num_heads": 4, "rotary_dim": 8},
    "plamo": {"n_shared_head": 2},
    "plamo2": {"hidden_size_per_head": 16, "mamba_step": 2, "mamba_chunk_size": 8, "full_attention_idx": [3]},
    "qwen": {"kv_channels": 16},
    "recurrent_gemma": {
        "conv1d_width": 4, "logits_soft_cap": 30.0, "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {
        "a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8,
    },
    "qwen3_5": _QWEN3_5,
    "qwen3_moe": {"tie_word_embeddings": False},
    "qwen3_5_moe": _QWEN3_5,
    "spark2_5": {"hidden_act": "gelu", "rope_parameters": _BY_LAYER},
    "step3p5": {
        "num_attention_groups": 2, "moe_num_experts": 4, "moe_top_k": 2, "share_expert_dim": 32,
        "moe_layers_enum": "1,3",
        "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2},
    },
    "stablelm": {"use_qkv_bias": True},
}  # fmt: skip

# Types whose configuration holds another one: a model with eyes around one of text.
_TEXT_OF = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "kimi_k3": "kimi_k3",
    "kimi_vl": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "llama4": "llama4",
    "minimax_m3_vl": "minimax_m3_vl",
    "mistral3": "ministral3",
    "muse_spark": "muse_spark",
    "pixtral": "llama",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}


def model_types() -> list[str]:
    """The names of all of mlx-lm's model types that a configuration may give, aliases left out."""
    return sorted(found.name for found in pkgutil.iter_modules(mlx_lm.models.__path__) if found.name not in PARTS)


def config_of(model_type: str) -> dict[str, Any]:
    """A tiny configuration of this type; that mlx-lm can build it is not promised."""
    text = _TEXT_OF.get(model_type, model_type)
    settings = {**_BASE, **_OWN.get(text, {}), "model_type": text}
    return {**settings, "model_type": model_type, "text_config": settings} if model_type in _TEXT_OF else settings
