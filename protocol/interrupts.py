"""Signal handlers that raise do so where an exception counts.

Python calls a handler between any two steps of the main thread, also while a finalizer runs: what is raised there is
printed as "Exception ignored in ... __del__" and lost, and the signal with it. Knows frames; nothing of what ends.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

AGAIN_SECONDS = 0.005
_FINALIZER = "__del__"
Handler = Callable[[int, FrameType | None], object]


def outside_finalizers(handler: Handler) -> Handler:
    """`handler`, called a moment later where the signal comes while a finalizer runs. SIGALRM counts the moments."""

    def call(number: int, frame: FrameType | None) -> None:
        if _finalizes(frame):
            signal.signal(signal.SIGALRM, lambda _, later: call(number, later))
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
        else:
            handler(number, frame)

    return call


def _finalizes(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == _FINALIZER:
            return True
        frame = frame.f_back
    return False
