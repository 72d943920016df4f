"""The models that the converter accepts, and the functions of a package with their inputs.

Slots are entries of the cache, rows are the tokens of one call; the host keeps the cache and assigns slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from outrider.protocol.errors import ModelError

FAMILIES = ("llama", "qwen2", "qwen3")
AXIS_ALIGNMENT = 32  # the Neural Engine pads the last axis to a multiple of this
MAX_WIDTH = 16384  # the widest axis that every Neural Engine supports
PREFILL_ROWS = 64
SCRATCH_SLOTS = 128  # slots beyond the context, for drafted tokens
DEFAULT_CONTEXT = 1024
MAX_CONTEXT_LENGTH = MAX_WIDTH - SCRATCH_SLOTS - PREFILL_ROWS  # the width of the mask is that of slots and rows
WEIGHT_FORMATS = ("fp16", "int8", "fp32")

TRIAL_PROMPT_TOKENS, TRIAL_ROWS, TRIAL_STEPS = 16, 8, 12
"""The tokens of `trial_text` that a trial reads by the prefill, then in one call, then one at a time."""


@dataclass(frozen=True, slots=True)
class DecoderArchitecture:
    """The sizes of a dense decoder of one of FAMILIES. `max_positions`: at most those that a package can have."""

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
    def head_chunks(self) -> list[int]:
        """The rows of the output head in each chunk, at most MAX_WIDTH."""
        full, rest = divmod(self.vocab_size, MAX_WIDTH)
        return [MAX_WIDTH] * full + [rest] * (rest > 0)


def read_architecture(config: Mapping[str, Any]) -> DecoderArchitecture:
    """Returns the architecture that config.json describes.

    Raises:
        ModelError: the family is not one of FAMILIES, or the Neural Engine does not support a size.
    """
    family = str(config.get("model_type", "none"))
    if family not in FAMILIES:
        raise ModelError(
            f"the coreml drafter can't convert a {family!r} model; expected model_type {', '.join(FAMILIES)}"
            " (use --draft-backend mlx for this one)"
        )
    _refuse_variants(family, config)
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        head_dim = None if family == "qwen2" else config.get("head_dim")
        architecture = DecoderArchitecture(
            family=family,
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(head_dim or hidden // heads),
            vocab_size=int(config["vocab_size"]),
            norm_eps=float(config["rms_norm_eps"]),
            tied=bool(config.get("tie_word_embeddings", family != "qwen3")),
            max_positions=min(int(config.get("max_position_embeddings") or MAX_CONTEXT_LENGTH), MAX_CONTEXT_LENGTH),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"config.json of this {family} model is incomplete ({error!r}); expected mlx-lm's keys"
        ) from error
    _check_sizes(architecture)
    return architecture


def _refuse_variants(family: str, config: Mapping[str, Any]) -> None:
    if "draft_vocab_size" in config:
        raise ModelError(
            f"this {family} model has fewer output tokens than input tokens (draft_vocab_size), which the coreml graph"
            " can't map (use --draft-backend mlx for this one)"
        )
    sliding = [kind for kind in config.get("layer_types") or () if kind != "full_attention"]
    if family == "llama" and sliding:
        raise ModelError(
            f"this llama model has {sliding[0]} layers; the coreml graph attends to the whole context in every layer"
            " (use --draft-backend mlx for this one)"
        )


def _check_sizes(sizes: DecoderArchitecture) -> None:
    if sizes.heads % sizes.kv_heads:
        raise ModelError(f"{sizes.heads} query heads can't share {sizes.kv_heads} key/value heads evenly")
    if sizes.head_dim % AXIS_ALIGNMENT:
        raise ModelError(
            f"the head size is {sizes.head_dim}; the Neural Engine needs a multiple of {AXIS_ALIGNMENT}"
            " (use --draft-backend mlx for this one)"
        )
    widest = max(sizes.hidden, sizes.intermediate, sizes.heads * sizes.head_dim)
    if widest > MAX_WIDTH:
        raise ModelError(
            f"a layer is {widest} wide, but the Neural Engine takes at most {MAX_WIDTH}; choose a smaller draft model"
        )


@dataclass(frozen=True, slots=True)
class PackageFunction:
    """One function of a package: `rows` tokens at once. Without `logits` it only fills the cache (the prefill)."""

    name: str
    rows: int
    logits: bool


def trial_text(vocab_size: int) -> list[int]:
    """Returns the random tokens that a trial reads."""
    length = TRIAL_PROMPT_TOKENS + TRIAL_ROWS + TRIAL_STEPS
    return [int(token) for token in np.random.default_rng(0).integers(0, vocab_size, length)]


@dataclass(frozen=True, slots=True)
class PackageLayout:
    """A package's sizes, functions and inputs, for both the converter and the host. `context` in positions; `weights`
    is one of `WEIGHT_FORMATS`.

    `functions`: those of every package. `largest`: the one with logits that takes the most rows; `prefill`: the one
    without logits.
    """

    functions: ClassVar[tuple[PackageFunction, ...]] = (
        *(PackageFunction(f"q{rows}", rows, True) for rows in (1, 8, 16, 32)),
        PackageFunction(f"prefill{PREFILL_ROWS}", PREFILL_ROWS, False),
    )
    largest, prefill = functions[-2:]

    architecture: DecoderArchitecture
    weights: str
    context: int

    @property
    def slots(self) -> int:
        """The slots of the cache: for the context and for drafted tokens, on the Neural Engine's grid."""
        return -(-(self.context + SCRATCH_SLOTS) // AXIS_ALIGNMENT) * AXIS_ALIGNMENT

    @property
    def cache_shape(self) -> tuple[int, int, int, int]:
        """The shape of a request's keys, and of its values, in all layers."""
        return (self.architecture.layers, self.architecture.kv_heads, self.slots, self.architecture.head_dim)

    def inputs(self, function: PackageFunction) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the inputs by name; all are of the package's float type."""
        sizes, rows = self.architecture, function.rows
        return {
            "x": (1, sizes.hidden, 1, rows),
            "cos": (1, 1, rows, sizes.head_dim),
            "sin": (1, 1, rows, sizes.head_dim),
            "mask": (1, 1, rows, self.slots + rows),
            "k_past": self.cache_shape,
            "v_past": self.cache_shape,
        }

    def function_for(self, rows: int) -> PackageFunction:
        """Returns the smallest function that takes `rows` rows; above the rows of `largest` that is the prefill."""
        return next(function for function in self.functions if function.rows >= rows)
