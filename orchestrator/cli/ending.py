"""An end asked for by a signal is an end in order: what a command has started and made goes with it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from outrider.protocol.interrupts import outside_finalizers

SIGNALLED = 128


@contextmanager
def ended_in_order() -> Iterator[None]:
    """While it lasts, SIGTERM and SIGHUP unwind the command as Ctrl-C does; the exit code is a shell's for the signal.

    One that this process was started to ignore (`nohup`) stays ignored.
    """
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: _end, signal.SIGHUP: _end}
    heeded = [number for number in handlers if signal.getsignal(number) == signal.SIG_DFL]
    for number in heeded:
        signal.signal(number, outside_finalizers(handlers[number]))
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, _frame: FrameType | None) -> None:
    for one in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)  # a second one must not cut the tidying short
    sys.exit(SIGNALLED + number)
