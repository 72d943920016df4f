"""A tiny target, and quick, deterministic training of heads for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.training.heads.recipe import HeadRecipe
from models.training.recipe import Shape

TINY = Shape(hidden=64, layers=4, heads=4, kv_heads=2, mlp=96, vocab=300, context=64)


def recipe(kind: str, **other: Any) -> HeadRecipe:
    settings = {"text_tokens": 2048, "tokens": 5_120, "length": 32, "batch_tokens": 256, "part": 32, "top": 16}
    settings |= {"held_out_files": 4}
    return HeadRecipe(kind, **{**settings, **other})


def write_target(folder: Path) -> Path:
    """Writes a target whose text can be learned: large weights make its distributions sharp."""
    import torch

    from models.training import tokenizer
    from models.training.export import write_model
    from models.training.llama import Llama

    model = Llama(TINY, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4).copy_(parameter.bfloat16().float())  # as it will be read
    text = ["def f(a, b):\n    return a + b\n\n\nclass A:\n    x = 1\n" * 20]
    write_model(folder, model, tokenizer.train(text, 257))
    return folder
