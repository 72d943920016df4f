"""`python -m outrider.bench.contest.busy gpu|cpu`: keeps the target's device busy until its stdin ends.

On a CPU it streams memory, as another model's weights would; on a GPU it multiplies matrices. Says that it is ready
when it has begun. Knows nothing of Outrider's ways.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from outrider.bench.helper import say_ready

# Larger than any cache, so that each pass comes from memory.
STREAMED_FLOATS = 64 << 20
SIDE = 2048


def main() -> int:
    turn = _multiplying() if sys.argv[1:] == ["gpu"] else _streaming()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    turn()
    say_ready()
    while True:
        turn()


def _streaming() -> Callable[[], None]:
    import numpy as np

    source, sink = np.ones(STREAMED_FLOATS, np.float32), np.empty(STREAMED_FLOATS, np.float32)
    return lambda: np.copyto(sink, source)


def _multiplying() -> Callable[[], None]:
    import mlx.core as mx

    matrix = mx.random.normal((SIDE, SIDE))
    return lambda: mx.eval(matrix @ matrix)


def _end_with_stdin() -> None:
    """Whoever started this holds the other end, and is gone when it closes."""
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
