"""The recipes: the tiny shapes, the share of long windows, and settings out of range."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models.training.recipe import PRESETS, Phase, Shape, preset
from outrider.protocol.errors import InvalidRequest

MODELS = Path(__file__).resolve().parents[2] / "models"


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_tiny_preset_has_the_shapes_of_the_tiny_pair(role: str) -> None:
    config = json.loads((MODELS / role / "config.json").read_text())
    assert getattr(PRESETS["tiny"], role) == Shape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        mlp=config["intermediate_size"],
        vocab=config["vocab_size"],
        context=config["max_position_embeddings"],
    )


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_model_ends_its_training_at_full_context(name: str) -> None:
    recipe = preset(name)
    assert recipe.target_phases[-1].length == recipe.target.context
    assert recipe.draft_phases[-1].length == recipe.draft.context
    assert recipe.teacher_top < recipe.target.vocab


def test_requested_tokens_are_divided_among_the_phases() -> None:
    recipe = preset("tiny", target_tokens=1_000_000, draft_tokens=2_000_000)
    assert sum(phase.tokens for phase in recipe.target_phases) == 1_000_000
    assert sum(phase.tokens for phase in recipe.draft_phases) == 2_000_000


def test_a_phase_counts_whole_batches() -> None:
    phase = Phase(tokens=10_000, length=256, rate=1e-3)
    assert phase.windows(1024) == 4
    assert phase.steps(1024) == 9


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"seed": -1}, "seed"),
        ({"batch_tokens": 100}, "batch"),
        ({"target_tokens": 0}, "target"),
        ({"draft_tokens": -5}, "draft"),
    ],
)
def test_a_setting_out_of_range_is_named(settings: dict[str, int], word: str) -> None:
    with pytest.raises(InvalidRequest, match=word):
        preset("tiny", **settings)  # type: ignore[arg-type]


def test_unknown_preset_is_refused_with_the_known_names() -> None:
    with pytest.raises(InvalidRequest, match="tiny, toy"):
        preset("huge")
