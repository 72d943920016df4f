"""Opens a model's forwards by ONNX Runtime, and checks at load whether they are used.

Logits are compared with the model's own. They may differ by the rounding of float32, or of activations to 8 bits if the
checkpoint is quantised. If activations are rounded, a token's logits must have the same bits however it is fed: alone,
in a chain, in a piece of a prompt, or together with other requests. So chains and other requests can't change a text.
Trees are not fed then, because the sums of their side branches have another order. Knows a model's config and logits;
knows nothing of requests.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from outrider.engine.flat import FlatAttentionMetadata, FlatCache, Segment
from outrider.engine.ort.forward import OrtForward
from outrider.engine.ort.layers import SUPPORTED_MODEL_TYPES, Array, DecoderLayers, Ints, to_numpy
from outrider.engine.ort.sessions import CachedGraph, rounds_per_token
from outrider.protocol.digest import read_json
from outrider.protocol.errors import ModelError, first_line, wrap_model_errors
from outrider.protocol.heads import text_config
from outrider.protocol.worker_link import CPU_KERNELS_VARIABLE

log = logging.getLogger(__name__)

_REFERENCE_TOKENS = 3  # tokens that MLX computes: for a quantised model each takes as long as ten by ONNX Runtime
_TOLERANCE_FLOAT32, _TOLERANCE_INT8 = 1e-3, 0.3  # allowed mean of `deviations`: float32, and 8 bits
_CHECK_TOKENS, _NEIGHBOUR_TOKENS = 11, 3  # tokens: of the checked text, and of texts in the same forward
_FIRST_TOKEN = 13  # of models without BOS

Features = Callable[[Ints], Array | None]
"""A function that returns the features [T, W] of tokens [T]; None for a model, which needs none."""


def is_enabled() -> bool:
    """Returns whether ONNX Runtime may compute here: its device is a CPU, and `CPU_KERNELS_VARIABLE` is not mlx."""
    return os.environ.get(CPU_KERNELS_VARIABLE) != "mlx" and mx.default_device().type == mx.cpu


def open_forward(model: nn.Module, config: Mapping[str, Any], folder: Path) -> OrtForward | None:
    """Returns the model's forwards by ONNX Runtime; None if MLX computes them (the log says why).

    Args:
        model: its parameters may be lazy; quantised ones stay quantised.
        config: its config.json, which has its type and the token that its texts begin with (BOS), if it names one.
        folder: the model's files, by which its graph is kept on disk.

    Raises:
        ModelError: memory ran out. MLX needs more of it, and where OpenBLAS gets none it asks again without end.
    """
    if not is_enabled():
        return None
    model_type: str = config["model_type"]
    if model_type not in SUPPORTED_MODEL_TYPES:
        log.info("MLX computes this %s model: ONNX Runtime supports %s", model_type, ", ".join(SUPPORTED_MODEL_TYPES))
        return None
    try:
        with wrap_model_errors("ONNX Runtime's forwards", logging.INFO):
            decoder, cached = DecoderLayers.of(model, model_type), CachedGraph.of(folder)

            def check(forward: OrtForward) -> None:
                first_token = _first_token(config, folder)
                check_logits(forward, lambda tokens: model(mx.array(tokens[None]))[0], first_token=first_token)

            if rounds_per_token(cached):
                try:
                    return _open_checked(decoder, cached, check, per_token=True)
                except ModelError as error:
                    log.info("activations are rounded in groups, not per token: %s", first_line(error))
                    if cached is not None:
                        cached.remove()
            return _open_checked(decoder, cached, check)
    except ModelError as error:
        if isinstance(error.__cause__, MemoryError) or "bad_alloc" in str(error):
            raise ModelError(f"{folder} does not fit in memory ({first_line(error)}); choose another model") from error
        log.warning("MLX computes this %s model: %s", model_type, first_line(error))
        return None


def _first_token(config: Mapping[str, Any], folder: Path) -> int:
    """Returns BOS, as the model's config, that of its text part or generation_config.json names it, or any token."""
    parts = (config, text_config(config), read_json(folder / "generation_config.json"))
    return next((token for part in parts if isinstance(token := part.get("bos_token_id"), int)), _FIRST_TOKEN)


def _open_checked(
    decoder: DecoderLayers, cached: CachedGraph | None, check: Callable[[OrtForward], None], per_token: bool = False
) -> OrtForward:
    """Opens a model's forwards, and runs `check` unless that was done before. Raises ModelError as `check_logits`."""
    forward = OrtForward(decoder, cached, per_token)
    if forward.cached is not None and (min_rows := forward.cached.min_rows) is not None:
        forward.min_rows = min_rows
        return forward
    check(forward)
    if forward.cached is not None:
        forward.cached.record_check(forward.min_rows)
    return forward


def check_logits(
    forward: OrtForward,
    own: Callable[[Ints], mx.array],
    features: Features = lambda tokens: None,
    first_token: int = _FIRST_TOKEN,
) -> None:
    """Compares logits, and sets `forward.min_rows`: the rows that a forward needs for its bits to be always the same.

    `own` computes the logits [T, V] of a text's first tokens without ONNX Runtime. The text is the model's own, since
    rounding can change the logits of a meaningless one as much as an error would: it begins with `first_token`, and
    each further token is the likeliest of those that it does not have yet.

    Raises:
        ModelError: the logits are not the model's own, or depend on what else is fed in the same forward.
    """
    tokens = _make_check_text(forward, features, first_token)
    feed = partial(feed_in_pieces, forward, tokens, features=features)
    mean = float(deviations(own(tokens[:_REFERENCE_TOKENS]), mx.array(feed((_REFERENCE_TOKENS,)))).mean())
    if not mean <= (_TOLERANCE_INT8 if forward.quantised else _TOLERANCE_FLOAT32):
        raise ModelError(f"its logits differ from the model's own by {mean:.2g} of their standard deviation")
    if not forward.quantised:
        return
    for forward.min_rows in (1, 2):
        whole = feed((_CHECK_TOKENS,))
        if (feed((1, 1, 2, 3, 4)) == whole).all():
            break
    else:
        raise ModelError("its logits depend on how many tokens are fed at once")
    if not (feed((3, 1, _CHECK_TOKENS - 4), neighbours=((0, 2), (2,), (0, 2))) == whole).all():
        raise ModelError("its logits depend on the other texts in the same forward")
    if not (feed((1, 2, 8), all_cores=True) == whole).all():
        raise ModelError("its logits depend on the number of cores")


def _make_check_text(forward: OrtForward, features: Features, first_token: int) -> Ints:
    """Returns a text of different tokens, as `check_logits` describes."""
    caches = [FlatCache(FlatAttentionMetadata()) for _ in forward.shapes]
    tokens = np.array([first_token % forward.vocab_size], np.int32)
    while len(tokens) < _CHECK_TOKENS:
        last, segments = tokens[-1:], [Segment(0, len(tokens) - 1, 1)]
        (logits,) = forward(last, segments, caches, np.arange(1), features=features(last))["logits"]
        logits[tokens] = -np.inf
        tokens = np.append(tokens, np.int32(logits.argmax()))
    return tokens


def deviations(own: mx.array, logits: mx.array) -> Array:
    """Returns the root mean square error of rows of logits [R, V] against a model's own, in units of the larger of
    1 and the standard deviation of its own, [R]. Tokens that the model excludes, as a draft model may, are ignored."""
    known = to_numpy(own) != -np.inf
    own_rows, rows = (np.where(known, to_numpy(each), 0) for each in (own, logits))
    errors: Array = np.sqrt(np.square(rows - own_rows).mean(axis=-1, where=known))
    errors /= np.maximum(own_rows.std(axis=-1, where=known), 1.0)
    return errors


def feed_in_pieces(
    forward: OrtForward,
    tokens: Array,
    counts: Sequence[int],
    all_cores: bool = False,
    features: Features = lambda tokens: None,
    neighbours: Sequence[tuple[int, ...]] = (),
    num_logits: int | None = None,
) -> Array:
    """Returns the logits of one text's tokens, fed in pieces of these sizes.

    `neighbours`: for each piece the rows of other texts in the same forward; this text is in row 1. `num_logits`: only
    the logits of each piece's last tokens, this many.
    """
    caches, logits, start = [FlatCache(FlatAttentionMetadata()) for _ in forward.shapes], [], 0
    for count, rows in zip(counts, neighbours or [()] * len(counts), strict=True):
        own = Segment(1, start, count)
        segments = sorted([own, *(Segment(row, 0, _NEIGHBOUR_TOKENS) for row in rows)], key=lambda segment: segment.row)
        flat = np.concatenate([tokens[segment.start : segment.end] for segment in segments])
        begin = sum(segment.count for segment in segments if segment.row < own.row)
        indices = np.arange(begin, begin + count)[-(num_logits or count) :]
        logits.append(forward(flat, segments, caches, indices, (), all_cores, features(flat))["logits"])
        start += count
    return np.concatenate(logits)
