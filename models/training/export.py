"""Writes models as Hugging Face folders that plain `mlx_lm.load` opens: float16 weights, config, tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import Tokenizer

from models.training.llama import Llama
from models.training.recipe import Shape
from models.training.storage import write_json
from models.training.tokenizer import END_OF_TEXT


def write_model(folder: Path, model: Llama, tokenizer: Tokenizer) -> None:
    """Writes config.json, model.safetensors, tokenizer.json and tokenizer_config.json into the new `folder`."""
    folder.mkdir(parents=True)
    weights = {
        f"model.{name}": tensor.detach().to("cpu", torch.float16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    (folder / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))
    write_json(folder / "config.json", {**llama_config(model.shape), "bos_token_id": 0, "eos_token_id": 0})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "model_max_length": model.shape.context,
            "clean_up_tokenization_spaces": False,
        },
    )


def llama_config(shape: Shape) -> dict[str, Any]:
    """Returns the fields of config.json for a model of this shape in float16."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.mlp,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.norm_epsilon,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "rope_theta": shape.rope_base,
        "max_position_embeddings": shape.context,
        "torch_dtype": "float16",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
