"""A small random model that writes ASCII with the tiny pair's tokenizer, at a tenth of the tiny pair's cost."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlx.core as mx
from tokenizers import Tokenizer

from outrider.orchestrator.pairing.model_files import TINY_TARGET
from tests.tiny import write_model

VOCAB_SIZE = 4096
HEAD = "lm_head.weight"


def write_plain(path: Path, noise: float = 0.0) -> Path:
    """Writes the model to `path`; with a little `noise`, a draft that often agrees with it.

    It generates EOS, and tokens that are no ASCII text by themselves, only if a grammar allows nothing else.
    """
    config = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 1, "tie_word_embeddings": False}
    write_model(path, "llama", noise=noise, **config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_TARGET / name, path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    plain = mx.array([bool(text := tokenizer.decode([token])) and text.isascii() for token in range(VOCAB_SIZE)])
    weights = mx.load(str(path / "model.safetensors"))
    assert isinstance(weights, dict)
    weights[HEAD] = weights[HEAD] * plain[:, None]
    mx.eval(weights)
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    return path
