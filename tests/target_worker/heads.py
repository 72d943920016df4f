"""A target whose next token depends on the last one, and EAGLE-3 heads that are constructed for it.

The target's layers add nothing, so its hidden rows are embeddings and its text is a Markov chain. `token_head`
predicts it from the token alone, to any depth and with the same logits; `feature_head` from the target's row alone,
one token deep; `random_head` proposes random tokens.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import deepseek_v3, llama

from outrider.drafters.heads import redrafter
from outrider.drafters.heads.checkpoint import HeadCheckpoint, HeadTarget
from outrider.drafters.heads.drafter import HeadDrafter
from outrider.drafters.heads.eagle3 import Eagle3, build
from outrider.drafters.heads.head import Head
from outrider.drafters.heads.mtp import Mtp
from outrider.drafters.heads.redrafter import Redrafter
from outrider.engine.flat import patch_ropes
from outrider.engine.loading import LoadedModel, load
from outrider.engine.ort.forward import OrtForward
from outrider.engine.ort.layers import DecoderLayers
from outrider.protocol.errors import ModelError
from tests.drafters import nextn_heads
from tests.tiny import VOCAB_SIZE, write_model

H, LAYERS, KNOWN = 64, 4, 200
_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": H,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": KNOWN,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}
_PARALLEL = {"architectures": ["PEagleDraftModel"], "mask_token_id": KNOWN, "num_depths": 4}
_MASK_HIDDEN = {"mask_hidden": np.zeros((1, 1, 3 * H))}
Array = np.ndarray[Any, np.dtype[Any]]


def markov_llama(folder: Path, scale: float = 3.0, blur: float = 0.0) -> LoadedModel:
    """A Llama whose layers add nothing to the embeddings; `blur` scales the noise in its output layer."""
    path = write_model(folder, "llama", 5, scale=scale, num_hidden_layers=LAYERS, tie_word_embeddings=False)
    weights = mx.load(str(path / "model.safetensors"))
    assert isinstance(weights, dict)
    for key in weights:
        if key.endswith(("o_proj.weight", "down_proj.weight")):
            weights[key] = mx.zeros_like(weights[key])
    layer = weights["lm_head.weight"]
    weights["lm_head.weight"] = layer + blur * mx.random.normal(layer.shape, key=mx.random.key(5))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    return load(path)


def token_head(target: LoadedModel) -> Eagle3:
    """Each pair attends to itself by its token's embedding; the norm and the output layer are the target's."""
    ids = _known_ids()
    weights = _zero_weights()
    same = np.concatenate([np.eye(H), np.zeros((H, H))], axis=1)
    for key, value in (("q", 6 * same), ("k", 6 * same), ("v", same), ("o", np.eye(H))):
        weights[f"midlayer.self_attn.{key}_proj.weight"] = value
    weights["norm.weight"] = np.array(target.model.model.norm.weight)
    weights["lm_head.weight"] = np.array(target.model.lm_head(mx.eye(H))).T[ids]
    weights["midlayer.hidden_norm.weight"] = np.zeros(H)  # removes the features, from the residual, too
    return _build(weights, target, ids, norm_before_residual=True)


def blurred_head(target: LoadedModel, by: float = 0.05) -> Eagle3:
    """`token_head` with some noise in its output layer."""
    head = token_head(target)
    layer = head.lm_head
    layer.weight = layer.weight + by * mx.random.normal(layer.weight.shape, key=mx.random.key(3))
    return head


def feature_head(target: LoadedModel) -> Eagle3:
    """Predicts the likeliest token after the target's likeliest one, from the target's row alone."""
    return _build(_feature_weights(target), target, np.arange(KNOWN))


def parallel_token_head(target: LoadedModel) -> Eagle3:
    """`token_head` as a P-EAGLE head: it predicts each token from the one before, whatever the feature."""
    head = token_head(target)
    weights = {key: np.array(value) for key, value in tree_flatten(head.parameters())}
    return _build(weights | _MASK_HIDDEN, target, _known_ids(), **_PARALLEL, norm_before_residual=True)


def parallel_feature_head(target: LoadedModel, missing: int | None = None) -> Eagle3:
    """`feature_head` as a P-EAGLE head. In place of a missing feature it has the row of token `missing`, or zeros."""
    hidden = np.zeros((1, 1, 3 * H))
    if missing is not None:
        hidden[0, 0, 2 * H :] = _embedding(target)[missing]
    weights = _feature_weights(target) | {"mask_hidden": hidden}
    return _build(weights, target, np.arange(KNOWN), **_PARALLEL)


def _feature_weights(target: LoadedModel) -> dict[str, Array]:
    weights = _zero_weights()
    weights["fc.weight"] = np.concatenate([np.zeros((H, 2 * H)), np.eye(H)], axis=1)
    logits = np.array(target.model(mx.arange(VOCAB_SIZE)[:, None])[:, 0])
    after = logits.argmax(axis=-1)[logits.argmax(axis=-1)]
    table = _embedding(target)
    table = table / np.linalg.norm(table, axis=-1, keepdims=True)
    rows = np.zeros((VOCAB_SIZE, H))
    np.add.at(rows, after, table)
    weights["lm_head.weight"] = rows[:KNOWN]
    return weights


def write_feature_head(folder: Path, target: LoadedModel) -> Path:
    """Writes `feature_head` as a checkpoint."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    mx.save_safetensors(str(folder / "model.safetensors"), _arrays(_feature_weights(target), np.arange(KNOWN)))
    return folder


def random_head(target: LoadedModel, seed: int = 0, **config: Any) -> Eagle3:
    draws = np.random.default_rng(seed)
    weights = {key: value + draws.standard_normal(value.shape) * 0.3 for key, value in _zero_weights().items()}
    return _build(weights, target, _known_ids(), **config)


def normed_head(target: LoadedModel) -> Eagle3:
    """A random head whose output is normalised before it replaces features."""
    return random_head(target, norm_output=True)


def last_row_head(target: LoadedModel) -> Eagle3:
    """A random head that reads the target's last hidden state only and uses its output layer."""
    weights = {key: mx.array(np.array(value)) for key, value in tree_flatten(random_head(target).parameters())}
    own = {key: value for key, value in weights.items() if key not in ("fc.weight", "lm_head.weight")}
    config = {**_CONFIG, "draft_vocab_size": VOCAB_SIZE, "eagle_config": {"use_aux_hidden_state": False}}
    return build(HeadCheckpoint(config, own, HeadTarget.of(target)))


def windowed_head(target: LoadedModel) -> Eagle3:
    """A random head with a window of nine pairs."""
    return random_head(target, layer_types=["sliding_attention"], sliding_window=9)


def mtp_head(target: LoadedModel) -> Mtp:
    """A random MTP head, with a layer like the target's."""
    mx.random.seed(4)
    block = llama.TransformerBlock(target.model.args)
    head = Mtp(H, 1e-5, block, replace(HeadTarget.of(target), context_length=1024))
    patch_ropes(head)
    return head


def recurrent_head(target: LoadedModel) -> Redrafter:
    """A ReDrafter that predicts the token after the bonus from the target's row. Its random state has little weight."""
    config, arrays = _recurrent(target)
    return redrafter.build(HeadCheckpoint(config, arrays, HeadTarget.of(target)))


def write_recurrent_head(folder: Path, target: LoadedModel) -> Path:
    """Writes `recurrent_head` as a checkpoint."""
    config, arrays = _recurrent(target)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    return folder


def _recurrent(target: LoadedModel) -> tuple[dict[str, Any], dict[str, mx.array]]:
    model, draws = target.model.model, np.random.default_rng(2)
    table = _embedding(target)
    rows = table / np.linalg.norm(table, axis=-1, keepdims=True) / np.array(model.norm.weight)
    after = np.array(target.model(mx.arange(VOCAB_SIZE)[:, None])[:, 0]).argmax(axis=-1)
    scores = np.zeros((VOCAB_SIZE, 2 * H))
    np.add.at(scores[:, :H], after[after], 9 * rows)
    weights = {"lm_head.0.weight": scores, "rnn_u.bias": np.zeros(H)}
    weights |= {f"rnn_{name}.weight": draws.standard_normal((H, H)) for name in "uw"}
    sizes = {"hidden_size": H, "vocab_size": VOCAB_SIZE, "exit_dim": 2 * H, "num_draft_layers": 0, "rnn": True}
    arrays = {key: mx.array(value.astype(np.float32)) for key, value in weights.items()}
    return {"model_type": "recurrent_drafting_drafter", **sizes}, arrays


def latent_head(target: LoadedModel) -> Mtp:
    """A random MTP head like DeepSeek's, whose attention computes one text after the other."""
    mx.random.seed(6)
    sizes = {key: value for key, value in nextn_heads.MODELS["deepseek_v3"].items() if key != "tie_word_embeddings"}
    args = deepseek_v3.ModelArgs.from_dict({**sizes, "hidden_size": H, "num_attention_heads": 4})
    block = deepseek_v3.DeepseekV3DecoderLayer(args, LAYERS)
    head = Mtp(H, 1e-5, block, replace(HeadTarget.of(target), context_length=1024))
    patch_ropes(head)
    return head


def drafter(head: Head, target: LoadedModel) -> HeadDrafter:
    """A drafter with this head; ONNX Runtime computes it, without rounding, if it can."""
    try:
        cpu = unrounded(head, target)
    except ModelError:
        cpu = None
    return HeadDrafter(head, target.vocab_size, cpu=cpu)


def unrounded(head: Head, target: LoadedModel) -> OrtForward:
    """ONNX Runtime's forwards of a head, without the rounding to 8 bits."""
    decoder = head.decoder(DecoderLayers.of(target.model, target.model_type))
    return OrtForward(decoder)


def _known_ids() -> Array:
    """The target's ids of the tokens that the head knows; some are missing."""
    return np.sort(np.random.default_rng(1).permutation(VOCAB_SIZE)[:KNOWN])


def _embedding(target: LoadedModel) -> Array:
    return np.array(target.model.model.embed_tokens(mx.arange(VOCAB_SIZE)))


def _zero_weights() -> dict[str, Array]:
    """Weights of a head whose layers all add zeros."""
    weights = {
        "fc.weight": np.zeros((H, 3 * H)),
        "norm.weight": np.ones(H),
        "lm_head.weight": np.zeros((KNOWN, H)),
        "midlayer.mlp.gate_proj.weight": np.zeros((32, H)),
        "midlayer.mlp.up_proj.weight": np.zeros((32, H)),
        "midlayer.mlp.down_proj.weight": np.zeros((H, 32)),
    }
    weights |= {f"midlayer.self_attn.{key}_proj.weight": np.zeros((H, 2 * H)) for key in "qkv"}
    weights["midlayer.self_attn.o_proj.weight"] = np.zeros((H, H))
    names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return weights | {f"midlayer.{name}.weight": np.ones(H) for name in names}


def _build(weights: dict[str, Array], target: LoadedModel, ids: Array, **config: Any) -> Eagle3:
    return build(HeadCheckpoint({**_CONFIG, **config}, _arrays(weights, ids), HeadTarget.of(target)))


def _arrays(weights: dict[str, Array], ids: Array) -> dict[str, mx.array]:
    arrays = {key: mx.array(value.astype(np.float32)) for key, value in weights.items()}
    return arrays | {"d2t": mx.array(ids - np.arange(len(ids)))}
