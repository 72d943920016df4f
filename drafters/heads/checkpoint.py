"""Reads a head's config.json and tensors, and puts these into a module. Every failure is one sentence.

Which tensors a kind of head has, and under which names, is known to that kind's module only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from outrider.drafters.heads.layers import LayerSizes
from outrider.protocol.digest import digest, fits
from outrider.protocol.errors import CannotDraft, first_line

Weights = dict[str, mx.array]
Settings = TypeVar("Settings")
_PLAIN: dict[Any, Callable[[Any], Any]] = {"int": int, "float": float, "str": str, "bool": bool}
_FINGERPRINT = re.compile("[0-9a-f]+-[0-9a-f]*")


def read_config(folder: Path) -> dict[str, Any]:
    """Raises CannotDraft."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CannotDraft(
            f"{folder / 'config.json'} can't be read ({first_line(error)}); expected the config.json of a draft head"
        ) from error
    if not isinstance(config, dict):
        raise CannotDraft(f"{folder / 'config.json'} is empty; expected the settings of a draft head")
    return config


def stranger(folder: Path, target: Path | None) -> str:
    """What a head's config.json says against this target: that it was trained for another one; else nothing.

    Its `target` is a fingerprint (`protocol.digest`), which heads that were made here have.
    """
    known = read_config(folder).get("target")
    if target is None or not isinstance(known, str) or not _FINGERPRINT.fullmatch(known):
        return ""
    return "" if fits(known, digest(target)) else "the head was trained for another target by its fingerprint"


def read_weights(folder: Path) -> Weights:
    """All tensors of a folder. Raises CannotDraft."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        other = ", as safetensors: pytorch_model.bin has to be converted" if any(folder.glob("*.bin")) else ""
        raise CannotDraft(f"{folder} has no weights; expected those of a draft head{other}")
    weights: Weights = {}
    try:
        for file in files:
            weights |= cast(Weights, mx.load(str(file)))
    except (RuntimeError, ValueError, OSError) as error:
        raise CannotDraft(f"{folder} can't be read ({first_line(error)}); download the head again") from error
    return weights


def refuse_quantised(config: Mapping[str, Any], weights: Weights, name: str) -> None:
    """Raises CannotDraft: it is quantised."""
    if "quantization" in config or any(key.endswith(".scales") for key in weights):
        raise CannotDraft(f"{name} is quantized; use the head as it was published")


def rope_of(sizes: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """A rope's base and scaling, which transformers 5 writes side by side."""
    both = sizes.get("rope_parameters") or {}
    scaling = sizes.get("rope_scaling") or (dict(both) if both.get("rope_type", "default") != "default" else None)
    return float(sizes.get("rope_theta") or both.get("rope_theta") or 10000.0), scaling


def sizes_of(layer: Mapping[str, Any], weights: Weights, target: Mapping[str, Any]) -> LayerSizes:
    """Sizes by the config of its layers, switches by the weights that are there; to be read where it is `complete`."""
    hidden, heads = int(layer["hidden_size"]), int(layer["num_attention_heads"])
    theta, scaling = rope_of(layer)
    return LayerSizes(
        hidden_size=hidden,
        intermediate_size=int(layer["intermediate_size"]),
        num_attention_heads=heads,
        num_key_value_heads=int(layer.get("num_key_value_heads") or heads),
        head_dim=int(layer.get("head_dim") or hidden // heads),
        rms_norm_eps=float(layer.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        # Positions count from where it begins to read, and the target has its own end.
        context_length=int(target.get("max_position_embeddings") or layer.get("max_position_embeddings") or 32768),
        qk_norm="layers.0.self_attn.q_norm.weight" in weights,
        attention_bias="layers.0.self_attn.q_proj.bias" in weights,
    )


@contextmanager
def complete(name: str, what: str = "a head's sizes") -> Iterator[None]:
    """Raises CannotDraft where what is read from a config.json is not there, or no number."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise CannotDraft(f"{name}: config.json lacks {error}; expected {what}") from error


def settings_of(kind: type[Settings], config: Mapping[str, Any], name: str, what: str = "a head's sizes") -> Settings:
    """A dataclass of numbers and texts from the fields of a config.json. Raises CannotDraft as `complete` does."""
    with complete(name, what):
        wanted = [field for field in fields(cast(Any, kind)) if field.default is MISSING or field.name in config]
        return kind(**{field.name: _PLAIN[field.type](config[field.name]) for field in wanted})


def check_taps(taps: Sequence[int], layers: int, name: str) -> None:
    """Raises CannotDraft: the target has no such layer."""
    if not all(0 <= number < layers for number in taps):
        raise CannotDraft(
            f"{name} reads the target's layers {taps}, but this target has {layers};"
            " expected a head trained for this target"
        )


def check_width(own: int, target: Mapping[str, Any], name: str) -> None:
    """Raises CannotDraft: the target's rows are of another width."""
    size = int(target["hidden_size"])
    if own != size:
        raise CannotDraft(
            f"{name} expects a hidden size of {own}, but this target has {size}; expected a head for this target"
        )


def fill(head: nn.Module, weights: Weights, name: str, exact: Container[str] = ()) -> None:
    """Puts the weights in, all in the format of most of them; `exact` ones stay float32.

    Raises:
        CannotDraft: some are missing, of another shape, or no numbers.
    """
    wanted = dict(tree_flatten(head.parameters()))
    missing = sorted(set(wanted) - set(weights))
    if missing:
        raise CannotDraft(f"{name} lacks {', '.join(missing[:3])}; download the head again")
    for key, shape in ((key, wanted[key].shape) for key in wanted):
        if weights[key].shape != shape:
            raise CannotDraft(f"{name}: {key} is {weights[key].shape}, expected {shape} by config.json and this target")
    dtype = _computed_in(max((weights[key] for key in wanted), key=lambda weight: weight.nbytes).dtype)
    chosen = [(key, weights[key].astype(mx.float32 if key in exact else dtype)) for key in wanted]
    head.load_weights(chosen)
    mx.eval(head.parameters())
    sound = mx.stack([mx.isfinite(value).all() for _, value in chosen])
    if not sound.all().item():
        raise CannotDraft(f"{name} has weights that are NaN or infinite; expected a trained head")


def _computed_in(stored: mx.Dtype) -> mx.Dtype:
    """What computes well: float16 overflows where heads are trained in bfloat16."""
    if mx.default_device().type == mx.cpu:
        return mx.float32
    return mx.bfloat16 if stored == mx.float16 else stored
