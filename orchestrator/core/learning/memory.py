"""What `auto` learned, carried over restarts: read when a server starts, written while nobody waits and at its end.

A file beside `outrider tune`'s. It is never the reason for a failure: what can't be read or written is done without.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from outrider.orchestrator.core.learning import tuning
from outrider.orchestrator.core.learning.tuning import Tuning
from outrider.protocol.clock import SECOND_NS

log = logging.getLogger(__name__)

SECONDS = 60


class Memory:
    """The file at `path`; None: nothing is carried over."""

    def __init__(self, path: Path | None, now_ns: int) -> None:
        self._path = path
        self._after = ""
        self._written_ns = now_ns
        self._complained = False

    def read(self, tuned: Path) -> tuple[Tuning, ...]:
        """What an earlier server learned; nothing where the pair was tuned anew since, in the file at `tuned`.

        No clock tells which is newer: a file says which it goes on from.
        """
        self._after = tuning.digest(tuned)
        if self._path is None or tuning.after(self._path) != self._after:
            return ()
        return tuning.load(self._path)

    def is_due(self, now_ns: int) -> bool:
        """Whether the last writing is a while ago."""
        return self._path is not None and now_ns - self._written_ns > SECONDS * SECOND_NS

    def write(self, learned: Sequence[Tuning], now_ns: int) -> None:
        """Keeps what was learned; nothing learned changes nothing."""
        self._written_ns = now_ns
        if self._path is None or not learned:
            return
        try:
            tuning.write(learned, self._path, self._after)
            self._complained = False
        except OSError as error:
            level = logging.INFO if self._complained else logging.WARNING
            self._complained = True
            told = "what auto learned can't be saved in %s: %s; the next server starts without it"
            log.log(level, told, self._path, error.strerror)
