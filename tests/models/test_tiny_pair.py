"""The tiny pair as it ships: small enough, one vocabulary, float16, and plain `mlx_lm.load` opens both."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

MODELS = Path(__file__).resolve().parents[2] / "models"
ROLES = ("target", "draft")


def test_tiny_pair_stays_under_48_megabytes() -> None:
    files = [path for role in ROLES for path in (MODELS / role).iterdir()]
    assert sum(path.stat().st_size for path in files) < 48_000_000


def test_target_and_draft_have_the_same_tokenizer() -> None:
    target, draft = ((MODELS / role / "tokenizer.json").read_bytes() for role in ROLES)
    assert target == draft


@pytest.mark.parametrize("role", ROLES)
def test_the_weights_are_dense_float16_and_finite(role: str) -> None:
    weights = mx.load(str(MODELS / role / "model.safetensors"))
    assert {weight.dtype for weight in weights.values()} == {mx.float16}
    assert all(mx.isfinite(weight).all().item() for weight in weights.values())


@pytest.mark.parametrize("role", ROLES)
def test_mlx_lm_loads_each_model_and_each_predicts_some_python(role: str) -> None:
    model, tokenizer = mlx_lm.load(str(MODELS / role))
    model.set_dtype(mx.float32)
    tokens = tokenizer.encode("import os\nimport sys\n\n\ndef main():\n    for i in range(")
    best = model(mx.array([tokens]))[0].argmax(axis=-1).tolist()
    hits = sum(guess == token for guess, token in zip(best, tokens[1:], strict=False))
    assert hits / (len(tokens) - 1) > 0.3  # chance is 1 / 4096
    assert tokenizer.decode(tokens[1:]).startswith("import os")
