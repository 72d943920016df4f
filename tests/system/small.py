"""The tiny models of the system's tests, small enough for hundreds of complete requests."""

from __future__ import annotations

from typing import Any

# A small vocabulary: pairs of tokens come back, so that n-grams propose, and 16 branches span many outcomes.
SMALL: dict[str, Any] = {
    "seed": 1,
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}
LOOPING: dict[str, Any] = {"seed": 0}
"""Greedy text that soon goes in circles; SMALL's seldom repeats itself."""
TOY: dict[str, Any] = {
    "vocab_size": 5,
    "scale": 1.0,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
}
"""Few enough texts to compute the probability of each, and none of them certain."""
# How far a draft's weights are from the target's: equal, often agreeing, a stranger.
NOISES = {"self": 0.0, "model": 0.04, "random": 1.0}
