"""The models that the converter accepts, and the inputs and outputs of a package's functions.

Slots are entries of the cache, rows are the tokens of one call; the host assigns slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

import numpy as np

from outrider.protocol.errors import InvalidRequest, ModelError

FAMILIES = ("llama", "qwen2", "qwen3")
AXIS_ALIGNMENT = 32  # the Neural Engine pads a cache's last axis to a multiple of this, and rejects other states
MAX_WIDTH = 16384  # the widest axis that every Neural Engine supports
PREFILL_ROWS = 64
SCRATCH_SLOTS = 128  # slots beyond the context, for drafted tokens
DEFAULT_CONTEXT = 1024
MAX_CONTEXT_LENGTH = MAX_WIDTH - SCRATCH_SLOTS - PREFILL_ROWS  # the width of the mask is that of slots and rows
WEIGHT_FORMATS = ("fp16", "int8", "int4", "fp32")

TRIAL_PROMPT_TOKENS, TRIAL_ROWS, TRIAL_STEPS = 16, 8, 12
"""The tokens of `trial_text` that a trial reads by the prefill, then in one call, then one at a time."""


@dataclass(frozen=True, slots=True)
class DecoderArchitecture:
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
            max_positions=int(config.get("max_position_embeddings") or 2**31 - 1),
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


class Mode(StrEnum):
    """The owner of the cache.

    STATELESS: the host, which passes it in and gets the new rows back (the Neural Engine accepts this most often).
    HYBRID: one state for each layer and tensor; a call writes one run of slots.
    ONEHOT: two states, written at any slots by a matrix of ones, without integers.
    """

    STATELESS = "stateless"
    HYBRID = "hybrid"
    ONEHOT = "onehot"

    @property
    def stateful(self) -> bool:
        return self is not Mode.STATELESS


@dataclass(frozen=True, slots=True)
class Options:
    """A user's choice of the form of a package: see `Mode`; `weights` is one of `WEIGHT_FORMATS`, `context` in tokens.

    Raises:
        InvalidRequest: a value is invalid, or two exclude each other.
    """

    mode: Mode = Mode.STATELESS
    weights: str = "fp16"
    context: int = DEFAULT_CONTEXT

    def __post_init__(self) -> None:
        if self.weights not in WEIGHT_FORMATS:
            raise InvalidRequest(f"weights is {self.weights!r}; expected one of {', '.join(WEIGHT_FORMATS)}")
        if not PREFILL_ROWS <= self.context <= MAX_CONTEXT_LENGTH:
            raise InvalidRequest(f"context is {self.context}; expected {PREFILL_ROWS} to {MAX_CONTEXT_LENGTH} tokens")
        if self.weights == "fp32" and self.mode.stateful:
            raise InvalidRequest("Core ML keeps states in float16 only; weights fp32 need --mode stateless")

    def __str__(self) -> str:
        return f"{self.mode.value} {self.weights}"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A named input, output or state; `integer` is int32, otherwise the package's float type."""

    name: str
    shape: tuple[int, ...]
    integer: bool = False


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
    """A package's sizes, and the names, shapes and types of inputs, states and outputs, for both the converter and the
    host. `context` in positions; `weights` is one of `WEIGHT_FORMATS`.

    `functions`: those of every package. `largest`: the one with logits that takes the most rows; `prefill`: the one
    without logits.
    """

    functions: ClassVar[tuple[PackageFunction, ...]] = (
        *(PackageFunction(f"q{rows}", rows, True) for rows in (1, 8, 16, 32)),
        PackageFunction(f"prefill{PREFILL_ROWS}", PREFILL_ROWS, False),
    )
    largest, prefill = functions[-2:]

    architecture: DecoderArchitecture
    mode: Mode
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

    def inputs(self, function: PackageFunction) -> tuple[TensorSpec, ...]:
        sizes, rows = self.architecture, function.rows
        common = (
            TensorSpec("x", (1, sizes.hidden, 1, rows)),
            TensorSpec("cos", (1, 1, rows, sizes.head_dim)),
            TensorSpec("sin", (1, 1, rows, sizes.head_dim)),
            TensorSpec("mask", (1, 1, rows, self.slots + rows)),
        )
        match self.mode:
            case Mode.STATELESS:
                return (*common, TensorSpec("k_past", self.cache_shape), TensorSpec("v_past", self.cache_shape))
            case Mode.HYBRID:
                return (*common, TensorSpec("pos", (1,), integer=True))
            case Mode.ONEHOT:
                return (*common, TensorSpec("write", (1, 1, self.slots, rows)))

    def states(self) -> tuple[TensorSpec, ...]:
        layers, *one = self.cache_shape
        match self.mode:
            case Mode.STATELESS:
                return ()
            case Mode.HYBRID:
                return tuple(TensorSpec(f"{kind}_state_{layer}", (1, *one)) for layer in range(layers) for kind in "kv")
            case Mode.ONEHOT:
                return (TensorSpec("k_state", self.cache_shape), TensorSpec("v_state", self.cache_shape))

    def outputs(self, function: PackageFunction) -> tuple[TensorSpec, ...]:
        """Returns the outputs. `k_new` and `v_new` come first if the host needs them (no state, or a prefill)."""
        sizes, rows = self.architecture, function.rows
        fresh = (sizes.layers, sizes.kv_heads, rows, sizes.head_dim)
        outputs: tuple[TensorSpec, ...] = ()
        if not self.mode.stateful or not function.logits:
            outputs = (TensorSpec("k_new", fresh), TensorSpec("v_new", fresh))
        if function.logits:
            chunks = enumerate(sizes.head_chunks)
            outputs += tuple(TensorSpec(f"logits_{index}", (1, count, 1, rows)) for index, count in chunks)
        return outputs

    def function_for(self, rows: int) -> PackageFunction:
        """Returns the smallest function that takes `rows` rows; above the rows of `largest` that is the prefill."""
        return next(function for function in self.functions if function.rows >= rows)
