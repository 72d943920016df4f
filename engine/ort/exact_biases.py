"""Puts the exact biases of quantised weights into ONNX Runtime's packed weights.

`MatMulNBits` has integer zero points only, but the biases of most checkpoints are not integer multiples of their
scales. On x86 its packed weights contain a float32 number for each group, scale times zero point, which the kernels
apply as the bias. ONNX Runtime maps packed weights from a file and, when it opens a session, compares them with what it
packs itself. So the biases are replaced afterwards: `write` makes a file of the pages that contain them, and `apply`
maps these pages over those of the sessions that have been opened.

The numbers are found by their values. If they are not found, as on another kind of CPU, `write` raises an error, and
the graph gets further columns for the biases (`graph.Builder`), which cost a fifteenth of a forward. Linux only.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from outrider.engine.ort.layers import Array
from outrider.protocol.digest import file_hash
from outrider.protocol.errors import ModelError

IS_SUPPORTED = sys.platform == "linux"
_PAGES_FILE, _INDEX_FILE = "biases.bin", "biases.json"
_INTERLEAVED_ROWS = 16  # rows whose biases lie next to each other, group by group
_MAP_FIXED = 0x10
_PAGE_BYTES = mmap.PAGESIZE


Run = tuple[int, int, int]
"""A product's pages: their offsets in the files of packed weights and of biases, and their size in bytes. Products may
share a page, of which all copies are equal."""


def write(graph: Path, weights: Path, biases: Mapping[str, tuple[Array, Array]]) -> None:
    """Writes the pages of `weights` that contain biases, with the exact biases, to files next to the graph.

    Args:
        biases: by the name of a product's levels, [N, groups]: those of its integer zero points, and the exact ones.

    Raises:
        ModelError: the packed weights do not contain them.
        OSError: the files can't be written.
    """
    import onnx  # only here: later loads of the model do without

    packed = {
        initializer.name: entry.value
        for initializer in onnx.load(os.fspath(graph), load_external_data=False).graph.initializer
        for entry in initializer.external_data
        if entry.key.startswith("prepacked")
    }
    content, places = np.memmap(weights, np.uint8, "c"), set[tuple[int, int]]()  # changes stay in memory
    for name, (rounded, exact) in biases.items():
        # such as "MatMulNBits+952075015912901200|294144;437886;0": a hash, then offset, length and padding
        begin, length = map(int, packed.get(name, "|0;0;").rpartition("|")[2].split(";")[:2])
        replaced = _replace(content[begin : begin + length], rounded, exact)
        if replaced is None:
            raise ModelError("its packed weights have no place for exact biases")
        pages = _pages(*(begin + byte for byte in replaced))
        places.add((pages.start, pages.stop))
    runs = list[Run]()
    with open(graph.parent / _PAGES_FILE, "wb") as file:
        for first, stop in sorted(places):
            source, length = first * _PAGE_BYTES, (stop - first) * _PAGE_BYTES
            runs.append((source, file.tell(), length))
            file.write(content[source : source + length].tobytes().ljust(length, b"\0"))
    index = {"sha256": file_hash(graph.parent / _PAGES_FILE), "runs": runs}
    (graph.parent / _INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")


def apply(folder: Path, weights: Path) -> bool:
    """Gives all sessions that were opened from these weights the exact biases in the folder; returns whether it has
    any.

    Raises:
        ModelError: its files are damaged, or the weights are not mapped into memory.
    """
    if not any((folder / name).exists() for name in (_INDEX_FILE, _PAGES_FILE)):
        return False
    try:
        index = json.loads((folder / _INDEX_FILE).read_text(encoding="utf-8"))
        runs: list[Run] = [(int(source), int(place), int(length)) for source, place, length in index["runs"]]
        if file_hash(folder / _PAGES_FILE) != index["sha256"]:
            raise ModelError("its file of biases is damaged")
        begins, ends = [source for source, _, _ in runs], [source + length for source, _, length in runs]
        missing = {page for begin, end in zip(begins, ends, strict=True) for page in _pages(begin, end)}
        with open(folder / _PAGES_FILE, "rb") as file:
            for address, start, stop in _mappings(weights):
                for source, place, length in runs[bisect_right(ends, start) : bisect_left(begins, stop)]:
                    first, end = max(start, source), min(stop, source + length)
                    _map_over(address + first - start, end - first, file.fileno(), place + first - source)
                    missing.difference_update(_pages(first, end))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"its file of biases can't be used: {error}") from error
    if missing:
        raise ModelError("its packed weights are not mapped into memory")
    return True


def _replace(packed: Array, rounded: Array, exact: Array) -> tuple[int, int] | None:
    """Replaces biases [N, groups] in the bytes of a product's packed weights; returns their first byte and their end.

    None: the rounded ones were not found.
    """
    whole = rounded[: len(rounded) // _INTERLEAVED_ROWS * _INTERLEAVED_ROWS]
    first = _to_bytes(packed[: len(packed) // 4 * 4]).find(_to_bytes(_interleave(whole))) if len(whole) else -1
    used = _interleave(np.ones(rounded.shape, bool))
    end = first + 4 * len(used)
    if first < 0 or end > len(packed):
        return None
    numbers = packed[first:end].view(np.float32)
    if not (numbers[used] == _interleave(rounded)[used]).all():
        return None
    numbers[used] = _interleave(exact)[used]
    return first, end


def _interleave(numbers: Array) -> Array:
    """Returns numbers [N, groups] in the order of packed weights, rows padded."""
    padded = np.pad(numbers, ((0, -len(numbers) % _INTERLEAVED_ROWS), (0, 0)))
    return padded.reshape(-1, _INTERLEAVED_ROWS, numbers.shape[1]).transpose(0, 2, 1).reshape(-1)


def _to_bytes(numbers: Array) -> bytes:
    """Returns the bytes of float32 numbers; zeros have no sign."""
    bits = numbers.view(np.uint32)
    return np.where(bits == 2**31, np.uint32(0), bits).tobytes()


def _pages(first: int, end: int) -> range:
    """Returns the pages that contain bytes from `first` to before `end`."""
    return range(first // _PAGE_BYTES, -(-end // _PAGE_BYTES))


def _mappings(file: Path) -> Iterator[tuple[int, int, int]]:
    """Yields where this process has mapped a file: the address, and the first and the end of the file's bytes."""
    path = os.path.realpath(file)
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        fields = line.split(maxsplit=5)  # addresses, permissions, offset, device, inode, path
        if len(fields) == 6 and fields[5] == path:
            begin, end = (int(address, 16) for address in fields[0].split("-"))
            offset = int(fields[2], 16)
            yield begin, offset, offset + end - begin


def _map_over(address: int, length: int, file: int, offset: int) -> None:
    """Maps a part of a file, privately, in place of what is mapped at an address, as Python's own mmap can't."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    protection, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    if function(address, length, protection, kind, file, offset) != address:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
