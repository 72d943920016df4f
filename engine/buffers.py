"""Buffers of keys and values [rows, H, columns, D] that grow by more than is asked, so that it is seldom."""

from __future__ import annotations

import mlx.core as mx

_STEP = 256  # columns a buffer grows by
EARLY = 128  # columns over which the layers' buffers grow one after the other


def with_room(buffer: mx.array | None, rows: int, columns: int, like: mx.array, early: int = 0) -> mx.array:
    """`buffer` itself, or a copy of it with place for so many rows and columns.

    It grows so many columns `early`: where each layer has another number, no forward copies them all.
    """
    had_rows, had_columns = (0, 0) if buffer is None else (buffer.shape[0], buffer.shape[2])
    columns += early if buffer is not None else 0
    if rows <= had_rows and columns <= had_columns and buffer is not None:
        return buffer
    rows = had_rows if rows <= had_rows else max(rows, 2 * had_rows)
    columns = had_columns if columns <= had_columns else -(-(columns + columns // 2) // _STEP) * _STEP
    grown = mx.zeros((rows, like.shape[1], columns, like.shape[3]), like.dtype)
    if buffer is not None:
        grown[:had_rows, :, :had_columns] = buffer
    return grown
