"""Loads a head as a drafter in the target's process, and checks it. A new kind of head is a file named after it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from outrider.drafters.heads import early_exit
from outrider.drafters.heads.checkpoint import HeadCheckpoint, HeadTarget, find_target_mismatch
from outrider.drafters.heads.drafter import HeadDrafter
from outrider.drafters.heads.head import Head
from outrider.drafters.heads.pair_kv_cache import PairKVCache
from outrider.drafters.work_ahead import run_together
from outrider.engine.flat import Segment
from outrider.engine.hidden_states import HiddenStateReader
from outrider.engine.loading import LoadedModel, load_lazily
from outrider.engine.ort.check import check_logits, is_enabled
from outrider.engine.ort.forward import OrtForward
from outrider.engine.ort.layers import DecoderLayers, Ints
from outrider.protocol.digest import model_digest
from outrider.protocol.errors import CannotDraft, ModelError, OutriderError, first_line, wrap_model_errors
from outrider.protocol.heads import TARGET_HEADS
from outrider.protocol.messages import InProcess
from outrider.protocol.sampling import SamplingParams

log = logging.getLogger(__name__)

_NUM_TEST_FEATURES = 16  # different features in the check


def read_head(kind: str, path: str, model: LoadedModel, progress: Callable[[str], None]) -> Head:
    """Returns the head of this kind in the folder `path`, for `model`.

    Raises:
        CannotDraft: there is none, or it can't draft for this target.
    """
    try:
        with wrap_model_errors(f"loading the head {path}"):
            progress(f"loading {path}")
            module = import_module(f"outrider.drafters.heads.{kind}")  # not each one, as mtp imports many models
            if kind == "mtp":
                return cast("Head", module.read_head(Path(path), model))
            return cast("Head", module.build(HeadCheckpoint.read(Path(path), HeadTarget.of(model))))
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
            return early_exit.load(Path(path), model)
    cpu = make_ort_forward(head, model) if unsharded else None
    drafter = HeadDrafter(head, model.vocab_size, cpu)
    if cpu is not None:
        head.release()
    if unsharded:
        progress("testing the head with the target")
        with wrap_model_errors(f"trying the head {path}"):
            drafter.agreement = agreement = measure_agreement(drafter, model)
        notes = [find_target_mismatch(Path(path), model.folder)]
        if agreement < early_exit.MIN_AGREEMENT:
            notes.append(
                f"the head agrees with the target on {agreement:.0%} of the tokens of a trial; expected one that was"
                " trained for this target: few drafts will be accepted"
            )
        drafter.note = "; ".join(filter(None, notes))
        drafter.is_weak = bool(drafter.note)
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
    drafter = HeadDrafter(head, model.vocab_size, cpu, kind, feature_source(head, Path(path), Path(target)))
    if cpu is not None:
        head.release()
    return drafter


def feature_source(head: Head, folder: Path, target: Path) -> str:
    """Returns the source of the features: the head, the target and the taps, which must be equal on both sides."""
    return f"head {model_digest(folder)} at {','.join(map(str, head.points))} of {model_digest(target)}"


def measure_agreement(drafter: HeadDrafter, model: LoadedModel) -> float:
    """Returns how often the head predicts the token that the target predicts, after each token of a text of the
    target's.

    Formats pair rows with tokens and count layers in different ways; a mistake raises no error and only lowers the
    acceptance rate.
    """
    text = early_exit.generate_trial_text(model)
    logits, rows = early_exit.read_rows(model, text, HiddenStateReader(drafter.head.points, drafter.head.fuse))
    truth = cast("list[int]", mx.argmax(logits, axis=-1).tolist())
    draft, right = drafter.open_draft(SamplingParams()), 0
    for place in range(len(text) - 1):
        draft.add_features(place, rows[place : place + 1])
        ((found,), _) = run_together([draft.turn(text[: place + 2], InProcess(1)).steps])
        if isinstance(found, OutriderError):
            raise found
        right += found.chain == (truth[place + 1],)
    draft.close(discard=True)
    return right / (len(text) - 1)


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
            width = len(head.points) * int(HeadTarget.of(target).config["hidden_size"])
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
