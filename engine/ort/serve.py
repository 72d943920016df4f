"""Whether ONNX Runtime makes a model's forwards on this CPU, tried at load against the model's own logits.

What it makes must be the model's: up to the rounding of float32, or of activations to 8 bits where the checkpoint is
quantised. There its products do not depend on how many rows they have, and nor may the whole forward, bit by bit.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import platform
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import onnxruntime

from outrider.engine.ort.forward import Forward, Layers, Part, room
from outrider.engine.ort.graph import FAMILIES, Array
from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.protocol.guard import first_line, named_errors
from outrider.protocol.worker_process import CPU_KERNELS, KERNELS

log = logging.getLogger(__name__)

_OWN = 3  # tokens: MLX takes as long for each of a quantised model as ONNX Runtime for ten
_EXACT, _ROUNDED = 1e-3, 0.5  # root mean square of the logits' deviation: float32, and tokens of no meaning in 8 bits
_WIDE, _NEIGHBOUR = 11, 3
_FLAGS = ("avx512_vnni", "avx512f", "avx_vnni", "avx2")


def serve(model: nn.Module, model_type: str, masked: bool) -> Forward | None:
    """What makes the model's forwards; None: MLX does, and the log says why.

    Args:
        model: its parameters may be lazy; quantised ones stay what they are.
        masked: trees of drafts are fed.

    Raises:
        InvalidRequest: `CPU_KERNELS` names none of `KERNELS`.
    """
    chosen = os.environ.get(CPU_KERNELS) or "auto"
    if chosen not in KERNELS:
        raise InvalidRequest(f"{CPU_KERNELS} is {chosen!r}; expected {' or '.join(KERNELS)}")
    if chosen == "mlx" or mx.default_device().type != mx.cpu:
        return None
    if model_type not in FAMILIES:
        log.info("MLX makes the forwards of a %s model: ONNX Runtime serves %s", model_type, ", ".join(FAMILIES))
        return None
    try:
        with named_errors("ONNX Runtime's forwards", logging.INFO):
            forward = Forward(model, model_type, masked)
            check(model, forward)
            return forward
    except ModelError as error:
        log.warning("MLX makes the forwards of this %s model: %s", model_type, first_line(error))
        return None


def kernels() -> str:
    """What a rounded forward's bits depend on besides the model: another may choose another token."""
    flags: set[str] = set()
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        flags = set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())
    found = next((flag for flag in _FLAGS if flag in flags), platform.machine())
    return f"int8-onnxruntime-{onnxruntime.__version__}-{found.replace('_', '-')}"


def give_back() -> None:
    """Memory that was needed to build a session only."""
    gc.collect()
    mx.clear_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def check(model: nn.Module, forward: Forward) -> None:
    """Finds out how many rows a forward must have for its bits to be always the same, and tells `forward`.

    Raises:
        ModelError: its logits are not the model's, or depend on what is fed beside a token.
    """
    tokens = np.array([(7919 * i + 13) % forward.vocab_size for i in range(_WIDE)], np.int32)
    own = np.array(model(mx.array(tokens[None, :_OWN]))[0].astype(mx.float32))
    found = alone(forward, tokens, (_OWN,))
    said = ~(own == -np.inf).all(axis=0)  # a draft may be able to say fewer tokens
    own, found = own[:, said], found[:, said]
    deviation = np.maximum(own.std(axis=-1), 1.0)
    worst = float((np.sqrt(np.square(found - own).mean(axis=-1)) / deviation).mean())
    if not worst <= (_ROUNDED if forward.quantised else _EXACT):
        raise ModelError(f"its logits are not the model's own, by {worst:.2g} of their deviation")
    if not forward.quantised:
        return
    for forward.least in (1, 2):
        whole = alone(forward, tokens, (_WIDE,))
        if (alone(forward, tokens, (1, 1, 2, 3, 4)) == whole).all():
            break
    else:
        raise ModelError("its bits depend on how many tokens are fed at once")
    if not (_beside(forward, tokens) == whole).all():
        raise ModelError("its bits depend on which texts are fed beside a text")


def alone(forward: Forward, tokens: Array, counts: tuple[int, ...]) -> Array:
    """Logits of tokens fed in pieces of so many, one text."""
    layers = _buffers(forward, 1)
    found, start = [], 0
    for count in counts:
        part = Part(0, start, np.arange(start, start + count))
        found.append(forward(tokens[start : start + count], [part], layers, np.arange(count))["logits"])
        start += count
    return np.concatenate(found)


def _beside(forward: Forward, tokens: Array) -> Array:
    """Logits of tokens fed in three pieces, with others before and behind, one of them idle at times."""
    layers = _buffers(forward, 3)
    found, start = [], 0
    for number, count in enumerate((3, 1, _WIDE - 4)):
        own = Part(1, start, np.arange(start, start + count))
        others = [Part(row, 0, np.arange(_NEIGHBOUR)) for row in ((0, 2), (2,), (0, 2))[number]]
        parts = sorted([own, *others], key=lambda part: part.row)
        flat = np.concatenate([tokens[start : start + count] if p is own else tokens[:_NEIGHBOUR] for p in parts])
        begin = sum(part.count for part in parts if part.row < 1)
        found.append(forward(flat, parts, layers, np.arange(begin, begin + count))["logits"])
        start += count
    return np.concatenate(found)


def _buffers(forward: Forward, rows: int) -> Layers:
    _, columns = room([Part(0, 2 * _WIDE, np.arange(_WIDE))])
    like = [(rows, shape.kv_heads, columns, shape.width) for shape in forward.shapes]
    return [(np.zeros(shape, np.float32), np.zeros(shape, np.float32)) for shape in like]
