"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a layer over the fused rows of three of the target's layers.

One module serves the official, SpecForge's and speculators' heads; their differences are switches: where the residual
begins, and which norms there are. Weights have speculators' names.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from outrider.drafters.heads.checkpoint import HeadCheckpoint, HeadTarget, rename_tensors
from outrider.drafters.heads.head import LayersHead
from outrider.drafters.heads.layers import MLPS, Attention, DraftVocabulary, LayerSizes
from outrider.engine.flat import FlatCache
from outrider.engine.hidden_states import AFTER_NORM
from outrider.protocol.errors import CannotDraft

if TYPE_CHECKING:
    from outrider.engine.ort.graph import Builder

_DEFAULT_DEPTH = 8  # of the published training recipes


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(LayerSizes):
    """Sizes and switches. `taps`: the tapped layers; none: it reads the final norm's rows. `windows`: each layer's
    (None: all).

    `norm_before_residual`: the residual of the first layer is the normed feature. `norm_output`: the vector that
    replaces a feature is normed.
    """

    target_hidden_size: int
    taps: tuple[int, ...]
    windows: tuple[int | None, ...]
    norm_before_residual: bool = False
    norm_output: bool = False


class Eagle3Layer(nn.Module):  # type: ignore[misc]
    """A Llama layer; the `first` one sees the token's embedding and the feature."""

    def __init__(self, config: Eagle3Config, first: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self._norm_before_residual = config.norm_before_residual
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        if first:
            self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.self_attn = Attention(config, 2 * size if first else size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = MLPS[config.hidden_act](size, config.intermediate_size)

    def __call__(self, x: mx.array, embedded: mx.array | None, mask: Any, cache: FlatCache) -> mx.array:
        residual = x
        if embedded is None:
            rows = self.input_layernorm(x)
        else:
            normed = self.hidden_norm(x)
            residual = normed if self._norm_before_residual else x
            rows = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        h = residual + self.self_attn(rows, mask, cache)
        out: mx.array = h + self.mlp(self.post_attention_layernorm(h))
        return out


class Eagle3(LayersHead):
    """`parts`: the names of its tensors, of which some are optional: its own embedding and output layer (else it uses
    the target's), norms of each tapped row before fusing (`fc_norm`) or of all as one (`input_norm`), and P-EAGLE's
    rows of a mask (`mask_hidden`; arXiv 2602.01469).
    """

    def __init__(
        self, config: Eagle3Config, target: HeadTarget, vocabulary: DraftVocabulary, parts: Container[str]
    ) -> None:
        super().__init__(target, vocabulary)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.points, self._windows = config.taps or (AFTER_NORM,), config.windows
        self.gives_normed, self._norm_before_residual = config.norm_output, config.norm_before_residual
        fused = len(self.points) * config.target_hidden_size
        if "fc_norm.0.weight" in parts:
            self.fc_norm = [nn.RMSNorm(config.target_hidden_size, eps=eps) for _ in config.taps]
        if "input_norm.weight" in parts:
            self.input_norm = nn.RMSNorm(fused, eps=eps)
        self.fc = nn.Linear(fused, size, bias=False) if config.taps else nn.Identity()
        if "embed_tokens.weight" in parts:
            self.embed_tokens = nn.Embedding(vocabulary.size, size)
        self.layers = [Eagle3Layer(config, number == 0) for number in range(len(config.windows))]
        self.norm = nn.RMSNorm(size, eps=eps)
        if "lm_head.weight" in parts or vocabulary.ids is not None:
            self.lm_head = nn.Linear(size, vocabulary.draft_size, bias=False)
        if "mask_hidden" in parts:
            self.mask_hidden = mx.zeros((1, 1, fused))

    def fuse(self, rows: mx.array) -> mx.array:
        rows = rows.astype(self.norm.weight.dtype)
        if "fc_norm" in self:
            parts = mx.split(rows, len(self.fc_norm), axis=-1)
            rows = mx.concatenate([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], axis=-1)
        fused: mx.array = self.fc(self.input_norm(rows) if "input_norm" in self else rows)
        return fused

    def __call__(self, tokens: mx.array, features: mx.array, caches: list[FlatCache]) -> mx.array:
        embed = self.get("embed_tokens", self._embed)
        embedded, x = embed(tokens).astype(self.norm.weight.dtype), features
        for layer, cache, window in zip(self.layers, caches, self._windows, strict=True):
            mask = cache.make_mask(tokens.shape[1], window_size=window)
            x = layer(x, embedded if layer is self.layers[0] else None, mask, cache)
        return x

    @property
    def mask_feature(self) -> mx.array | None:
        return self.fuse(self.mask_hidden[0]) if "mask_hidden" in self else None

    def build_input(self, b: Builder) -> tuple[str, str]:
        first = self.layers[0]
        normed = b.norm("features", first.hidden_norm)
        both = b.op("Concat", b.norm("x", first.input_layernorm), normed, axis=-1)
        return (normed if self._norm_before_residual else "features"), both


def build(published: HeadCheckpoint) -> Eagle3:
    """Returns the EAGLE-3 or P-EAGLE head of a checkpoint in SafeAI's, SpecForge's or speculators' format. Converts
    conventions: layers are the target's outputs counted from 0, tokens are the target's.

    Raises:
        CannotDraft: it is not a head of this kind, not complete, or for another target.
    """
    with published.config_errors("eagle3"):
        names = {"model.midlayer.": "layers.0.", "midlayer.": "layers.0.", "model.": ""}
        weights = rename_tensors(published.weights, names)
        for key in [key for key in weights if ".hidden_norm." in key and not key.startswith("layers.0.")]:
            weights.setdefault(key.replace(".hidden_", ".input_layer"), weights.pop(key))  # NVIDIA's, SGLang's name
        checkpoint = replace(published, weights=weights)
        settings, count = _parse_config(checkpoint)
        vocabulary = checkpoint.vocabulary(count)
        checkpoint.check_target(hidden_size=settings.target_hidden_size)
        own = {"embed_tokens.weight", "lm_head.weight"} <= set(weights)
        if not own and settings.hidden_size != settings.target_hidden_size:
            raise CannotDraft(f"{checkpoint.name} is narrower than the target; expected embed_tokens and lm_head in it")
        head = Eagle3(settings, checkpoint.target, vocabulary, weights)
        if "mask_hidden" in weights:
            weights["mask_hidden"] = weights["mask_hidden"].reshape(1, 1, -1)
            head.mask_token, head.depth = _parse_masks(checkpoint)
        checkpoint.load_into(head)
        return head


def _parse_config(checkpoint: HeadCheckpoint) -> tuple[Eagle3Config, int]:
    """Returns sizes by the config, switches by the config or the weights present, and the head's vocabulary size."""
    config = checkpoint.config
    layer = config.get("transformer_layer_config") or config
    layers = max(1, len({key.split(".")[1] for key in checkpoint.weights if key.startswith("layers.")}))
    kinds = [*(layer.get("layer_types") or ()), *[""] * layers][:layers]
    nested = config.get("eagle_config") or {}
    settings = checkpoint.sizes(
        Eagle3Config,
        layer,
        target_hidden_size=config.get("target_hidden_size") or layer["hidden_size"],
        taps=_parse_tapped_layers(checkpoint),
        windows=tuple(int(layer["sliding_window"]) if kind == "sliding_attention" else None for kind in kinds),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_output=bool(config.get("norm_output") or nested.get("return_hidden_post_norm")),  # NVIDIA's name
    )
    return settings, int(config.get("draft_vocab_size") or layer["vocab_size"])


def _parse_masks(checkpoint: HeadCheckpoint) -> tuple[int, int]:
    """Returns P-EAGLE's mask token, and the number of tokens that it drafts at once."""
    config = checkpoint.config
    places = [config, config.get("eagle_config") or {}]
    found = [place.get(key) for key in ("mask_token_id", "ptd_token_id", "pard_token") for place in places]
    token = checkpoint.check_mask_token(next((token for token in found if token is not None), None))
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return token, int(methods[0].get("speculative_tokens") or config.get("num_depths") or _DEFAULT_DEPTH)


def _parse_tapped_layers(checkpoint: HeadCheckpoint) -> tuple[int, ...]:
    """Returns the tapped layers, as outputs counted from 0.

    SpecForge's `eagle_config` and DeepSpec's `target_layer_ids` count in the same way. speculators' list counts inputs
    (its j is the output of j - 1), and NVIDIA's if it is there twice. The default is the three official layers.
    """
    config, layers, key = checkpoint.config, checkpoint.target.layers, "eagle_aux_hidden_state_layer_ids"
    nested = config.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        return ()
    lists = [(config.get(key), 1), (nested.get(key), 0), (config.get("target_layer_ids"), 0)]
    return checkpoint.taps(lists, (1, layers // 2 - 1, layers - 4))
