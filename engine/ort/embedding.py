"""A model's embedding in numpy. With a cached graph the rows stay in a file, since a text needs few of them.

The file is read, not mapped: the system would map 64 KiB around each row, and so most of the file after a few texts.
Its pages are in the system's page cache, which all processes share.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from io import FileIO
from pathlib import Path

import mlx.nn as nn
import numpy as np

from outrider.engine.ort.layers import Array, levels, to_numpy
from outrider.engine.positions import Ints
from outrider.protocol.digest import replace_file
from outrider.protocol.errors import ModelError, first_line

log = logging.getLogger(__name__)

_FILE = "embedding.bin"


class Embedding:
    """An embedding [V, H]. Each row has its levels and then the scales and biases of its groups, or its float32 values.

    The layer's weights are read only if there is no file of rows in `folder`, or `folder` is None.
    """

    def __init__(self, layer: nn.Module, factor: float, folder: Path | None) -> None:
        self._factor = np.float32(factor)
        self._groups, self._bits, width = 0, 32, int(layer.weight.shape[1])
        if isinstance(layer, nn.QuantizedEmbedding):
            self._groups, self._bits = int(layer.scales.shape[1]), layer.bits if layer.bits in (4, 8) else 8
            width = width * 32 // layer.bits
        self._level_bytes = width * self._bits // 8
        self._row_bytes = self._level_bytes + 8 * self._groups
        self._file = _open_file(folder, layer, int(layer.weight.shape[0]) * self._row_bytes)
        self._rows = _to_rows(layer) if self._file is None else np.empty(0, np.uint8)

    def __call__(self, tokens: Ints) -> Array:
        """Returns the rows [T, H] of tokens [T]."""
        rows = self._read(tokens)
        rows = self._dequantise(rows) if self._groups else rows.view(np.float32)
        return rows * self._factor if self._factor != 1 else rows

    def _dequantise(self, stored: Array) -> Array:
        split = self._level_bytes, self._level_bytes + 4 * self._groups
        q, *parts = np.split(stored, split, axis=1)
        scales, biases = (np.ascontiguousarray(part).view(np.float32) for part in parts)
        if self._bits == 4:
            q = np.stack([q & 15, q >> 4], axis=-1)
        apart: Array = q.reshape(len(stored), self._groups, -1) * scales[..., None]
        return (apart + biases[..., None]).reshape(len(stored), -1)

    def _read(self, tokens: Ints) -> Array:
        """Returns the rows [T, size of a row] of tokens [T]."""
        if self._file is None:
            return np.asarray(self._rows[tokens])
        size, file = self._row_bytes, self._file.fileno()
        content = b"".join(os.pread(file, size, token * size) for token in tokens.tolist())
        if len(content) < len(tokens) * size:
            raise ModelError("the file of the model's embedding was truncated; restart to write it again")
        return np.frombuffer(content, np.uint8).reshape(len(tokens), size)


def _to_rows(layer: nn.Module) -> Array:
    """Returns the rows of an embedding as bytes [V, size of a row]."""
    if not isinstance(layer, nn.QuantizedEmbedding):
        return to_numpy(layer.weight).view(np.uint8)
    q, _ = levels(layer)
    return np.concatenate([q, to_numpy(layer.scales).view(np.uint8), to_numpy(layer.biases).view(np.uint8)], axis=1)


def _open_file(folder: Path | None, layer: nn.Module, size: int) -> FileIO | None:
    """Opens the file of rows, of `size` bytes, and writes it if there is none of this size; None: it can't be kept."""
    if folder is None:
        return None
    path = folder / _FILE
    with suppress(OSError):
        if path.stat().st_size == size:
            return FileIO(path)
    try:
        replace_file(path, _to_rows(layer).tobytes())
        return FileIO(path)
    except OSError as error:
        log.info("the model's embedding is not kept on disk: %s", first_line(error))
        return None
