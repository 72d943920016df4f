"""Reads the heads that mlx-lm leaves out of a target: from the original repository, or a copy of their tensors alone.

Qwen3.5 and its successors without experts, and MiMo. Every reason why there is none to use is one sentence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import mimo, qwen3_5

from outrider.drafting.heads.mtp import Mtp, MtpForm
from outrider.engine import positions
from outrider.engine.loading import LoadedModel
from outrider.engine.parts import backbone_of, embedding, output_layer
from outrider.protocol.errors import CannotDraft
from outrider.protocol.guard import first_line

Weights = dict[str, mx.array]


@dataclass(frozen=True, slots=True)
class _Family:
    """Where a family's tensors are and what they are called here; `less_one`: norms are stored as what is above 1."""

    form: MtpForm
    prefix: str
    names: Mapping[str, str]
    less_one: bool


_QWEN = _Family(
    MtpForm(after_norm=True, embedding_first=True),
    "mtp.",
    {"pre_fc_norm_embedding.": "norm_embedding.", "pre_fc_norm_hidden.": "norm_hidden."},
    less_one=True,
)
_MIMO = _Family(
    MtpForm(after_norm=True, embedding_first=False),
    "model.mtp_layers.0.",
    {
        "token_layernorm.": "norm_embedding.",
        "hidden_layernorm.": "norm_hidden.",
        "input_proj.": "fc.",
        "final_layernorm.": "norm.",
        "": "layers.0.",
    },
    less_one=False,
)


def read(folder: Path, target: LoadedModel) -> Mtp:
    """The head in `folder` for its target.

    Raises:
        CannotDraft: there is none, it is not whole, or the target is of a family whose heads are not known here.
    """
    family, head = _built(target)
    weights = _weights(folder, family)
    if any(key.endswith(".scales") for key in weights):
        raise CannotDraft(f"the head in {folder} is quantised; expected the original repository's")
    wanted = dict(tree_flatten(head.parameters()))
    missing = sorted(set(wanted) - set(weights))
    if missing:
        raise CannotDraft(f"{folder} lacks {', '.join(missing[:3])} of a head's; expected the original repository")
    unknown = sorted(set(weights) - set(wanted))
    if unknown:
        raise CannotDraft(f"the head in {folder} has {', '.join(unknown[:3])}, too, which is not known here")
    wrong = [key for key in wanted if weights[key].shape != wanted[key].shape]
    if wrong:
        raise CannotDraft(
            f"{folder}: a head's {wrong[0]} is {weights[wrong[0]].shape}, expected {wanted[wrong[0]].shape}"
        )
    on_cpu = mx.default_device().type == mx.cpu
    dtype = mx.float32 if on_cpu else weights["fc.weight"].dtype  # bfloat16, as they are published
    head.load_weights([(key, weights[key].astype(dtype)) for key in wanted])
    mx.eval(head.parameters())
    positions.install(head)
    return head


def _built(target: LoadedModel) -> tuple[_Family, Mtp]:
    model = target.model
    backbone, _ = backbone_of(model)
    inner = getattr(model, "language_model", model)
    args: Any = inner.args
    if isinstance(model, qwen3_5.Model) and not args.num_experts:
        family, block = _QWEN, qwen3_5.DecoderLayer(args, args.full_attention_interval - 1)
    elif isinstance(model, mimo.Model):
        family, block = _MIMO, mimo.TransformerBlock(args)
    else:
        raise CannotDraft(
            f"heads of {target.model_type} models are not known here; expected qwen3_5 without experts or mimo"
        )
    table, output = embedding(backbone), output_layer(inner, backbone)
    head = Mtp(
        family.form, args.hidden_size, args.rms_norm_eps, block,
        lambda tokens: table(tokens), output, target.context_length,
    )  # fmt: skip
    return family, head


def _weights(folder: Path, family: _Family) -> Weights:
    """A head's tensors by our names. Of an original repository only the shards that hold it are read."""
    index = folder / "model.safetensors.index.json"
    try:
        files = sorted(folder.glob("*.safetensors"))
        if index.is_file():
            places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = sorted({folder / name for key, name in places.items() if key.startswith(family.prefix)})
        found: Weights = {}
        for file in files:
            tensors = cast(Weights, mx.load(str(file)))
            found |= {key: value for key, value in tensors.items() if key.startswith(family.prefix)}
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CannotDraft(f"{folder} can't be read ({first_line(error)}); fetch the head again") from error
    if not found:
        raise CannotDraft(
            f"{folder} holds no {family.prefix}* tensors: conversions leave them out; expected the original repository"
        )
    named = {_renamed(key.removeprefix(family.prefix), family): value for key, value in found.items()}
    return {key: value + family.less_one * (value.ndim == 1 and "norm" in key) for key, value in named.items()}


def _renamed(key: str, family: _Family) -> str:
    for theirs, ours in family.names.items():
        if key.startswith(theirs):
            return ours + key.removeprefix(theirs)
    return key
