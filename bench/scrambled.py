"""A draft that knows nothing: a model's own weights, shuffled within each tensor. Reads and writes files; no MLX."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

WEIGHTS = "model.safetensors"


def scrambled(model: Path, folder: Path, seed: int = 0) -> Path:
    """Writes the shuffled model to `folder` and returns it. Norms are kept, so that logits keep their size."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    rng = np.random.default_rng(seed)
    weights = load_file(model / WEIGHTS)
    shuffled = {
        name: value if value.ndim < 2 else rng.permutation(value.ravel()).reshape(value.shape)
        for name, value in sorted(weights.items())
    }
    save_file(shuffled, folder / WEIGHTS, metadata={"format": "mlx"})
    return folder
