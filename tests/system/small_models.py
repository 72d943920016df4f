"""Configurations of the tiny models of the system tests, small enough for hundreds of complete requests."""

from __future__ import annotations

from typing import Any

# The vocabulary is small, so that pairs of tokens recur, n-grams draft, and 16 branches cover many outcomes.
SMALL_CONFIG: dict[str, Any] = {
    "seed": 1,
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}
LOOPING_CONFIG: dict[str, Any] = {"seed": 0}
"""Its greedy text soon repeats itself; that of SMALL_CONFIG seldom does."""
TOY_CONFIG: dict[str, Any] = {
    "vocab_size": 5,
    "scale": 1.0,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
}
"""Its vocabulary is so small that the same outcomes recur in most rounds."""
# The noise in a draft's weights: equal to the target, often agreeing with it, unrelated.
DRAFT_NOISE = {"self": 0.0, "model": 0.04, "random": 1.0}
