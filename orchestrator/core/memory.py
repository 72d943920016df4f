"""What `auto` learned, carried over restarts: read when a server starts, written while nobody waits and at its end.

A file beside `outrider tune`'s. It is never the reason for a failure: what can't be read or written is done without.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from outrider.orchestrator.core import tuning
from outrider.orchestrator.core.tuning import Tuning
from outrider.protocol.clock import SECOND_NS

log = logging.getLogger(__name__)

SECONDS = 60


class Memory:
    """The file at `path`; None: nothing is carried over."""

    def __init__(self, path: Path | None, now_ns: int) -> None:
        self._path = path
        self._written_ns = now_ns

    def read(self, tuned: Path) -> tuple[Tuning, ...]:
        """What an earlier server learned; nothing where the pair was tuned anew since, at `tuned`."""
        if self._path is None or _written_at(tuned) > _written_at(self._path):
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
            tuning.write(learned, self._path)
        except OSError as error:
            log.info("what auto learned can't be kept in %s: %s", self._path, error.strerror)


def _written_at(path: Path) -> float:
    """When it was written; 0: never."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
