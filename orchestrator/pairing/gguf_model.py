"""Converts a GGUF file to a folder in Hugging Face layout that mlx-lm opens: config.json, weights, tokenizer.

Knows each architecture's names of tensors and settings, and undoes what llama.cpp's converter did to the weights: rows
of q and k in another order (llama), 1 added to norms (gemma3). An unknown tensor is an error, so none is left out.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from outrider.orchestrator.pairing import gguf, gguf_tokenizer
from outrider.orchestrator.pairing.gguf import GROUP_SIZE, UNQUANTIZED_KINDS, GgufFile
from outrider.protocol.errors import ModelError

MAX_SHARD_BYTES = 2**29
"""Bytes of weights per file; the conversion holds about twice as many in memory."""

_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_OUTPUT_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_FOUR_NORMS = {**_NORMS, **_OUTPUT_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
}
_FUSED = {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE_BLOCKS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """The name of an architecture in mlx-lm, and the names of its blocks' tensors there and in Hugging Face.

    `permuted`: q and k have their rotary halves interleaved. `norms_plus_one`: the file stores norms' weights plus 1.
    """

    model_type: str
    blocks: Mapping[str, str]
    permuted: bool = False
    norms_plus_one: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


_LLAMA = {**_NORMS, **_ATTENTION, **_MLP}
_GEMMA = {**_LLAMA, **_FOUR_NORMS}
_ROUTING = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
_GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
ARCHITECTURES = {
    "llama": GgufArchitecture("llama", _LLAMA, permuted=True),
    "mistral": GgufArchitecture("mistral", _LLAMA, permuted=True),
    "smollm3": GgufArchitecture("smollm3", _LLAMA, permuted=True),
    "granite": GgufArchitecture("granite", _LLAMA, permuted=True),
    "qwen2": GgufArchitecture("qwen2", _LLAMA),
    "qwen3": GgufArchitecture("qwen3", {**_LLAMA, **_HEAD_NORMS}),
    "qwen3moe": GgufArchitecture("qwen3_moe", {**_NORMS, **_ATTENTION, **_HEAD_NORMS, **_EXPERTS}, settings=_ROUTING),
    "gemma2": GgufArchitecture("gemma2", _GEMMA, norms_plus_one=True, settings=_GELU),
    "gemma3": GgufArchitecture("gemma3_text", {**_GEMMA, **_HEAD_NORMS}, norms_plus_one=True, settings=_GELU),
    "olmo2": GgufArchitecture("olmo2", {**_ATTENTION, **_HEAD_NORMS, **_MLP, **_OUTPUT_NORMS}),
    "phi3": GgufArchitecture("phi3", {**_NORMS, **_FUSED}),
}

_GRANITE_MULTIPLIERS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}

_SAMPLING_KEYS = {
    "temperature": ("general.sampling.temp", GgufFile.number),
    "top_p": ("general.sampling.top_p", GgufFile.number),
    "top_k": ("general.sampling.top_k", GgufFile.whole),
    "min_p": ("general.sampling.min_p", GgufFile.number),
    "repetition_penalty": ("general.sampling.penalty_repeat", GgufFile.number),
}


def write_model(
    file: GgufFile, folder: Path, keep_precision: bool = False, sampling: Mapping[str, float] | None = None
) -> None:
    """Writes the model into an empty folder. `keep_precision`: types that MLX can't store stay in half precision.
    `sampling`: values for generation_config.json that the file does not have.

    Raises:
        ModelError: the file has another architecture or is incomplete.
        OSError: a file can't be written.
    """
    known = _find_architecture(file)
    names = _map_names(file, known)
    dtype = _float_dtype(file)
    bits = {
        new: width
        for old, new in names.items()
        if len(file.tensors[old].shape) > 1 and (width := gguf.mlx_bits(file.tensors[old].kind, keep_precision))
    }
    config = _model_config(file, known, dtype) | _quantization_config(bits)
    ids = gguf_tokenizer.write_tokenizer(file, folder, config["vocab_size"])
    _write_json(folder / "config.json", config | ids)
    own = {name: read(file, key) for name, (key, read) in _SAMPLING_KEYS.items() if key in file.metadata}
    _write_json(folder / "generation_config.json", {**(sampling or {}), **own, **ids})
    for number, shard in enumerate(_group_shards(_convert_tensors(file, known, names, bits, dtype)), start=1):
        name = "model.safetensors" if number == 1 else f"model-{number:05}.safetensors"  # mlx-lm needs no index
        (folder / name).write_bytes(save(shard, {"format": "mlx"}))


def _find_architecture(file: GgufFile) -> GgufArchitecture:
    if file.whole("split.count", 1) > 1:  # only the first part names the architecture
        raise ModelError(f"{file.path} is one of several parts; join them first (llama-gguf-split --merge)")
    if (kind := file.text("general.type", "model")) != "model":  # adapter, imatrix or mmproj
        raise ModelError(f"{file.path} is of the type {kind!r}; expected the file of a whole model")
    name = file.architecture
    if name not in ARCHITECTURES:
        known = f"{', '.join(ARCHITECTURES)}, or the model in MLX format"
        raise ModelError(f"{file.path} has the architecture {name!r}; expected one of {known}")
    if file.whole(f"{name}.expert_count", 0) and "ffn_gate_exps" not in ARCHITECTURES[name].blocks:
        raise ModelError(
            f"{file.path} is a mixture of experts, which can be read from GGUF files only if it is a qwen3moe model;"
            " use the model in MLX format"
        )
    return ARCHITECTURES[name]


def _map_names(file: GgufFile, known: GgufArchitecture) -> dict[str, str]:
    """Returns the new name of each tensor that is a weight of the model."""
    blocks = file.size(f"{file.architecture}.block_count")
    if blocks > len(file.tensors):
        raise ModelError(f"{file.path} has {blocks} blocks and {len(file.tensors)} tensors; choose another file")
    names = {f"{old}.weight": f"{new}.weight" for old, new in _OUTSIDE_BLOCKS.items()}
    optional = {"output.weight"}
    for block in range(blocks):
        for old, new in known.blocks.items():
            names[f"blk.{block}.{old}.weight"] = f"model.layers.{block}.{new}.weight"
            if not old.endswith("norm"):
                names[f"blk.{block}.{old}.bias"] = f"model.layers.{block}.{new}.bias"
                optional.add(f"blk.{block}.{old}.bias")
    missing = [name for name in names if name not in file.tensors and name not in optional]
    unknown = [name for name in file.tensors if name not in names and name not in _ROPE_TENSORS]
    if missing:
        raise ModelError(
            f"{file.path} has no tensor {missing[0]}, which {file.architecture} models have; download it again"
        )
    if unknown:
        raise ModelError(
            f"{file.path} has the tensor {unknown[0]}, which {file.architecture} models don't have; choose another file"
        )
    return {old: new for old, new in names.items() if old in file.tensors}


def _float_dtype(file: GgufFile) -> str:
    """Returns the type of weights that are not quantised: float16 if others are quantised, else the file's own."""
    kinds = {place.kind for place in file.tensors.values() if len(place.shape) > 1}
    if not kinds <= set(UNQUANTIZED_KINDS) or "F16" in kinds:
        return "float16"
    return "bfloat16" if "BF16" in kinds else "float32"


def _convert_tensors(
    file: GgufFile, known: GgufArchitecture, names: Mapping[str, str], bits: Mapping[str, int], dtype: str
) -> Iterator[tuple[str, NDArray[Any]]]:
    heads, kv_heads = _head_counts(file)
    for old, new in names.items():
        place = file.tensors[old]
        most, expected = (3, "1, 2 or 3") if "_exps." in old else (2, "1 or 2")
        if len(place.shape) > most:
            raise ModelError(f"{file.path}: the tensor {old} has {len(place.shape)} dimensions; expected {expected}")
        if known.norms_plus_one and old.endswith("norm.weight"):
            norm = gguf.convert_tensor(file, old, None, "float32")["weight"] - np.float32(1)
            parts = {"weight": norm.astype(dtype)}
        else:
            parts = gguf.convert_tensor(file, old, bits.get(new), dtype)
        for suffix, part in parts.items():
            if known.permuted and (".attn_q." in old or ".attn_k." in old):
                part = _unpermute_rows(file, old, part, heads if ".attn_q." in old else kv_heads)
            yield new if suffix == "weight" else f"{new.removesuffix('weight')}{suffix}", part


def _unpermute_rows(file: GgufFile, name: str, rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Reorders each head's rows as in Hugging Face: the first halves of all rotary pairs, then the second halves."""
    if len(rows) % (2 * heads):
        raise ModelError(f"{file.path}: the tensor {name} has {len(rows)} rows; expected a multiple of {2 * heads}")
    pairs = rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _head_counts(file: GgufFile) -> tuple[int, int]:
    heads = file.size(f"{file.architecture}.attention.head_count")
    return heads, file.size(f"{file.architecture}.attention.head_count_kv", heads)


def _model_config(file: GgufFile, known: GgufArchitecture, dtype: str) -> dict[str, Any]:
    name = file.architecture
    heads, kv_heads = _head_counts(file)
    hidden = file.size(f"{name}.embedding_length")
    vocabulary, *width = file.tensors["token_embd.weight"].shape
    if width != [hidden]:
        sizes = " x ".join(map(str, width)) or "no"
        raise ModelError(
            f"{file.path} has embeddings of {sizes} numbers, but an embedding_length of {hidden}; download it again"
        )
    config: dict[str, Any] = {
        "model_type": known.model_type,
        "hidden_size": hidden,
        "intermediate_size": file.size(f"{name}.feed_forward_length"),
        "num_hidden_layers": file.size(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": file.size(f"{name}.attention.key_length", hidden // heads),
        "rms_norm_eps": file.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.number(f"{name}.rope.freq_base", 10_000.0),
        "max_position_embeddings": file.size(f"{name}.context_length"),
        "vocab_size": vocabulary,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
        "torch_dtype": dtype,
        **known.settings,
    }
    scaling = _rope_scaling(file, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config | _architecture_config(file, config)


def _architecture_config(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that only this architecture has."""
    name, head = file.architecture, config["head_dim"]
    if name in ("llama", "mistral", "smollm3", "granite"):
        biased = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
        has_bias = {key: tensor in file.tensors for key, tensor in biased.items()}
        multipliers = _GRANITE_MULTIPLIERS if name == "granite" else {}
        return has_bias | {key: file.number(f"granite.{scale}") for key, scale in multipliers.items()}
    if name == "qwen3moe":
        return {
            "num_experts": file.size("qwen3moe.expert_count"),
            "num_experts_per_tok": file.size("qwen3moe.expert_used_count"),
            "moe_intermediate_size": file.size("qwen3moe.expert_feed_forward_length"),
        }
    if name == "olmo2" and "olmo2.attention.sliding_window" in file.metadata:
        window = file.size("olmo2.attention.sliding_window")
        return {"model_type": "olmo3", "sliding_window": window}
    if name in ("gemma2", "gemma3"):
        is_27b = config["num_hidden_layers"] == (46 if name == "gemma2" else 62)
        scalar = {"query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if is_27b else head}
        if name == "gemma2":
            caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
            return scalar | {key: file.number(f"gemma2.{key}", usual) for key, usual in caps.items()}
        return scalar | {
            "rope_local_base_freq": file.number("gemma3.rope.freq_base_swa", 10_000.0),
            "sliding_window": file.size("gemma3.attention.sliding_window"),
            "sliding_window_pattern": 6,
        }
    if name == "phi3":
        rotated = file.size("phi3.rope.dimension_count", head)
        original = file.size("phi3.rope.scaling.original_context_length", config["max_position_embeddings"])
        return {"partial_rotary_factor": rotated / head, "original_max_position_embeddings": original}
    return {}


def _rope_scaling(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any] | None:
    rope = f"{file.architecture}.rope"
    if "rope_factors_long.weight" in file.tensors:  # the lengths of the context give its factor of attention
        parts = {
            f"{length}_factor": [float(str(factor)) for factor in _read_floats(file, f"rope_factors_{length}.weight")]
            for length in ("long", "short")
        }
        original = file.size(f"{rope}.scaling.original_context_length")
        return {"type": "longrope", "rope_type": "longrope", "original_max_position_embeddings": original, **parts}
    kind = file.text(f"{rope}.scaling.type", "linear")
    factor = file.number(f"{rope}.scaling.factor", file.number(f"{rope}.scale_linear", 1.0))  # an older name
    own = 1 + 0.1 * math.log(factor) if kind == "yarn" and factor > 1 else 1.0  # YaRN's, which older files repeat
    if not np.isclose(file.number(f"{rope}.scaling.attn_factor", 1.0), (1.0, own), rtol=1e-4).any():
        raise ModelError(f"{file.path} scales attention ({rope}.scaling.attn_factor); use another file of this model")
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, config)
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(f"{file.path} scales positions with {kind!r}; expected none, linear, yarn or longrope")
    if kind == "none" or factor in (0.0, 1.0):
        return None
    scaling: dict[str, Any] = {"type": kind, "rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = file.size(f"{rope}.scaling.original_context_length")
    return scaling


def _llama3_scaling(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Llama 3's scaling, stored as the factor of each frequency; the greatest is the `factor` of its config."""
    factors = _read_floats(file, "rope_freqs.weight")
    scaling = {
        "type": "llama3",
        "rope_type": "llama3",
        "factor": float(str(factors.max())),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    pairs = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    turns = 8192 / (2 * math.pi * config["rope_theta"] ** pairs)
    smooth = np.clip((turns - 1) / 3, 0, 1)
    expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError(f"{file.path} scales positions unlike Llama 3 (rope_freqs); choose another file of this model")
    return scaling


def _read_floats(file: GgufFile, name: str) -> NDArray[np.float32]:
    if name not in file.tensors or file.tensors[name].kind != "F32":
        raise ModelError(f"{file.path} has no tensor {name} in float32; download it again")
    floats: NDArray[np.float32] = file.read_tensor_bytes(name).reshape(-1).view("<f4")
    return floats


def _quantization_config(bits: Mapping[str, int]) -> dict[str, Any]:
    if not bits:
        return {}
    (most, _) = Counter(bits.values()).most_common(1)[0]
    others = {
        name.removesuffix(".weight"): {"group_size": GROUP_SIZE, "bits": b} for name, b in bits.items() if b != most
    }
    settings = {"group_size": GROUP_SIZE, "bits": most, "mode": "affine", **others}
    return {"quantization": settings, "quantization_config": settings}


def _group_shards(tensors: Iterator[tuple[str, NDArray[Any]]]) -> Iterator[dict[str, NDArray[Any]]]:
    """Yields the tensors of each file."""
    shard: dict[str, NDArray[Any]] = {}
    shard_bytes = 0
    for name, tensor in tensors:
        if shard and shard_bytes + tensor.nbytes > MAX_SHARD_BYTES:
            yield shard
            shard, shard_bytes = {}, 0
        shard[name] = tensor
        shard_bytes += tensor.nbytes
    yield shard


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=1, ensure_ascii=False), encoding="utf-8")
