"""Where in an unmodified mlx-lm model its layers, its final norm, its embedding and its output layer are."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from outrider.protocol.errors import ModelError

_NORMS = ("norm", "norm_f", "ln_f", "final_layernorm", "final_layer_norm", "embedding_norm", "output_norm")
_EMBEDDINGS = ("embed_tokens", "wte", "tok_embeddings", "embeddings", "word_embeddings", "embed_in")


def backbone_of(model: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """The module that holds the model's layers, and all of them, wherever it is nested."""
    first = next(iter(getattr(model, "layers", ())), None)
    for module in model.modules():
        for value in module.values():
            if isinstance(value, list) and any(layer is first for layer in value):
                return module, value
    raise ModelError("the model's layers are not in a list, so their outputs can't be read")


def final_norm(backbone: nn.Module) -> nn.Module:
    return _child(backbone, _NORMS, "final norm to tap")


def embedding(backbone: nn.Module) -> nn.Module:
    return _child(backbone, _EMBEDDINGS, "embedding to share")


def output_layer(model: nn.Module, backbone: nn.Module) -> Callable[[mx.array], mx.array]:
    """What makes logits of rows behind the final norm, in a model that does nothing else to them."""
    own = model.get("lm_head")
    if isinstance(own, nn.Module):
        return lambda rows: own(rows)  # a module would become a part of whoever keeps it
    return lambda rows: embedding(backbone).as_linear(rows)


def _child(backbone: nn.Module, names: tuple[str, ...], what: str) -> nn.Module:
    for name in names:
        if isinstance(backbone.get(name), nn.Module):
            return backbone[name]
    raise ModelError(f"the model has no {what}; expected one of {', '.join(names)} beside its layers")
