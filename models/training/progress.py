"""Shows the progress of a stage: a line that is rewritten in place on a terminal, and every half minute in a log."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_TERMINAL_PERIOD_S = 0.2
_LOG_PERIOD_S = 30.0


class Progress:
    """`label  done/total unit  note  time left`, on stderr."""

    def __init__(self, label: str, total: int, unit: str, *, stream: TextIO | None = None) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._started = self._shown = time.monotonic()
        self._first: int | None = None  # a resumed stage doesn't start at 0

    def update(self, done: int, note: str = "") -> None:
        """Shows that `done` of `total` units are finished. The last update is always shown."""
        now = time.monotonic()
        if self._first is None:
            self._first = done
        period = _TERMINAL_PERIOD_S if self._terminal else _LOG_PERIOD_S
        last = done >= self._total
        if now - self._shown < period and not last:
            return
        self._shown = now
        line = f"{self._label}  {done:,}/{self._total:,} {self._unit}  {note}  {self._left(done, now)}"
        if self._terminal:
            self._stream.write(f"\r\x1b[K{line}" + ("\n" if last else ""))
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def _left(self, done: int, now: float) -> str:
        if done >= self._total:
            return f"took {now - self._started:.0f} s"
        fresh = done - (self._first or 0)
        if fresh <= 0:
            return ""
        return f"{(self._total - done) * (now - self._started) / fresh / 60:.1f} min left"
