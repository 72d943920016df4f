"""Memory that texts released returns to the system, periodically and preferably when idle."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from outrider.engine import flat, memory
from outrider.engine.flat import FlatAttentionMetadata, FlatCache
from outrider.engine.kv_cache import Feed, FlatKVCache
from outrider.engine.load_checks import measure_sequence_cost, open_kv_cache
from outrider.engine.loading import LoadedModel
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
    cache = FlatCache(FlatAttentionMetadata())
    keys, _ = cache.on_host(2, 4096, mx.zeros((1, 2, 1, 64)))
    released: list[int] = []
    monkeypatch.setattr(flat, "release_pages", lambda array: released.append(array.nbytes))
    cache.release(1)
    assert sum(released) == 2 * keys[1].nbytes
    cache.release(2)  # a row that the buffers do not have
    assert sum(released) == 2 * keys[1].nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux returns pages at once")
def test_short_texts_next_to_a_long_one_take_no_memory_for_its_length() -> None:
    """All texts have rows of the same buffers, as long as the longest text."""
    cache, like = FlatCache(FlatAttentionMetadata()), mx.zeros((1, 2, 1, 64))
    for buffer in cache.on_host(1, 2**15, like):
        buffer[0] = 1
    release_memory()
    before = resident()
    keys, values = cache.on_host(8, 2**15, like)
    release_memory()
    assert resident() - before < keys.nbytes // 4
    assert keys[0].all() and values[0].all() and not keys[1:].any()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux returns pages at once")
def test_short_text_that_moves_to_the_row_of_a_long_one_returns_its_memory(loaded: Callable[..., LoadedModel]) -> None:
    kv_cache = open_kv_cache(loaded("llama", num_key_value_heads=4, head_dim=128))
    long, short = kv_cache.open(), kv_cache.open()
    kv_cache.forward([Feed(short, [5] * 20, 0)])
    release_memory()
    before, part = resident(), mx.ones((1, 4, 2**13, 128))
    kv_cache.extend(long, ((part, part),) * 3, 2**13)
    kv_cache.forward([Feed(long, [5], 1)])
    size = 6 * part.nbytes
    del part
    release_memory()
    assert size // 2 < resident() - before < size * 3 // 2
    kv_cache.close(long)
    assert resident() - before < size // 2
    assert short.row == 0 and np.array(kv_cache.save(short, 20).layers[0][0]).all()


def test_saved_prefix_is_copied_into_the_buffers_in_use(loaded: Callable[..., LoadedModel]) -> None:
    """New buffers would be bound again, layer by layer."""
    kv_cache = open_kv_cache(loaded("llama"))
    first, second = kv_cache.open(), kv_cache.open()
    kv_cache.forward([Feed(first, [5] * 40, 0, True), Feed(second, [6], 1)])
    views = [cache.views for cache in kv_cache._layers]
    second.roll_back(0)
    kv_cache.adopt(second, kv_cache.save(first, 30))
    kv_cache.forward([Feed(second, [5], 1)])
    assert [cache.views for cache in kv_cache._layers] == views


@pytest.mark.parametrize("long_first", [False, True])
def test_rows_become_shorter_when_the_longest_text_ends(loaded: Callable[..., LoadedModel], long_first: bool) -> None:
    """With MLX all rows are as long as the longest text, and are counted so."""
    kv_cache, alone = (FlatKVCache(loaded("llama").model) for _ in range(2))
    assert measure_sequence_cost(kv_cache).padded
    texts = kv_cache.open(), kv_cache.open()
    long, short = texts if long_first else texts[::-1]
    kv_cache.forward([Feed(short, [5, 6, 7], 0)])
    kv_cache.forward([Feed(long, [5] * 4000, 0, True)])
    before = [np.array(part) for layer in kv_cache.save(short, 3).layers for part in layer]
    held = sum(keys.nbytes + values.nbytes for keys, values in kv_cache.state())
    kv_cache.close(long)
    assert sum(keys.nbytes + values.nbytes for keys, values in kv_cache.state()) < held // 8
    after = [np.array(part) for layer in kv_cache.save(short, 3).layers for part in layer]
    assert all(map(np.array_equal, before, after))
    expected = alone.forward([Feed(alone.open(), [5, 6, 7, 8], 1)])
    assert np.allclose(np.array(kv_cache.forward([Feed(short, [8], 1)])), np.array(expected), atol=1e-4)


def test_memory_is_given_back_after_many_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    released_at: list[int] = []
    peak = PeakMemory()
    monkeypatch.setattr(memory, "release_memory", lambda: released_at.append(peak._ended_texts))
    for _ in range(70):
        peak.count_ended_text()
    assert released_at == [32, 64]


@pytest.mark.skipif(memory.mx.default_device().type != memory.mx.cpu, reason="on a GPU, MLX counts it")
def test_peak_memory_on_a_cpu_counts_allocations_outside_mlx() -> None:
    peak = PeakMemory()
    peak.restart()
    block = np.ones(16 * 2**20, np.float32)
    assert peak.bytes() >= block.nbytes
