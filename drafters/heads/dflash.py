"""DFlash (arXiv 2602.06036): a block of masks over the target's features drafts all its tokens in one forward.

One module serves z-lab's heads and those derived from them; their differences are switches: DSpark's Markov head, and
DFlash2's convolutions (`BlockConvolution`) and selector. DSpark's confidence is not read. Weights have z-lab's names. A
layer's keys and values are those of the projected features and of the block's own rows; features do not depend on the
layer below, so they are written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from outrider.drafters.heads.checkpoint import HeadCheckpoint, HeadTarget, Layer, rename_tensors
from outrider.drafters.heads.head import BlockHead
from outrider.drafters.heads.layers import MLPS, Attention, BlockLink, DraftVocabulary, LayerSizes, Markov, Selector
from outrider.engine.flat import FlatCache
from outrider.protocol.errors import CannotDraft

_SUPPORTED_MODEL_TYPES = ("qwen3", "llama", "dflash", "dspark", "")
_DEFAULT_BLOCK_SIZE = 16


class BlockConvolution(nn.Module):  # type: ignore[misc]
    """Two convolutions, before and after a part of a layer; both kernels are computed from the input of the first."""

    def __init__(self, size: int, taps: int, group: int) -> None:
        """`taps`: the number of rows that a row sees, its own first. `group`: channels that share a kernel's offset."""
        super().__init__()
        self._taps, self._group = taps, group
        self.base_kernel = mx.zeros((2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group), bias=False)

    def __call__(self, inner: Callable[[mx.array], mx.array], x: mx.array, block_positions: mx.array) -> mx.array:
        """Convolves rows [1, T, H], at these `block_positions` [T] in their blocks, before and after `inner`."""
        offsets = self.kernel_projection(x).reshape(x.shape[1], 2, self._taps, -1)
        kernels = self.base_kernel + mx.repeat(offsets, self._group, axis=-1)
        before = _convolve(x, kernels[:, 0], block_positions)
        return _convolve(inner(before), kernels[:, 1], block_positions)


def _convolve(x: mx.array, kernel: mx.array, block_positions: mx.array) -> mx.array:
    """Convolves each row with its kernel [T, taps, H], without rows of other blocks."""
    total = kernel[:, 0] * x
    for back in range(1, kernel.shape[1]):
        earlier = mx.where((block_positions >= back)[:, None], mx.roll(x, back, axis=1), 0)  # type: ignore[call-arg]
        total = total + kernel[:, back] * earlier
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(LayerSizes):
    """Sizes and switches. `taps`: the tapped layers. `depth`: the maximum draft of a block, in tokens.

    `from_anchor`: the last token's own row drafts the first token. `layers`: of each, its window (None: all), and
    whether it is causal: rows of a block see no later ones. `output_multiplier` scales vectors before the output layer,
    `final_logit_softcapping` limits the logits after it. `gated`: the Markov head is.
    """

    taps: tuple[int, ...]
    layers: tuple[tuple[int | None, bool], ...]
    mask_token_id: int
    depth: int
    from_anchor: bool = False
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    markov_rank: int = 0
    gated: bool = False
    conv_kernel_size: int = 0
    conv_group_size: int = 16
    selector_rank: int = 0


class DFlashBlock(nn.Module):  # type: ignore[misc]
    """A layer: attention and MLP, each between the two halves of a convolution if there are any."""

    def __init__(self, config: DFlashConfig, window: int | None, causal: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self._window, self._causal = window, causal
        self.self_attn = Attention(config, size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = MLPS[config.hidden_act](size, config.intermediate_size)
        if taps := config.conv_kernel_size:
            self.attention_conv = BlockConvolution(size, taps, config.conv_group_size)
            self.mlp_conv = BlockConvolution(size, taps, config.conv_group_size)

    def __call__(self, x: mx.array, block_positions: mx.array, cache: FlatCache) -> mx.array:
        mask = cache.make_mask(x.shape[1], window_size=self._window, causal=self._causal)
        attend: Layer = lambda rows: self.self_attn(rows, mask, cache)  # noqa: E731
        x = x + self._apply_with_convolution("attention_conv", attend, self.input_layernorm(x), block_positions)
        return x + self._apply_with_convolution("mlp_conv", self.mlp, self.post_attention_layernorm(x), block_positions)

    def _apply_with_convolution(self, name: str, inner: Layer, x: mx.array, block_positions: mx.array) -> mx.array:
        out: mx.array = self[name](inner, x, block_positions) if name in self else inner(x)
        return out


class DFlash(BlockHead):
    """With a vocabulary of its own it has its own output layer."""

    def __init__(self, config: DFlashConfig, target: HeadTarget, vocabulary: DraftVocabulary) -> None:
        super().__init__(target, vocabulary)
        size, eps = config.hidden_size, config.rms_norm_eps
        self._config, self.points = config, config.taps
        self.depth, self.mask_token = config.depth, config.mask_token_id
        self.from_anchor = config.from_anchor
        self.fc = nn.Linear(len(config.taps) * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.layers = [DFlashBlock(config, window, causal) for window, causal in config.layers]
        self.norm = nn.RMSNorm(size, eps=eps)
        if vocabulary.ids is not None:
            self.lm_head = nn.Linear(size, vocabulary.draft_size, bias=False)
        if config.markov_rank:
            self.markov_head = Markov(config.gated, config.markov_rank, size, vocabulary)
        if config.selector_rank:
            self.candidate_selector = Selector(config.selector_rank, size, vocabulary.size)

    @property
    def link(self) -> BlockLink | None:
        link: BlockLink | None = self.get("candidate_selector", self.get("markov_head"))
        return link

    def fuse(self, rows: mx.array) -> mx.array:
        fused: mx.array = self.hidden_norm(self.fc(rows.astype(self.fc.weight.dtype)))
        return fused

    def read(self, features: mx.array, caches: list[FlatCache]) -> None:
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.self_attn.read(features, cache)

    def block(self, tokens: mx.array, block_positions: mx.array, caches: list[FlatCache]) -> mx.array:
        x = self._embed(tokens).astype(self.fc.weight.dtype)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, block_positions, cache)
        normed: mx.array = self.norm(x)
        return normed

    def logits(self, hidden: mx.array) -> mx.array:
        factor, softcap = self._config.output_multiplier, self._config.final_logit_softcapping
        output = self.get("lm_head", self._output)
        logits = output(hidden * factor if factor != 1 else hidden).astype(mx.float32)
        if softcap:
            logits = mx.tanh(logits / softcap) * softcap
        return self.vocabulary.spread(logits)


def build(published: HeadCheckpoint) -> DFlash:
    """Returns the head of a checkpoint in one of the published formats: z-lab's DFlash and DFlash2, DeepSpec's and
    SpecForge's DSpark, speculators'. Converts their conventions: layers are the target's outputs counted from 0, tokens
    are the target's, and the depth of a block is the number of tokens that it drafts.

    Raises:
        CannotDraft: it is not a head of this kind, not complete, or for another target.
    """
    with published.config_errors("dflash"):
        config, target = published.config, published.target
        # Some formats nest the sizes, or the settings of the method.
        config = {**config, **(config.get("transformer_layer_config") or {}), **(config.get("dflash_config") or {})}
        weights = rename_tensors(published.weights, {"model.logit_head.": "", "logit_head.": "", "model.": ""})
        weights = {key: value for key, value in weights.items() if not key.startswith("confidence_head.")}
        checkpoint = replace(published, config=config, weights=weights)
        settings = _parse_config(checkpoint)
        _check_settings(checkpoint, settings)
        vocabulary = checkpoint.vocabulary(int(config["draft_vocab_size"]) if "d2t" in weights else target.vocab_size)
        factor = 1.0 if "speculators_model_type" in config else target.embed_factor  # speculators trains on the table
        head = DFlash(settings, replace(target, embed=lambda tokens: target.embed(tokens) * factor), vocabulary)
        checkpoint.load_into(head)
        return head


def _parse_config(checkpoint: HeadCheckpoint) -> DFlashConfig:
    """Returns sizes by the config, and switches by the config or the weights present."""
    config = checkpoint.config
    block, from_anchor = int(config.get("block_size") or _DEFAULT_BLOCK_SIZE), _parse_from_anchor(config)
    markov = int(config.get("markov_rank") or 0)
    kind = str(config.get("markov_head_type") or "vanilla").lower()
    if markov and kind not in ("vanilla", "gated"):
        raise CannotDraft(f"{checkpoint.name} has a Markov head of type {kind!r}, which is not supported")
    return checkpoint.sizes(
        DFlashConfig,
        config,
        taps=_parse_tapped_layers(checkpoint),
        layers=tuple(_parse_layers(config)),
        depth=block if from_anchor else block - 1,
        from_anchor=from_anchor,
        gated=kind == "gated",
    )


def _parse_from_anchor(config: Mapping[str, Any]) -> bool:
    """Whether blocks draft from their first row on; by default DSpark's do, and DFlash's from the second."""
    if (setting := config.get("sample_from_anchor", config.get("shift_label"))) is not None:
        return bool(setting)
    names = [config.get("projector_type"), config.get("speculators_model_type"), *(config.get("architectures") or ())]
    return any("dspark" in str(name).lower() for name in names)


def _parse_tapped_layers(checkpoint: HeadCheckpoint) -> tuple[int, ...]:
    """Returns the tapped layers, counted from 0 as in z-lab and DeepSpec; speculators' j is the output of j - 1."""
    config = checkpoint.config
    lists = [(config.get("aux_hidden_state_layer_ids"), 1), (config.get("target_layer_ids"), 0)]
    return checkpoint.taps(lists, _default_taps(checkpoint.target.layers, int(config["num_hidden_layers"])))


def _default_taps(layers: int, count: int) -> tuple[int, ...]:
    """Returns one tap for each of the head's `count` layers, evenly from the second layer to the last but two."""
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + number * (layers - 4) / (count - 1)) for number in range(count))


def _parse_layers(config: Mapping[str, Any]) -> Iterator[tuple[int | None, bool]]:
    """Yields each layer's window and causality. As in vLLM and SGLang, a layer of type sliding_attention is causal by
    default, and with `use_swa` alone all layers have a window but are not causal."""
    count = int(config["num_hidden_layers"])
    sliding = [kind == "sliding_attention" for kind in config.get("layer_types") or [""] * count]
    window = int(config.get("swa_window_size") or config.get("sliding_window") or 0) or None
    every = bool(config.get("use_swa")) and not any(sliding)
    causal = config.get("is_causal", config.get("causal"))
    for slides in sliding[:count]:
        by_default = slides and not config.get("sliding_window_non_causal")
        yield window if slides or every else None, by_default if causal is None else bool(causal)


def _check_settings(checkpoint: HeadCheckpoint, settings: DFlashConfig) -> None:
    config, name = checkpoint.config, checkpoint.name
    if config.get("model_type", "") not in _SUPPORTED_MODEL_TYPES:
        raise CannotDraft(f"{name} is built of {config['model_type']} layers; expected those of qwen3 or llama")
    checkpoint.check_target(hidden_size=settings.hidden_size, num_hidden_layers=config.get("num_target_layers"))
    checkpoint.check_mask_token(settings.mask_token_id)
    if settings.depth < 1:
        raise CannotDraft(f"{name} has blocks of {config.get('block_size')} tokens; expected at least 2")
