"""Which models the converter knows, read from config.json and refused by name where the graph would not fit.

Knows the Neural Engine's grid; knows nothing of weights or of MLX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.protocol.errors import ModelError

FAMILIES = ("llama", "qwen2", "qwen3")
HEAD_GRID = 32  # the Neural Engine pads the last axis of a cache to this, and rejects states that are off it
MAX_WIDTH = 16384  # the widest axis every Neural Engine takes


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes of a dense decoder of one of FAMILIES."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    tied: bool
    max_positions: int

    @property
    def groups(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def normed_heads(self) -> bool:
        """True when queries and keys are normed before the rotation."""
        return self.family == "qwen3"

    @property
    def head_chunks(self) -> list[int]:
        """How many rows of the output head each chunk has; none is wider than MAX_WIDTH."""
        full, rest = divmod(self.vocab_size, MAX_WIDTH)
        return [MAX_WIDTH] * full + [rest] * (rest > 0)


def read(config: Mapping[str, Any]) -> Architecture:
    """The architecture that config.json describes.

    Raises:
        ModelError: the family is not one of FAMILIES, or a size is off what the Neural Engine takes.
    """
    family = str(config.get("model_type", "none"))
    if family not in FAMILIES:
        raise ModelError(
            f"the coreml drafter can't convert a {family!r} model; expected model_type {', '.join(FAMILIES)}"
            " (use --draft-backend mlx for this one)"
        )
    _refuse_variants(family, config)
    try:
        heads = int(config["num_attention_heads"])
        architecture = Architecture(
            family=family,
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            intermediate=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=_head_dim(family, config, heads),
            vocab_size=int(config["vocab_size"]),
            norm_eps=float(config["rms_norm_eps"]),
            tied=bool(config.get("tie_word_embeddings", family != "qwen3")),
            max_positions=int(config.get("max_position_embeddings") or 2**31 - 1),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"config.json of this {family} model is incomplete ({error!r}); expected mlx-lm's keys"
        ) from error
    _check_grid(architecture)
    return architecture


def _head_dim(family: str, config: Mapping[str, Any], heads: int) -> int:
    derived = int(config["hidden_size"]) // heads
    return derived if family == "qwen2" else int(config.get("head_dim") or derived)


def _refuse_variants(family: str, config: Mapping[str, Any]) -> None:
    if config.get("rope_traditional"):
        raise ModelError(
            f"this {family} model has rope_traditional, which rotates neighbouring pairs; the coreml graph rotates"
            " halves (use --draft-backend mlx for this one)"
        )
    sliding = [kind for kind in config.get("layer_types") or () if kind != "full_attention"]
    if family == "llama" and sliding:
        raise ModelError(
            f"this llama model has {sliding[0]} layers; the coreml graph attends to the whole context in every layer"
            " (use --draft-backend mlx for this one)"
        )


def _check_grid(sizes: Architecture) -> None:
    if sizes.heads % sizes.kv_heads:
        raise ModelError(f"{sizes.heads} query heads can't share {sizes.kv_heads} key/value heads evenly")
    if sizes.head_dim % HEAD_GRID:
        raise ModelError(
            f"the head size is {sizes.head_dim}, off the Neural Engine's grid; expected a multiple of {HEAD_GRID}"
            " (use --draft-backend mlx for this one)"
        )
    widest = max(sizes.hidden, sizes.intermediate, sizes.heads * sizes.head_dim)
    if widest > MAX_WIDTH:
        raise ModelError(
            f"a layer is {widest} wide and the Neural Engine takes {MAX_WIDTH}; a draft model should be far smaller"
        )
