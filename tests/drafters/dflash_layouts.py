"""The published layouts of block heads: their settings and tensor names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

H, HEADS, KV_HEADS, DIM, INNER, V, V_D, LAYERS = 48, 4, 2, 12, 40, 258, 90, 8
RANK, GROUP, MASK, BLOCK, SOFTCAP = 6, 8, 257, 6, 5.0
EPS, THETA = 1e-5, 5000.0
TAPS = (1, 3, 6)
TARGET = {"hidden_size": H, "num_hidden_layers": LAYERS, "max_position_embeddings": 512}

_SIZES: dict[str, Any] = {
    "hidden_size": H,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "intermediate_size": INNER,
    "rms_norm_eps": EPS,
    "num_hidden_layers": 2,
    "vocab_size": V,
    "model_type": "qwen3",
}
_ZLAB = {**_SIZES, "rope_theta": THETA, "num_target_layers": LAYERS, "layer_types": ["full_attention"] * 2}
PLAIN = {"mask_token_id": MASK, "target_layer_ids": list(TAPS)}
_MARKOV = {"markov_rank": RANK, "enable_confidence_head": True, "confidence_head_with_markov": True}
_DSPARK = {**PLAIN, **_MARKOV, "projector_type": "dspark", "attention_mode": "gqa"}
_SPECULATORS = {
    "transformer_layer_config": {**_SIZES, "rope_parameters": {"rope_theta": THETA, "rope_type": "default"}},
    "draft_vocab_size": V_D,
    "aux_hidden_state_layer_ids": [number + 1 for number in TAPS],
    "mask_token_id": MASK,
    "block_size": BLOCK,
    "sliding_window_non_causal": False,
}


@dataclass(frozen=True)
class Layout:
    """A layout's config.json, and how its heads differ from z-lab's.

    `windows` of its layers (0: none), and which are `causal`: rows of a block don't see later ones. `interleaved`: its
    rope rotates neighbours. `maps`: its vocabulary is smaller than the target's. `copies`: its checkpoint also has an
    embedding and an output layer. `prefix`: which tensor names have which prefix.
    """

    config: dict[str, Any]
    from_anchor: bool = False
    markov: str = ""
    convolves: bool = False
    windows: tuple[int, int] = (0, 0)
    causal: tuple[bool, bool] = (False, False)
    interleaved: bool = False
    maps: bool = False
    copies: bool = False
    prefix: tuple[str, str] = ("", "")

    def renamed(self, key: str) -> str:
        return self.prefix[1] + key if key.startswith(self.prefix[0]) and self.prefix[1] else key

    def plain(self, key: str) -> str:
        return key.removeprefix(self.prefix[1])

    @property
    def depth(self) -> int:
        return BLOCK if self.from_anchor else BLOCK - 1


LAYOUTS = {
    "z-lab": Layout({**_ZLAB, "architectures": ["DFlashDraftModel"], "block_size": BLOCK, "dflash_config": PLAIN}),
    "DFlash2": Layout(
        {
            **_ZLAB,
            "architectures": ["DFlash2DraftModel"],
            "is_causal": False,
            "layer_types": ["sliding_attention"] * 2,
            "sliding_window": 9,
            "dflash_config": {
                **PLAIN,
                "block_size": BLOCK,
                "conv_group_size": GROUP,
                "conv_kernel_size": 2,
                "selector_rank": RANK,
                "selector_top_k": 16,
                "output_multiplier": 0.5,
                "final_logit_softcapping": SOFTCAP,
            },
        },
        convolves=True,
        windows=(9, 9),
    ),
    "SpecForge, windows": Layout(
        {
            **_ZLAB,
            "architectures": ["DFlashDraftModel"],
            "block_size": BLOCK,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 4,
            "dflash_config": PLAIN,
        },
        windows=(4, 0),
        causal=(True, False),
    ),
    "MiMo": Layout(
        {
            **_ZLAB,
            "architectures": ["DFlashDraftModel"],
            "block_size": BLOCK,
            "dflash_config": {**PLAIN, "use_swa": True, "swa_window_size": 7},
        },
        windows=(7, 7),
    ),
    "causal": Layout(
        {
            **_ZLAB,
            "architectures": ["DFlashDraftModel"],
            "block_size": BLOCK,
            "dflash_config": {**PLAIN, "causal": True},
            "is_neox_style": False,
        },
        causal=(True, True),
        interleaved=True,
    ),
    "DeepSpec": Layout(
        {
            **_ZLAB,
            **PLAIN,
            **_MARKOV,
            "architectures": ["Qwen3DSparkModel"],
            "block_size": BLOCK,
            "markov_head_type": "vanilla",
        },
        from_anchor=True,
        markov="vanilla",
        copies=True,
    ),
    "SpecForge, gated": Layout(
        {
            **_ZLAB,
            "architectures": ["DSparkDraftModel"],
            "block_size": BLOCK,
            "dflash_config": {**_DSPARK, "markov_head_type": "gated"},
        },
        from_anchor=True,
        markov="gated",
        prefix=("markov_head.", "logit_head."),
    ),
    "speculators": Layout(
        {**_SPECULATORS, "speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"]}, maps=True
    ),
    "speculators, windows": Layout(
        {
            **_SPECULATORS,
            "transformer_layer_config": {
                **_SPECULATORS["transformer_layer_config"],
                "layer_types": ["full_attention", "sliding_attention"],
                "sliding_window": 5,
            },
            "speculators_model_type": "dflash",
            "architectures": ["DFlashSpeculator"],
        },
        maps=True,
        windows=(0, 5),
        causal=(False, True),
        prefix=("", "model."),
    ),
    "speculators, DSpark": Layout(
        {
            **_SPECULATORS,
            **_MARKOV,
            "speculators_model_type": "dspark",
            "architectures": ["DSparkSpeculator"],
            "sample_from_anchor": False,
        },
        markov="vanilla",
        maps=True,
    ),
}
