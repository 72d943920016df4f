"""The command line's streams and signals."""

from __future__ import annotations

import errno
import io
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from outrider.protocol.errors import OutriderError
from outrider.protocol.process import run_outside_finalizers

log = logging.getLogger(__name__)

UNWRITABLE_ERRNOS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""The errors of writes to a closed pipe, a full disk or a closed terminal; these errors name no file."""

SIGNAL_EXIT_BASE = 128


def say(text: str, end: str = "\n") -> None:
    """Writes to stderr; if that fails, the command continues and later texts are dropped."""
    try:
        print(text, end=end, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def can_erase() -> bool:
    """Returns whether stderr is a terminal that knows escape sequences; one with TERM=dumb would print them."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class Screen:
    """Shows progress on stderr: in a terminal one line that changes, elsewhere log lines of level info.

    Call `clear` before printing to stdout, so that no half line stays before the text.
    """

    def __init__(self, live: bool = True) -> None:
        self.live = live and can_erase()
        self._shown = ""

    def show(self, text: str) -> None:
        """Replaces the text shown."""
        if text == self._shown:
            return
        self._shown = text
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            say(f"\r\x1b[K{text[:width]}", end="")
        else:
            log.info("%s", text)

    def clear(self) -> None:
        """Removes the text shown."""
        if self.live and self._shown:
            say("\r\x1b[K", end="")
        self._shown = ""


def run_guarded(command: Callable[[], int]) -> int:
    """Runs `command` and returns its exit code, whatever the state of the standard streams. If stdout can't be written,
    the command ends with an error, or silently if the reader has closed it."""
    _prepare_streams()
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()  # a write that fails is reported here, not by Python when it exits
    except OSError as error:
        if error.errno not in UNWRITABLE_ERRNOS or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the rest of the buffer
        if isinstance(error, BrokenPipeError):
            return 0
        say(f"outrider: the output can't be written ({error.strerror}); free some space, or write it elsewhere")
        return OutriderError.exit_code


def _prepare_streams() -> None:
    """Opens closed streams, so that no socket gets their number; characters that stdout can't write become `?`."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # opens the lowest free number, which is this one
            setattr(sys, name, None)
        if getattr(sys, name) is None:  # also if another file has got its number
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")  # readers check what they read


@contextmanager
def unwind_on_signals() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP unwind the command as Ctrl-C does, so that its processes end and its files are removed;
    the exit code is 128 plus the signal's number.

    A signal that this process was started to ignore (`nohup`) stays ignored.
    """
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: _on_signal, signal.SIGHUP: _on_signal}
    handled = [number for number in handlers if signal.getsignal(number) == signal.SIG_DFL]
    for number in handled:
        signal.signal(number, run_outside_finalizers(handlers[number]))
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def _on_signal(number: int, _frame: FrameType | None) -> None:
    for ignored in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    sys.exit(SIGNAL_EXIT_BASE + number)
