"""Memory that texts released returns to the system, periodically and preferably when idle."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from outrider.engine import flat, memory
from outrider.engine.flat import FlatAttentionMetadata, FlatCache
from outrider.engine.memory import PeakMemory, release_memory, release_pages

PAGE = 4096


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.skipif(getattr(ctypes.CDLL(None), "malloc_trim", None) is None, reason="only glibc keeps freed memory")
def test_free_memory_between_live_blocks_returns_to_the_system() -> None:
    blocks = [np.ones(4 * PAGE, np.float32) for _ in range(1024)]
    release_memory()
    full = resident()
    kept = blocks[::16]
    del blocks
    release_memory()
    assert full - resident() > 32 * 2**20
    assert all(block[0] == 1 for block in kept)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux returns pages at once")
def test_releasing_an_array_returns_its_memory_and_leaves_its_neighbours() -> None:
    rows = np.ones((3, 4096 * PAGE + 100), np.int8)
    full = resident()
    release_pages(rows[1])
    assert full - resident() > 15 * 2**20
    assert rows[0].all() and rows[2].all()
    rows[1] = 2
    assert (rows[1] == 2).all() and rows[0].all() and rows[2].all()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux returns pages at once")
def test_closing_a_long_text_returns_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    monkeypatch.setattr(flat, "release_pages", lambda array: released.append(array.nbytes))
    cache = FlatCache(FlatAttentionMetadata())
    keys, _ = cache.on_host(2, 4096, mx.zeros((1, 2, 1, 64)))
    cache.release(1)
    assert released == [keys[1].nbytes] * 2
    cache.release(2)  # a row that the buffers do not have
    assert len(released) == 2


def test_memory_is_given_back_when_idle_or_after_many_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released_at: list[int] = []
    monkeypatch.setattr(memory, "release_memory", lambda: released_at.append(number))
    peak = PeakMemory()
    for number in range(200):
        peak.count_ended_text(idle=number % 100 == 99)
    assert released_at == [63, 99, 163, 199]


@pytest.mark.skipif(memory.mx.default_device().type != memory.mx.cpu, reason="on a GPU, MLX counts it")
def test_peak_memory_on_a_cpu_counts_allocations_outside_mlx() -> None:
    peak = PeakMemory()
    peak.restart()
    block = np.ones(16 * 2**20, np.float32)
    assert peak.bytes() >= block.nbytes
