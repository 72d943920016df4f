"""Another model has another digest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.protocol.digest import digest, fits
from outrider.protocol.errors import ModelError


def test_other_weights_have_another_digest(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    found = {digest(tiny_model("llama", seed)) for seed in (0, 1)} | {digest(tiny_model("llama", rope_theta=5000.0))}
    assert len(found) == 3
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ModelError, match="is not a safetensors file"):
        digest(tmp_path)
    with pytest.raises(ModelError, match=r"has no readable config\.json"):
        digest(tmp_path / "nowhere")


def test_digest_without_weights_matches_by_configuration() -> None:
    assert fits("ab-cd", "ab-cd") and fits("ab-", "ab-cd") and fits("ab-cd", "ab-")
    assert not fits("ab-cd", "ab-ce") and not fits("ab-", "ac-cd") and not fits("ab-cd", "")
