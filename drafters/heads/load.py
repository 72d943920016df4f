"""Loads a head as a drafter in the target's process, and checks it. A new kind of head is a file named after it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from outrider.drafters.heads import early_exit
from outrider.drafters.heads.checkpoint import HeadCheckpoint, HeadTarget, find_target_mismatch
from outrider.drafters.heads.drafter import HeadDrafter, make_for_draft_worker
from outrider.drafters.heads.head import BlockHead, Head
from outrider.drafters.heads.pair_kv_cache import DraftBlock, FeatureKVCache, HeadKVCache, PairKVCache, make_kv_cache
from outrider.engine.flat import Segment
from outrider.engine.hidden_states import HiddenStatePoints, HiddenStateReader
from outrider.engine.loading import LoadedModel, find_model_folder, load_lazily
from outrider.engine.ort.check import check_logits, is_enabled
from outrider.engine.ort.forward import OrtForward
from outrider.engine.ort.layers import DecoderLayers, Ints
from outrider.protocol.digest import model_digest
from outrider.protocol.errors import CannotDraft, ModelError, OutriderError, first_line, wrap_model_errors
from outrider.protocol.heads import TARGET_HEADS

log = logging.getLogger(__name__)

_MIN_AGREEMENT = 0.1  # a head of this target agrees far more often, an untrained one far less often
_MIN_AGREEMENT_GAIN = 0.1
_NUM_TEST_FEATURES = 16  # different features in the check
_SHIFTS = {-1: "one further back", 1: "one further on"}


def read_head(kind: str, path: str, model: LoadedModel, progress: Callable[[str], None]) -> Head:
    """Returns the head of this kind in the folder `path`, for `model`.

    Raises:
        CannotDraft: there is none, or it can't draft for this target.
    """
    try:
        with wrap_model_errors(f"loading the head {path}"):
            folder = find_model_folder(path)
            progress(f"loading {path}")
            module = import_module(f"outrider.drafters.heads.{kind}")  # not each one, as mtp imports many models
            if kind == "mtp":
                return cast("Head", module.read_head(folder, model))
            return cast("Head", module.build(HeadCheckpoint.read(folder, HeadTarget.of(model))))
    except OutriderError as error:
        raise CannotDraft(str(error)) from error


def load(
    kind: str, path: str, model: LoadedModel, progress: Callable[[str], None], unsharded: bool = True
) -> HeadDrafter:
    """Returns such a head as a drafter, whose `note` warns if head and target do not seem to match.

    `unsharded`: the model is whole in this process. With several ranks a head is not tried, because a forward needs all
    ranks, and one that needs the target's output layer is refused, because each rank has a part of it.

    Raises:
        ModelError: there is none, or it can't draft for this target.
    """
    refused = not unsharded and kind in ("dflash", *TARGET_HEADS)
    head = None if refused or kind == "early-exit" else read_head(kind, path, model, progress)
    if not unsharded and (head is None or "lm_head" not in head):
        raise CannotDraft(f"{kind} needs the target's whole output layer; use it without shards, or use eagle3")
    if head is None:
        with wrap_model_errors(f"loading the head {path}"):
            return early_exit.load(find_model_folder(path), model)
    warning, agrees, cpu = "", None, None
    if unsharded:
        cpu = make_ort_forward(head, model)
        progress("testing the head with the target")
        with wrap_model_errors(f"trying the head {path}"):
            trial = measure_agreement(head, model, cpu)
            warnings = filter(None, (find_target_mismatch(find_model_folder(path), model.folder), trial.warning))
            warning, agrees = "; ".join(warnings), trial.own
    drafter = HeadDrafter(head, model.vocab_size, warning, cpu, agrees)
    if cpu is not None:
        head.release()
    return drafter


def load_for_draft_worker(kind: str, path: str, target: str, progress: Callable[[str], None]) -> HeadDrafter:
    """Loads the head of this kind in folder `path` for a draft worker. Of the target in folder `target` only the
    weights that the head needs are read, such as the embedding.

    Raises:
        CannotDraft: there is none, or it can't draft for this target.
    """
    model = load_lazily(target)
    head = read_head(kind, path, model, progress)
    cpu = make_ort_forward(head, model)
    drafter = make_for_draft_worker(head, kind, model.vocab_size, feature_source(head, Path(path), Path(target)), cpu)
    if cpu is not None:
        head.release()
    return drafter


def feature_source(head: Head, folder: Path, target: Path) -> str:
    """Returns the source of the features: the head, the target and the taps, which must be equal on both sides."""
    return f"head {model_digest(folder)} at {','.join(map(str, head.points.keys))} of {model_digest(target)}"


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often the head predicts the target's next token: as configured (`own`), and fed in other ways, by name."""

    own: float
    others: dict[str, float]

    @property
    def warning(self) -> str:
        """A warning that head and target do not match, or an empty string."""
        best = max(self.others, key=self.others.__getitem__, default="")
        if best and self.others[best] > self.own + _MIN_AGREEMENT_GAIN:
            return (
                f"the head agrees with the target on {self.own:.0%} of the tokens of a trial, and on"
                f" {self.others[best]:.0%} with {best}: it may have been trained on other inputs than its config.json"
                " gives; few drafts will be accepted"
            )
        if self.own < _MIN_AGREEMENT:
            return (
                f"the head agrees with the target on {self.own:.0%} of the tokens of a trial; expected one that was"
                " trained for this target: few drafts will be accepted"
            )
        return ""


def measure_agreement(head: Head, model: LoadedModel, cpu: OrtForward | None = None) -> Agreement:
    """Generates a text with the target and lets the head predict it, fed as configured and in a few other ways. `cpu`:
    see `make_kv_cache`.

    Formats pair rows with tokens and count layers in different ways; a mistake raises no error and only lowers the
    acceptance rate.
    """
    text = early_exit.generate_trial_text(model)
    own = _accuracy(head, make_kv_cache(head, cpu), model, text)
    others = {
        f"tokens {name}": _accuracy(head, make_kv_cache(head, cpu), model, text, tokens=by)
        for by, name in _SHIFTS.items()
    }
    if isinstance(head, BlockHead):
        by = "a mask" if head.from_anchor else "the last one's own row"
        wrong = FeatureKVCache(head, not head.from_anchor)
        others[f"the first token drafted by {by}"] = _accuracy(head, wrong, model, text)
    for name, points in _alternative_points(head.points):
        try:
            others[name] = _accuracy(head, make_kv_cache(head, cpu), model, text, points)
        except ModelError:  # there is no such layer
            continue
    return Agreement(own, others)


def _alternative_points(points: HiddenStatePoints) -> Iterator[tuple[str, HiddenStatePoints]]:
    for by, name in _SHIFTS.items() if points.layers else ():
        yield f"layers {name}", replace(points, layers=tuple(number + by for number in points.layers))
    if points.before_norm != points.after_norm:
        other = replace(points, before_norm=points.after_norm, after_norm=points.before_norm)
        yield "rows from the other side of the norm", other


def _accuracy(
    head: Head,
    kv_cache: HeadKVCache,
    model: LoadedModel,
    text: list[int],
    points: HiddenStatePoints | None = None,
    tokens: int = 0,
) -> float:
    """Returns how often the head is right with rows from these points, and with the tokens shifted by `tokens`."""
    logits, rows = early_exit.read_rows(model, text, HiddenStateReader(points or head.points, head.fuse))
    count = len(text) - 1 - max(tokens, 0)
    following = slice(1 + tokens, count + 1 + tokens)
    predicted = _predict_tokens(kv_cache, mx.array(text[following], mx.int32), rows[:count])
    return cast(float, (predicted == mx.argmax(logits[following], axis=-1)).mean().item())


def _predict_tokens(kv_cache: HeadKVCache, tokens: mx.array, features: mx.array) -> mx.array:
    """Returns the likeliest token after each pair of a text, given the pairs up to there [T]."""
    sequence, count, slots = kv_cache.open(), tokens.shape[0], []
    if isinstance(kv_cache, PairKVCache):
        _, logits = kv_cache.feed(tokens, features, [Segment(sequence.row, 0, count, long=True)])
        return mx.argmax(logits, axis=-1)
    for place, token in enumerate(cast("list[int]", tokens.tolist())):
        kv_cache.read_features(features[place : place + 1], [Segment(sequence.row, place, 1)])
        block = DraftBlock(place + 1, [token], 1)
        slots.append(kv_cache.open_blocks([(sequence.row, np.arange(place + 1, dtype=np.int32), [block])]))
    hidden, logits = (mx.concatenate(list(parts)) for parts in zip(*slots, strict=True))
    link = kv_cache.head.link
    return mx.argmax(logits, axis=-1) if link is None else link.best(logits, tokens, hidden)


def make_ort_forward(head: Head, target: LoadedModel) -> OrtForward | None:
    """Returns the head's forwards by ONNX Runtime, compared with MLX's; None: MLX computes them (the log says why).

    Weights and activations are rounded to 8 bits, which changes a draft now and then and halves a drafted token's time.
    """
    if not is_enabled():
        return None
    try:
        with wrap_model_errors("ONNX Runtime's forwards of the head", logging.INFO):
            layers = head.decoder(DecoderLayers.of(target.model, target.model_type))
            forward = OrtForward(replace(layers, factor=1.0, residual_factor=1.0, output_factor=1.0, rounded=True))
            width = head.points.count * int(HeadTarget.of(target).config["hidden_size"])
            rows = np.random.default_rng(0).standard_normal((_NUM_TEST_FEATURES, width))
            features = np.array(head.fuse(mx.array(rows, mx.float32)).astype(mx.float32))

            def own(tokens: Ints) -> mx.array:
                kv_cache = PairKVCache(cast(Any, head))
                segment = Segment(kv_cache.open().row, 0, len(tokens))
                return kv_cache.feed(tokens, features[tokens % _NUM_TEST_FEATURES], [segment])[1]

            check_logits(forward, own, lambda tokens: features[tokens % _NUM_TEST_FEATURES])
            return forward
    except ModelError as error:
        log.info("MLX computes this head: %s", first_line(error))
        return None
