"""Writes random models of any of mlx-lm's types in Hugging Face layout, to test types without real weights.

The weights are drawn so that the logits depend on the whole text, and an error of one token or position is visible.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_EOS = "<|endoftext|>"
_GAIN, _HEAD_GAIN = 1.5, 4.0


def write_model(path: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Writes a model of this configuration to `path`, without a tokenizer. The same arguments give the same weights."""
    from mlx_lm.utils import _get_classes  # takes a second, which writing a tokenizer does not need

    model_class, args_class = _get_classes(config)
    mx.random.seed(seed)  # a recurrent layer draws its decay when it is made
    model = model_class(args_class.from_dict(config))
    rng = np.random.default_rng(seed)
    weights = {name: _random_weight(name, value, rng) for name, value in tree_flatten(model.parameters())}
    model.update(tree_unflatten(list(weights.items())))
    path.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return path


def write_tokenizer(path: Path) -> None:
    """Writes a byte-level tokenizer without merges: any text round-trips, one token per UTF-8 byte."""
    symbols = [_EOS, "<|pad|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in symbols[:2]])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _EOS,
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _random_weight(name: str, value: mx.array, rng: np.random.Generator) -> mx.array:
    normal = rng.standard_normal(value.shape).astype(np.float32)
    if not mx.issubdtype(value.dtype, mx.floating):
        return value
    if value.ndim < 2 or min(value.shape) == 1:  # gains, biases and decays stay near their initial values
        return (value + 0.1 * mx.array(normal)).astype(value.dtype)
    fan_in = value.shape[1] if "conv" in name else value.shape[-1]
    gain = _HEAD_GAIN if "head" in name else _GAIN
    weight: mx.array = (mx.array(normal) * gain * fan_in**-0.5).astype(value.dtype)
    return weight
