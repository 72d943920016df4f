"""A head's files: reads its config.json and its tensors, checks them, and loads them into a module.

Each failure raises CannotDraft. Only the module of a kind of head knows its tensors and their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx.utils import tree_flatten

from outrider.drafters.heads.layers import MLPS, DraftVocabulary, LayerSizes
from outrider.engine.flat import patch_ropes
from outrider.engine.hidden_states import find_backbone, find_embedding, find_output_layer
from outrider.engine.loading import LoadedModel, flat_rope_fields
from outrider.protocol.digest import digests_match, model_digest, read_json, read_weight_map
from outrider.protocol.errors import CannotDraft, first_line
from outrider.protocol.heads import head_kind, text_config

Weights = dict[str, mx.array]
Layer = Callable[[mx.array], mx.array]
Sizes = TypeVar("Sizes", bound=LayerSizes)
_FINGERPRINT_PATTERN = re.compile("[0-9a-f]+-[0-9a-f]*")
# Copies of the target's tensors, and what the reference implementations do not use either.
_UNUSED = r"((verifier_)?lm_head|verifier_norm|embed_tokens|emb_norm)\.weight|d2t|t2d|(.+\.)?rotary_emb\.inv_freq"


@dataclass(frozen=True, slots=True)
class HeadTarget:
    """The parts of a target that a head is built for: its text model's config.json, sizes, and two of its layers.

    `embed_factor`: what its model multiplies the embeddings by.
    """

    config: Mapping[str, Any]
    vocab_size: int
    context_length: int
    embed: Layer
    output: Layer
    embed_factor: float = 1.0

    @property
    def layers(self) -> int:
        """The number of its layers."""
        return int(self.config["num_hidden_layers"])

    @classmethod
    def of(cls, model: LoadedModel) -> HeadTarget:
        backbone, _ = find_backbone(model.model)
        table, inner = find_embedding(backbone), getattr(model.model, "language_model", model.model)
        config = text_config(model.config)
        factor = int(config["hidden_size"]) ** 0.5 if model.model_type.startswith("gemma") else 1.0
        embed: Layer = lambda tokens: table(tokens)  # noqa: E731
        return cls(config, model.vocab_size, model.context_length, embed, find_output_layer(inner, backbone), factor)


def find_target_mismatch(folder: Path, target: Path | None) -> str:
    """Returns a message if a head was trained for another target, by its config.json; else an empty string.

    The config's `target` is a fingerprint (`protocol.digest`), which heads trained by `models` have.
    """
    fingerprint = str(read_json(folder / "config.json").get("target"))
    if target is None or not _FINGERPRINT_PATTERN.fullmatch(fingerprint):
        return ""
    matches = digests_match(fingerprint, model_digest(target))
    return "" if matches else "by its fingerprint, the head was trained for another target"


def read_weights(folder: Path, prefix: str = "") -> Weights:
    """Returns the tensors of a folder whose names begin with `prefix`, by the rest of their names. Raises ModelError.

    Reads only the shards that have them.
    """
    weights, places = Weights(), read_weight_map(folder)
    files = {folder / str(name) for key, name in places.items() if key.startswith(prefix)}
    try:
        for file in sorted(files if places else folder.glob("[!.]*.safetensors")):
            tensors = cast(Weights, mx.load(str(file)))
            weights |= {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    except (OSError, ValueError, RuntimeError) as error:
        raise CannotDraft(f"{folder} can't be read ({first_line(error)}); download the head again") from error
    if not weights:
        raise CannotDraft(
            f"{folder} has no tensors {prefix}* in .safetensors files; use the original repository (docs/heads.md)"
        )
    return weights


def rename_tensors(weights: Weights, prefixes: Mapping[str, str]) -> Weights:
    """Returns the tensors by other names: the first of `prefixes` that a name begins with is replaced."""

    def rename(name: str) -> str:
        found = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        return prefixes.get(found, "") + name.removeprefix(found)

    return {rename(name): value for name, value in weights.items()}


@dataclass(frozen=True, slots=True)
class HeadCheckpoint:
    """The `config` and the `weights` of a head for `target`. `name`: what errors call it."""

    config: Mapping[str, Any]
    weights: Weights
    target: HeadTarget
    name: str = "the head"

    @classmethod
    def read(cls, folder: Path, target: HeadTarget) -> HeadCheckpoint:
        return cls(read_json(folder / "config.json"), read_weights(folder), target, str(folder))

    def check_not_quantized(self) -> None:
        """Raises CannotDraft if the head is quantised."""
        if "quantization" in self.config or any(key.endswith((".scales", "weight_scale")) for key in self.weights):
            raise CannotDraft(f"{self.name} is quantised; use the head as it was published")

    @contextmanager
    def config_errors(self, kind: str) -> Iterator[None]:
        """Raises CannotDraft if this is not a head of `kind`, or is quantised, or if a field of its config.json is
        missing, or has a type or a value that can't be used."""
        try:
            # The config.json of SafeAI's heads is that of a Llama.
            is_official = kind == "eagle3" and "midlayer.hidden_norm.weight" in self.weights
            if head_kind(self.config) != kind and not is_official:
                raise CannotDraft(
                    f"{self.name} is not a head of kind {kind}: its config.json has another architecture or type"
                )
            self.check_not_quantized()
            yield
        except KeyError as error:
            raise CannotDraft(f"{self.name}: config.json lacks {error}; expected a head's sizes") from error
        except (AttributeError, TypeError, ValueError) as error:
            raise CannotDraft(
                f"{self.name}: config.json has a value that can't be used ({error}); expected a head's sizes"
            ) from error

    def sizes(self, kind: type[Sizes], layer: Mapping[str, Any], **computed: object) -> Sizes:
        """Returns sizes and switches by the layers' config and by the weights present, and those that are `computed`.

        Values that are null have their defaults. Positions count from the first feature, so the target's context is the
        limit.
        """
        heads = layer["num_attention_heads"]
        if (activation := layer.get("hidden_act", "silu")) not in MLPS:
            raise ValueError(f"hidden_act {activation!r}, not {' or '.join(MLPS)}")
        found = {
            **layer,
            **flat_rope_fields(layer),
            "num_key_value_heads": layer.get("num_key_value_heads") or heads,
            "head_dim": layer.get("head_dim") or layer["hidden_size"] // heads,
            "context_length": self.target.context_length,
            "qk_norm": "layers.0.self_attn.q_norm.weight" in self.weights,
            "biases": "".join(name for name in "qkvo" if f"layers.0.self_attn.{name}_proj.bias" in self.weights),
            **computed,
        }
        return msgspec.convert({key: value for key, value in found.items() if value is not None}, kind, strict=False)

    def taps(self, lists: Sequence[tuple[Sequence[Any] | None, int]], default: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the tapped layers of the target, as outputs counted from 0.

        They come from the first of `lists` that is not empty; each list is given with the number that it uses for the
        first output. Raises CannotDraft if the target lacks one.
        """
        taps = next((tuple(int(number) - first for number in listed) for listed, first in lists if listed), default)
        if not all(0 <= number < self.target.layers for number in taps):
            raise CannotDraft(
                f"{self.name} reads the target's layers {taps}, but this target has {self.target.layers};"
                " expected a head trained for this target"
            )
        return taps

    def check_target(self, **sizes: int | None) -> None:
        """Raises CannotDraft if the target's config.json has other `sizes`; None: any will do."""
        for name, own in sizes.items():
            if own is not None and (size := int(self.target.config[name])) != int(own):
                raise CannotDraft(
                    f"{self.name} is for a target whose {name} is {own}, but this one's is {size};"
                    " expected a head for this target"
                )

    def check_mask_token(self, token: int | None) -> int:
        """Returns the mask token, or raises CannotDraft if the target lacks it."""
        if token is None or not 0 <= token < self.target.vocab_size:
            raise CannotDraft(
                f"{self.name} has mask token {token}, but this target has {self.target.vocab_size} tokens; expected a"
                " head for this target, with its mask_token_id in config.json"
            )
        return token

    def vocabulary(self, count: int) -> DraftVocabulary:
        """Returns the vocabulary of `count` tokens, by the tensor `d2t`, the offset of each id. Raises CannotDraft if
        it is for another target."""
        d2t, size, name = self.weights.get("d2t"), self.target.vocab_size, self.name
        if d2t is None or (count == size and not d2t.any().item()):
            if count > size:
                raise CannotDraft(f"{name} has {count} tokens and this target {size}; expected a head for this target")
            return DraftVocabulary(size) if count == size else DraftVocabulary(size, mx.arange(count))
        if d2t.shape != (count,):
            raise CannotDraft(f"{name} maps {d2t.shape} tokens and its config says {count}; download the head again")
        ids = mx.arange(count) + d2t.astype(mx.int32)
        listed = cast("list[int]", ids.tolist())
        if min(listed) < 0 or max(listed) >= size:
            raise CannotDraft(f"{name} has tokens beyond this target's {size}; expected a head for its vocabulary")
        return DraftVocabulary(size, ids)

    def load_into(self, head: nn.Module, exact: Container[str] = ()) -> None:
        """Loads the weights, all in the format of the largest one, except that `exact` ones become float32. Afterwards
        the head can be fed tokens at any positions. Raises CannotDraft if some are missing, not supported, have another
        shape, or are not finite.
        """
        wanted, weights, name = dict(tree_flatten(head.parameters())), self.weights, self.name
        if unknown := [key for key in sorted(set(weights) - set(wanted)) if not re.fullmatch(_UNUSED, key)]:
            raise CannotDraft(f"{name} has {', '.join(unknown[:3])}, which is not supported")
        if missing := sorted(set(wanted) - set(weights)):
            raise CannotDraft(f"{name} lacks {', '.join(missing[:3])}; download the head again")
        for key, parameter in wanted.items():
            shape, own = parameter.shape, weights[key]
            if own.shape != shape:
                raise CannotDraft(f"{name}: {key} is {own.shape}, expected {shape} by config.json and this target")
            if not mx.issubdtype(own.dtype, mx.floating):  # float8 is read as uint8
                raise CannotDraft(f"{name} is quantised; use the head as it was published")
        dtype = _compute_dtype(max((weights[key] for key in wanted), key=lambda weight: weight.nbytes).dtype)
        chosen = [(key, weights[key].astype(mx.float32 if key in exact else dtype)) for key in wanted]
        head.load_weights(chosen)
        mx.eval(head.parameters())
        sound = mx.stack([mx.isfinite(value).all() for _, value in chosen])
        if not sound.all().item():
            raise CannotDraft(f"{name} has weights that are NaN or infinite; expected a trained head")
        patch_ropes(head)


def _compute_dtype(stored: mx.Dtype) -> mx.Dtype:
    """Returns the format to compute in: float16 overflows, because heads are trained in bfloat16."""
    if mx.default_device().type == mx.cpu:
        return mx.float32
    return mx.bfloat16 if stored == mx.float16 else stored
