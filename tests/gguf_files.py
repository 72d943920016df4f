"""Writes tiny GGUF files of every architecture with random weights, by llama.cpp's own Python package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (("h", "e"), ("he", "l"), ("Ġ", "a"), ("l", "l"), ("1", "2"), ("Ċ", "Ċ"))
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES: dict[str, dict[str, int]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head": 128},
    "gemma3": {"head": 256, "blocks": 7},
    "phi3": {"kv_heads": 4},
    "gemma2": {"head": 256},
    "qwen3moe": {"head": 128, "experts": 4},
    "smollm3": {"blocks": 5},
    "granite": {},
    "olmo2": {},
    "olmo3": {"blocks": 5},
}
"""Sizes in which an architecture differs from the defaults, because readers assume a size that the file omits."""
_K_HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Offsets of the half-precision numbers in a block of 256 weights; all other bytes may have any value."""


def write_gguf(
    path: Path,
    architecture: str = "llama",
    kind: str = "F32",
    *,
    seed: int = 0,
    tied: bool = True,
    biased: bool = False,
    pre: str = "smollm",
    metadata: dict[str, Any] | None = None,
    without: str = "",
    tensors: dict[str, Any] | None = None,
) -> Path:
    """Writes a file to `path`, and returns the path.

    `kind`: ggml's name of the matrices' type. `metadata` and `tensors` are added, or replace those with the same name.
    `without`: the name of a key or tensor to leave out.
    """
    wide = kind.endswith("_K")
    size = {"hidden": 256 if wide else 64, "head": 64 if wide else 16, "heads": 4, "kv_heads": 2, "blocks": 2}
    size |= SIZES[architecture]
    made = _tensors(np.random.default_rng(seed), architecture, size, tied, biased) | (tensors or {})
    fields = _description(architecture, size) | _tokenizer(pre) | (metadata or {})
    writer = GGUFWriter(path, _stored_name(architecture))
    for key, value in fields.items():
        if key != without and key != "general.architecture":
            _add(writer, key, value)
    for name, tensor in made.items():
        if name == without:
            continue
        if tensor.ndim < 2 or kind == "F32" or "ffn_gate_inp" in name:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, blocks(tensor, kind, seed), raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def blocks(weights: np.ndarray, kind: str, seed: int = 0) -> np.ndarray:
    """Quantizes `weights`. For K-quants, which no Python package can write, returns random blocks of similar scale."""
    number = GGMLQuantizationType[kind]
    if kind not in _K_HALVES:
        return quantize(weights, number)
    block, width = GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(seed)
    made = rng.integers(0, 256, (*weights.shape[:-1], weights.shape[-1] // block, width), dtype=np.uint8)
    for place in _K_HALVES[kind]:
        halves = rng.uniform(0.0001, 0.0002, made.shape[:-1]).astype(np.float16)
        made[..., place : place + 2] = halves[..., None].view(np.uint8)
    return made.reshape(*weights.shape[:-1], -1)


def _tensors(rng: Any, architecture: str, size: dict[str, int], tied: bool, biased: bool) -> dict[str, np.ndarray]:
    hidden, inner, head = size["hidden"], 2 * size["hidden"], size["head"]
    rows = {"attn_q": size["heads"] * head, "attn_k": size["kv_heads"] * head, "attn_v": size["kv_heads"] * head}
    if architecture == "phi3":
        rows = {"attn_qkv": sum(rows.values()), "ffn_up": 2 * inner}
    elif "experts" not in size:
        rows |= {"ffn_gate": inner, "ffn_up": inner}

    def matrix(height: int, width: int) -> np.ndarray:
        return (rng.normal(size=(height, width)) * 0.3).astype(np.float32)

    def experts(height: int, width: int) -> np.ndarray:
        return np.stack([matrix(height, width) for _ in range(size["experts"])])

    def norm(width: int) -> np.ndarray:
        return (rng.integers(32, 96, width) / 64).astype(np.float32)  # exact in every type used here

    made = {"token_embd.weight": matrix(len(_tokens()), hidden), "output_norm.weight": norm(hidden)}
    if not tied:
        made["output.weight"] = matrix(len(_tokens()), hidden)
    for block in range(size["blocks"]):
        own = {f"{name}.weight": matrix(height, hidden) for name, height in rows.items()}
        own |= {"attn_output.weight": matrix(hidden, size["heads"] * head)}
        if "experts" in size:
            own |= {
                "ffn_gate_inp.weight": matrix(size["experts"], hidden),
                "ffn_down_exps.weight": experts(hidden, inner),
            }
            own |= {f"ffn_{name}_exps.weight": experts(inner, hidden) for name in ("gate", "up")}
        else:
            own |= {"ffn_down.weight": matrix(hidden, inner)}
        if not architecture.startswith("olmo"):
            own |= {"attn_norm.weight": norm(hidden), "ffn_norm.weight": norm(hidden)}
        if architecture in ("qwen3", "qwen3moe", "gemma3"):
            own |= {"attn_q_norm.weight": norm(head), "attn_k_norm.weight": norm(head)}
        if architecture.startswith("olmo"):
            own |= {f"{name}_norm.weight": norm(rows[name]) for name in ("attn_q", "attn_k")}
        if architecture.startswith(("gemma", "olmo")):
            own |= {"post_attention_norm.weight": norm(hidden), "post_ffw_norm.weight": norm(hidden)}
        if architecture == "qwen2" or biased:
            named = [*rows][:3] if architecture == "qwen2" else [*[*rows][:3], "attn_output"]
            own |= {f"{name}.bias": norm(len(own[f"{name}.weight"])) - 1 for name in named}
        made |= {f"blk.{block}.{name}": tensor for name, tensor in own.items()}
    return made


def _description(architecture: str, size: dict[str, int]) -> dict[str, Any]:
    own = {
        "context_length": 512,
        "embedding_length": size["hidden"],
        "block_count": size["blocks"],
        "feed_forward_length": 2 * size["hidden"],
        "attention.head_count": size["heads"],
        "attention.head_count_kv": size["kv_heads"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.key_length": size["head"],
        "attention.value_length": size["head"],
        "rope.dimension_count": size["head"],
        "rope.freq_base": 10000.0,
        "vocab_size": len(_tokens()),
    }
    if architecture in ("gemma3", "olmo3"):
        own["attention.sliding_window"] = 16
    if architecture == "gemma2":
        own |= {"attention.sliding_window": 512, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    if architecture == "granite":
        own |= {"attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 4.0}
    if "experts" in size:
        own |= {"expert_count": size["experts"], "expert_used_count": 2}
        own["expert_feed_forward_length"] = own["feed_forward_length"]
    name = _stored_name(architecture)
    return {"general.name": "tiny", **{f"{name}.{key}": value for key, value in own.items()}}


def _stored_name(architecture: str) -> str:
    return "olmo2" if architecture == "olmo3" else architecture  # readers recognise olmo3 by its sliding window


def _tokens() -> list[str]:
    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *(left + right for left, right in MERGES)]


def _tokenizer(pre: str) -> dict[str, Any]:
    tokens = _tokens()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in MERGES],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
