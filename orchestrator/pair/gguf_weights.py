"""Blocks of a GGUF file as MLX's quantised matrices: levels, scales and biases in groups of 32, w = scale q + bias.

Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 keep their very numbers; Q4_K and Q5_K keep their levels, and each group's scale and
minimum, a product of two numbers there, is rounded to half precision. All other block types have no such form (groups
of 16, curves): they are quantised anew, with two bits more than they had, or kept in half precision. Works on whole
rows; knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.orchestrator.pair.gguf import GgufFile
from outrider.protocol.errors import ModelError

GROUP = 32
PLAIN = ("F32", "F16", "BF16")
_AT_ONCE = 2**24
"""Weights unpacked at a time, for they take some ten bytes each on the way."""
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Grid:
    """Rows of weights on their groups' grids. `levels`: one byte a weight; `scales`, `biases`: one float16 a group."""

    levels: Bytes
    scales: NDArray[np.float16]
    biases: NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor as it is stored: `parts` by their suffix, `bits` None where it is not quantised."""

    parts: dict[str, NDArray[Any]]
    bits: int | None = None


def bits_of(kind: str, keep_precision: bool) -> int | None:
    """In how many bits MLX holds what has this type in the file; None: in no grid."""
    if kind in _GRIDS:
        return _GRIDS[kind][0]
    return None if keep_precision or kind in PLAIN else _ANEW.get(kind)


def convert(file: GgufFile, name: str, bits: int | None, dtype: str) -> Matrix:
    """A tensor of two dimensions or one. `dtype`, "float16", "bfloat16" or "float32", is what is not quantised in.

    Raises:
        ModelError: its type can't be read, or it holds numbers beyond half precision.
    """
    place = file.tensors[name]
    kind, raw = place.kind, file.bytes_of(name)
    if len(place.shape) == 1:
        bits = None
    if bits is None:
        found = np.concatenate([in_dtype(_dense(file, name, kind, rows), dtype) for rows in _pieces(raw, place.shape)])
        return Matrix({"weight": found.reshape(place.shape)})
    grids = [_grid(file, name, kind, rows, bits) for rows in _pieces(raw, place.shape)]
    return Matrix(
        {
            "weight": np.concatenate([packed(grid.levels, bits) for grid in grids]),
            "scales": np.concatenate([grid.scales for grid in grids]),
            "biases": np.concatenate([grid.biases for grid in grids]),
        },
        bits,
    )


def packed(levels: Bytes, bits: int) -> NDArray[np.uint32]:
    """Levels one after another in `bits` bits each, the lowest first, as MLX packs them."""
    if bits == 8:
        return levels.view(np.uint32)
    if bits == 4:
        return np.ascontiguousarray(levels[:, ::2] | levels[:, 1::2] << 4).view(np.uint32)
    single = np.unpackbits(levels[..., None], axis=-1, count=bits, bitorder="little")
    return np.packbits(single.reshape(len(levels), -1), axis=-1, bitorder="little").view(np.uint32)


def anew(weights: Floats, bits: int) -> Grid:
    """The evenly spaced grid from the least to the greatest of each group, and the levels next to the weights on it."""
    groups = weights.reshape(len(weights), -1, GROUP)
    biases = groups.min(-1).astype(np.float16)
    scales = ((groups.max(-1) - biases.astype(np.float32)) / (2**bits - 1)).astype(np.float16)
    step, least = scales.astype(np.float32)[..., None], biases.astype(np.float32)[..., None]
    levels = np.divide(groups - least, step, out=np.zeros_like(groups), where=step > 0)
    return Grid(np.clip(np.rint(levels), 0, 2**bits - 1).astype(np.uint8).reshape(weights.shape), scales, biases)


def in_dtype(weights: Floats, dtype: str) -> NDArray[Any]:
    """Rounded to nearest; bfloat16, which numpy does not have, as its bits."""
    if dtype != "bfloat16":
        return weights.astype(dtype)
    bits = np.ascontiguousarray(weights, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _pieces(raw: Bytes, shape: tuple[int, ...]) -> Iterator[Bytes]:
    rows = max(1, _AT_ONCE // shape[-1])
    for first in range(0, len(raw), rows):
        yield raw[first : first + rows]


def _dense(file: GgufFile, name: str, kind: str, rows: Bytes) -> Floats:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    if kind == "F32":
        return rows.view("<f4")
    if kind == "F16":
        return rows.view("<f2").astype(np.float32)
    try:
        return dequantize(rows, GGMLQuantizationType[kind])
    except NotImplementedError:
        raise ModelError(
            f"{file.path}: the tensor {name} is of type {kind}, which can't be read; choose a file of another"
            " quantization, such as Q4_K_M or Q8_0"
        ) from None


def _grid(file: GgufFile, name: str, kind: str, rows: Bytes, bits: int) -> Grid:
    if kind not in _GRIDS:
        return anew(_dense(file, name, kind, rows), bits)
    width = _GRIDS[kind][1]
    with np.errstate(over="ignore", invalid="ignore"):
        levels, scales, biases = _GRIDS[kind][2](rows.reshape(-1, width))
        halves = [part.astype(np.float16).reshape(len(rows), -1) for part in (scales, biases)]
    if not all(np.isfinite(part).all() for part in halves):
        raise ModelError(f"{file.path}: the tensor {name} holds numbers beyond half precision; download the file again")
    return Grid(levels.reshape(len(rows), -1), *halves)


_Unpacked = tuple[Bytes, Floats, Floats]


def _half(blocks: Bytes, first: int) -> Floats:
    return np.ascontiguousarray(blocks[:, first : first + 2]).view("<f2").astype(np.float32)


def _nibbles(packed_bytes: Bytes) -> Bytes:
    """Low halves first, then high ones: ggml's order in a block."""
    return np.concatenate([packed_bytes & np.uint8(15), packed_bytes >> np.uint8(4)], axis=-1)


def _fifth_bits(blocks: Bytes, first: int) -> Bytes:
    return np.unpackbits(blocks[:, first : first + 4], axis=-1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> _Unpacked:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 2:]), scale, -8 * scale


def _q4_1(blocks: Bytes) -> _Unpacked:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Bytes) -> _Unpacked:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2), scale, -16 * scale


def _q5_1(blocks: Bytes) -> _Unpacked:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> _Unpacked:
    scale = _half(blocks, 0)
    return blocks[:, 2:] ^ np.uint8(0x80), scale, -128 * scale


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scale and bias of each of the eight groups in a block of 256."""
    from gguf.quants import Q4_K

    scales, minima = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    return _half(blocks, 0) * scales, -_half(blocks, 2) * minima


def _k_nibbles(packed_bytes: Bytes) -> Bytes:
    """32 bytes hold a group in their low halves and the next one in their high halves."""
    return _nibbles(packed_bytes.reshape(-1, 32)).reshape(len(packed_bytes), 256)


def _q4_k(blocks: Bytes) -> _Unpacked:
    return _k_nibbles(blocks[:, 16:]), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> _Unpacked:
    group_bits = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[:, None, 16:48] >> group_bits & np.uint8(1)).reshape(len(blocks), 256) << np.uint8(4)
    return _k_nibbles(blocks[:, 48:]) | fifth, *_k_scales(blocks)


_GRIDS: dict[str, tuple[int, int, Callable[[Bytes], _Unpacked]]] = {
    "Q4_0": (4, 18, _q4_0),
    "Q4_1": (4, 20, _q4_1),
    "Q5_0": (5, 22, _q5_0),
    "Q5_1": (5, 24, _q5_1),
    "Q8_0": (8, 34, _q8_0),
    "Q4_K": (4, 144, _q4_k),
    "Q5_K": (5, 176, _q5_k),
}
"""Types with a grid of their own: bits, bytes a block, and how blocks become levels, scales and biases."""
_ANEW = {
    **dict.fromkeys(("Q2_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "TQ1_0", "TQ2_0"), 4),
    **dict.fromkeys(("Q3_K", "IQ3_XXS", "IQ3_S"), 5),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"), 6),
    "Q6_K": 8,
}
"""All others, and the bits in which they are quantised anew."""
