"""DFlash (arXiv 2602.06036): a block of masks over the target's fused rows, all of whose tokens are drafted at once.

The forward of z-lab's heads and those that grew out of them, for their differences are switches: DSpark's Markov head
and confidence, DFlash2's convolutions and selector. Names of weights are z-lab's. A layer's keys and values are those
of the features, projected, and of the block's own rows; features know no layer below, so they are written once. Knows
no files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from outrider.drafting.heads.convolution import BlockConvolution
from outrider.drafting.heads.layers import Attention, Mlp
from outrider.drafting.heads.links import Confidence, Confident, Link, Markov, Selector
from outrider.drafting.heads.vocabulary import DraftVocabulary
from outrider.engine.flat import FlatCache
from outrider.engine.taps import TapPoints

Layer = Callable[[mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Sizes and switches. `taps`: layers' outputs. `depth`: the most tokens that a block drafts.

    `from_anchor`: the last token's own row drafts the first. `windows`: what each layer sees, None for everything.
    `sees_prefixes`: it was trained with more than a block's first token known.
    `own_output`: it has an output layer of its own, over its own tokens. `multiplier`, `softcap`: what becomes of
    vectors before the output layer, and of logits behind it.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    taps: tuple[int, ...]
    windows: tuple[int | None, ...]
    mask_token: int
    depth: int
    from_anchor: bool = False
    sees_prefixes: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    context_length: int = 2048
    qk_norm: bool = True
    attention_bias: bool = False
    own_output: bool = False
    multiplier: float = 1.0
    softcap: float = 0.0
    markov: str = ""
    markov_rank: int = 0
    confidence: bool = False
    confidence_with_markov: bool = False
    conv_taps: int = 0
    conv_group: int = 16
    selector_rank: int = 0


class Block(nn.Module):  # type: ignore[misc]
    """A layer: attention and MLP, each between the halves of a convolution where there are any."""

    def __init__(self, config: DFlashConfig, window: int | None) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self._window = window
        self.self_attn = Attention(config, size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = Mlp(size, config.intermediate_size)
        if config.conv_taps:
            self.attention_conv = BlockConvolution(size, config.conv_taps, config.conv_group)
            self.mlp_conv = BlockConvolution(size, config.conv_taps, config.conv_group)

    def __call__(self, x: mx.array, places: mx.array, cache: FlatCache) -> mx.array:
        mask = cache.make_mask(x.shape[1], window_size=self._window)
        attend: Layer = lambda seen: self.self_attn(seen, mask, cache)  # noqa: E731
        x = x + self._between("attention_conv", attend, self.input_layernorm(x), places)
        return x + self._between("mlp_conv", self.mlp, self.post_attention_layernorm(x), places)

    def _between(self, name: str, inner: Layer, x: mx.array, places: mx.array) -> mx.array:
        around: mx.array = self[name](inner, x, places) if name in self else inner(x)
        return around


class DFlash(nn.Module):  # type: ignore[misc]
    """A `BlockHead`. `embed`, `output`: the target's own."""

    def __init__(self, config: DFlashConfig, embed: Layer, output: Layer, vocabulary: DraftVocabulary) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self._config, self._embed, self._output = config, embed, output
        self._vocabulary = vocabulary
        self.fc = nn.Linear(len(config.taps) * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.layers = [Block(config, window) for window in config.windows]
        self.norm = nn.RMSNorm(size, eps=eps)
        if config.own_output:
            self.lm_head = nn.Linear(size, vocabulary.known, bias=False)
        if config.markov_rank:
            self.markov_head = Markov(config.markov, config.markov_rank, size, vocabulary)
        if config.confidence:
            self.confidence_head = Confidence(size, config.confidence_with_markov * config.markov_rank)
        if config.selector_rank:
            self.candidate_selector = Selector(config.selector_rank, size, vocabulary.size)

    @property
    def points(self) -> TapPoints:
        return TapPoints(self._config.taps)

    @property
    def context_length(self) -> int:
        return self._config.context_length

    @property
    def weight_bytes(self) -> int:
        return sum(value.nbytes for _, value in tree_flatten(self.parameters()))

    @property
    def reach(self) -> int | None:
        return None

    @property
    def bytes_per_pair(self) -> int:
        config = self._config
        numbers = 2 * len(config.windows) * config.num_key_value_heads * config.head_dim
        return numbers * int(self.fc.weight.dtype.size)

    @property
    def depth(self) -> int:
        return self._config.depth

    @property
    def mask_token(self) -> int:
        return self._config.mask_token

    @property
    def from_anchor(self) -> bool:
        return self._config.from_anchor

    @property
    def sees_prefixes(self) -> bool:
        return self._config.sees_prefixes

    @property
    def link(self) -> Link | None:
        if "confidence_head" in self and "markov_head" in self:
            return Confident(self.markov_head, self.confidence_head, self._config.confidence_with_markov)
        found: Link | None = self.get("candidate_selector", self.get("markov_head"))
        return found

    def fuse(self, rows: mx.array) -> mx.array:
        fused: mx.array = self.hidden_norm(self.fc(rows.astype(self.fc.weight.dtype)))
        return fused

    def read(self, features: mx.array, caches: list[FlatCache]) -> None:
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.self_attn.read(features, cache)

    def block(self, tokens: mx.array, places: mx.array, caches: list[FlatCache]) -> mx.array:
        x = self._embed(tokens).astype(self.fc.weight.dtype)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, places, cache)
        normed: mx.array = self.norm(x)
        return normed

    def logits(self, hidden: mx.array) -> mx.array:
        config = self._config
        output = self.lm_head if "lm_head" in self else self._output
        found = output(hidden * config.multiplier if config.multiplier != 1 else hidden).astype(mx.float32)
        if config.softcap:
            found = mx.tanh(found / config.softcap) * config.softcap
        return self._vocabulary.spread(found)
