"""A process that keeps the target's device busy while something is measured.

`python -m tools.contention gpu|cpu` streams memory on a CPU, as another model's weights would, or
multiplies matrices on a GPU, until stdin closes.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from outrider.bench.helper import HelperProcess, say_ready
from outrider.orchestrator.machine import system
from outrider.orchestrator.settings import ServeSettings

# Larger than any cache.
STREAMED_FLOATS = 64 << 20
MATRIX_SIZE = 2048


class Contention(HelperProcess):
    """A context manager; `describe` names the load and its device."""

    def __init__(self, settings: ServeSettings) -> None:
        self._core = system.core_of("target", settings)
        self._on_gpu = sys.platform == "darwin"
        super().__init__("tools.contention", "gpu" if self._on_gpu else "cpu")
        system.pin_to_core(self.pid, self._core)

    def describe(self) -> str:
        if self._on_gpu:
            return "contended: another process multiplies matrices on the GPU"
        where = "any core" if self._core is None else f"core {self._core}, the target's"
        return f"contended: another process streams memory on {where}"


def main() -> int:
    turn = _make_multiplying_turn() if sys.argv[1:] == ["gpu"] else _make_streaming_turn()
    threading.Thread(target=_exit_with_stdin, daemon=True).start()
    turn()
    say_ready()
    while True:
        turn()


def _make_streaming_turn() -> Callable[[], None]:
    import numpy as np

    source, sink = np.ones(STREAMED_FLOATS, np.float32), np.empty(STREAMED_FLOATS, np.float32)
    return lambda: np.copyto(sink, source)


def _make_multiplying_turn() -> Callable[[], None]:
    import mlx.core as mx

    matrix = mx.random.normal((MATRIX_SIZE, MATRIX_SIZE))
    return lambda: mx.eval(matrix @ matrix)


def _exit_with_stdin() -> None:
    """Ends the process when its parent closes the pipe."""
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
