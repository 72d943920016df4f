"""The command line's streams and signals: progress on stderr, standard streams that stay open, and an orderly end.

`Screen`: progress on stderr: on a terminal one line that changes and is removed in the end; elsewhere only the log has
it (level info).

`guarded`: makes the standard streams open and able to write any text. A stdout that takes no more ends a command with a
sentence, or silently where its reader has closed it.

`ended_in_order`: a signal that ends a command unwinds it, so that what it has started and made goes with it.
"""

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
from outrider.protocol.process import outside_finalizers

log = logging.getLogger(__name__)


def say(text: str, end: str = "\n") -> None:
    """Writes to stderr; one that is full or gone keeps no command from its work, and hears no more."""
    try:
        print(text, end=end, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class Screen:
    """Whoever prints to stdout calls `clear` first, so that no half line stays before the text."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._shown = ""

    def show(self, text: str) -> None:
        """The newest state of things."""
        if text == self._shown:
            return
        self._shown = text
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            say(f"\r\x1b[K{text[:width]}", end="")
        else:
            log.info("%s", text)

    def clear(self) -> None:
        """Takes the changing line away."""
        if self._live and self._shown:
            say("\r\x1b[K", end="")
        self._shown = ""

    @property
    def live(self) -> bool:
        return self._live


UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a write to a pipe, a full disk or a terminal that has gone ends with; such an error names no file."""


def guarded(command: Callable[[], int]) -> int:
    """The exit code of `command`, whatever its streams are."""
    _prepare_streams()
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()  # what can't be written is told here, and not by Python at its end
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what still waits to be written
        if isinstance(error, BrokenPipeError):
            return 0
        say(f"outrider: the output can't be written ({error.strerror}); stdout is not writable")
        return OutriderError.exit_code


def takes_unicode() -> bool:
    """Whether stdout can write every character."""
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")


def _prepare_streams() -> None:
    """Opens those that were closed, so that no socket gets their number; what the terminal can't show becomes `?`."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8")


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
