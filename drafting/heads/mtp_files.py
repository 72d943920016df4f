"""Reads the heads that mlx-lm leaves out of a target: from the original repository, or a copy of their tensors alone.

Every reason why there is none to use is one sentence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from outrider.drafting.heads.checkpoint import Weights, fill, refuse_quantised
from outrider.drafting.heads.mtp import Layer, Mtp
from outrider.drafting.heads.mtp_families import Family, family_of
from outrider.engine import positions
from outrider.engine.loading import LoadedModel
from outrider.engine.parts import backbone_of, embedding, output_layer
from outrider.protocol.errors import CannotDraft
from outrider.protocol.guard import first_line

_EMBEDDING, _OUTPUT = "embed_tokens.weight", "lm_head.weight"
_SAME = 0.95


def read(folder: Path, target: LoadedModel) -> Mtp:
    """The head in `folder` for its target.

    Raises:
        CannotDraft: there is none, it is not whole, or the target is of a family whose heads are not known here.
    """
    family = family_of(target)
    weights = _weights(folder, family)
    backbone, _ = backbone_of(target.model)
    inner = getattr(target.model, "language_model", target.model)
    table, output = embedding(backbone), output_layer(inner, backbone)
    weights = _without_copies(weights, lambda tokens: table(tokens), output)
    args: Any = inner.args
    head = Mtp(
        family.form, args.hidden_size, args.rms_norm_eps, family.block,
        lambda tokens: table(tokens), output, target.context_length,
        own_embedding=target.vocab_size if _EMBEDDING in weights else 0,
        own_output=target.vocab_size if _OUTPUT in weights else 0,
    )  # fmt: skip
    unknown = sorted(set(weights) - {key for key, _ in tree_flatten(head.parameters())})
    if unknown:
        raise CannotDraft(f"the head in {folder} has {', '.join(unknown[:3])}, which is not supported")
    fill(head, weights, str(folder), family.exact)
    positions.install(head)
    return head


def _weights(folder: Path, family: Family) -> Weights:
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
        raise CannotDraft(f"{folder} can't be read ({first_line(error)}); download the head again") from error
    if not found:
        raise CannotDraft(
            f"{folder} holds no {family.prefix}* tensors, which conversions leave out; use the original repository"
        )
    refuse_quantised({}, found, str(folder))
    try:
        return family.named({key.removeprefix(family.prefix): value for key, value in found.items()})
    except (KeyError, ValueError, IndexError) as error:
        raise CannotDraft(f"{folder} lacks {error} of the head's tensors; use the original repository") from error


def _without_copies(weights: Weights, embed: Layer, output: Layer) -> Weights:
    """Without what the target has as well, if more roughly: some repositories hold embedding and output layer twice."""
    copies = []
    if _EMBEDDING in weights:
        tokens = mx.arange(min(64, weights[_EMBEDDING].shape[0]))
        copies += [_EMBEDDING] * _alike(weights[_EMBEDDING][tokens], embed(tokens))
    if _OUTPUT in weights:
        rows = mx.random.normal((4, weights[_OUTPUT].shape[-1]), key=mx.random.key(0))
        copies += [_OUTPUT] * _alike(rows @ weights[_OUTPUT].astype(mx.float32).T, output(rows))
    return {key: value for key, value in weights.items() if key not in copies}


def _alike(mine: mx.array, its: mx.array) -> bool:
    if mine.shape != its.shape:
        return False
    mine, its = mine.astype(mx.float32).flatten(), its.astype(mx.float32).flatten()
    return bool(((mine @ its) > _SAME * mx.linalg.norm(mine) * mx.linalg.norm(its)).item())
