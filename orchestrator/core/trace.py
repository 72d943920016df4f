"""What every process did, on one clock, as a Chrome/Perfetto trace (open it at ui.perfetto.dev).

All spans are CLOCK_MONOTONIC nanoseconds of this machine; workers send theirs with their answers, and those of other
machines were put on this clock before (`worker.FarClock`).
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import Span

ORCHESTRATOR = "orchestrator"
TARGET = "target"
TARGETS_DRAFTER = "target's drafter"
MOST_EVENTS = 1 << 20

log = logging.getLogger(__name__)


def process_of(track: str) -> str:
    """Whose work a track shows: a drafter in the target's process has a track of its own there."""
    return TARGET if track == TARGETS_DRAFTER else track


@dataclass(frozen=True, slots=True)
class Event:
    """A span (or, with both ends equal, an instant) on a track."""

    track: str
    name: str
    span: Span
    args: dict[str, Any] = field(default_factory=dict)


class Trace:
    """Collects the first `MOST_EVENTS` when it has a path to write them to; otherwise costs nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._events: list[Event] = []
        self._is_full = False
        if path is not None:
            self._write()

    @property
    def enabled(self) -> bool:
        return self._path is not None

    def add(self, track: str, name: str, span: Span, **args: Any) -> None:
        if self._path is None:
            return
        if len(self._events) < MOST_EVENTS:
            self._events.append(Event(track, name, span, args))
            return
        if not self._is_full:
            self._is_full = True
            log.warning("the trace is full (%d events); later events are left out", MOST_EVENTS)

    def mark(self, track: str, name: str, at_ns: int, **args: Any) -> None:
        self.add(track, name, Span(at_ns, at_ns), **args)

    def close(self) -> None:
        if self._path is not None:
            self._write()

    def _write(self) -> None:
        tracks = sorted({event.track for event in self._events})
        processes = sorted({process_of(track) for track in tracks})
        pids = {track: 1 + processes.index(process_of(track)) for track in tracks}
        names = [
            {"ph": "M", "pid": 1 + index, "name": "process_name", "args": {"name": process}}
            for index, process in enumerate(processes)
        ]
        names += [
            {"ph": "M", "pid": pids[track], "tid": tid, "name": "thread_name", "args": {"name": track}}
            for tid, track in enumerate(tracks)
        ]
        events = [
            {
                "ph": "X",
                "pid": pids[event.track],
                "tid": tracks.index(event.track),
                "name": event.name,
                "args": event.args,
                "ts": event.span.started_ns / 1000,
                "dur": (event.span.ended_ns - event.span.started_ns) / 1000,
            }
            for event in self._events
        ]
        try:
            if self._path is not None:
                self._path.write_text(json.dumps({"traceEvents": names + events}), encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(f"the trace can't be written to {self._path}: {error.strerror}") from error
