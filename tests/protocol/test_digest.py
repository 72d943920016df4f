"""Another model has another digest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.protocol.digest import digests_match, model_digest
from outrider.protocol.errors import ModelError


def test_other_weights_have_another_digest(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    found = {model_digest(tiny_model("llama", seed)) for seed in (0, 1)} | {
        model_digest(tiny_model("llama", rope_theta=5000.0))
    }
    assert len(found) == 3
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ModelError, match="is not a safetensors file"):
        model_digest(tmp_path)
    with pytest.raises(ModelError, match=r"has no readable config\.json"):
        model_digest(tmp_path / "nowhere")


def test_digest_without_weights_matches_by_configuration() -> None:
    assert digests_match("ab-cd", "ab-cd") and digests_match("ab-", "ab-cd") and digests_match("ab-cd", "ab-")
    assert not digests_match("ab-cd", "ab-ce") and not digests_match("ab-", "ac-cd") and not digests_match("ab-cd", "")
