"""The standard streams as every command may count on them: open, and able to write any text.

A stdout that takes no more ends a command in a sentence, or without a word where its reader has enough.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable

from outrider.orchestrator.cli.screen import say
from outrider.protocol.errors import OutriderError

UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a write to a pipe, a full disk or a terminal that has gone ends with; such an error names no file."""


def guarded(command: Callable[[], int]) -> int:
    """The exit code of `command`, whatever its streams are."""
    _prepare()
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


def _prepare() -> None:
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
