"""What the rounds write down: each request's metrics, how long rounds take, and the trace. Decides nothing.

`Trace`: what every process did, on one clock, as a Chrome/Perfetto trace (open it at ui.perfetto.dev). All spans are
CLOCK_MONOTONIC nanoseconds of this machine. Workers send theirs with their answers; those of other machines have been
converted to this clock (`worker.FarClock`).
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.orchestrator.core.proposal import Lookup, Proposal, ProposalSource
from outrider.orchestrator.core.request import Request, RoundSnapshot
from outrider.orchestrator.core.request_metrics import TARGETS_DRAFTER, DurationHistogram
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import Branches, Drafted, Outcome, RoundRecord, Span

ORCHESTRATOR = "orchestrator"
TARGET = "target"
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


class RoundMetrics:
    """The books of all requests."""

    def __init__(self, trace: Trace) -> None:
        self.rounds, self.verifies = DurationHistogram(), DurationHistogram()
        self._trace = trace
        self._verified_ns = 0

    def on_asked(self, request: Request, missed: bool, now_ns: int) -> None:
        if request.records is not None:
            request.records.on_asked(missed, now_ns)
        request.metrics.on_asked(request.round + 1, request.accepted if missed else None)

    def on_proposed(self, request: Request, now_ns: int) -> None:
        proposal, chain = request.proposal, request.proposal.chain
        request.metrics.on_proposed(request.round, proposal, request.accepted)
        if request.records is not None:
            request.records.on_proposed(request.round, proposal, now_ns)
        if self._trace.enabled and not proposal.draft:
            self._trace.mark(ORCHESTRATOR, _mark(proposal), now_ns, round=request.round, chain=len(chain), tokens=chain)

    def on_branches(self, request: Request, sender: str, message: Branches, now_ns: int) -> None:
        if request.records is not None:
            request.records.on_drafted(sender, message, now_ns)
        if self._trace.enabled:
            self._trace.add(
                sender, f"depth {message.depth}", message.work, rows=len(message.entries), round=message.round
            )

    def on_drafted(self, request: Request, sender: str, message: Drafted, now_ns: int) -> None:
        if request.records is not None:
            request.records.on_drafted(sender, message, now_ns)
        self._trace.add(sender, "chain", message.work, tokens=len(message.chain), round=message.round)

    def on_outcome(self, request: Request, ended: RoundSnapshot, outcome: Outcome, kept: int, now_ns: int) -> None:
        """Counts and times of a round; tokens past the end of the request do not count."""
        chain = ended.proposal.chain
        request.metrics.on_ended(ended.number, ended.proposal, outcome, kept, now_ns, ended.read)
        if not ended.read:
            self.rounds.add(now_ns - request.handled_ns)
            self._verified(outcome.work)
        if self._trace.enabled:
            if outcome.drafting is not None:
                self._trace_in_process(ended, chain, outcome.work.started_ns, outcome.drafting)
            self._trace.add(
                TARGET, f"verify {len(chain) + 1}", outcome.work, round=ended.number, accepted=outcome.accepted,
                by=_by(ended.proposal, outcome, kept),
            )  # fmt: skip

    def record(self, request: Request, ended: RoundSnapshot, outcome: Outcome, kept: int) -> RoundRecord | None:
        """The round, if the request asked for its rounds."""
        if request.records is None:
            return None
        return request.records.on_ended(ended.number, ended.proposal, outcome, kept)

    def _verified(self, work: Span) -> None:
        """One forward brings an outcome to each that had a part in it, and is counted once."""
        if work.ended_ns != self._verified_ns:
            self._verified_ns = work.ended_ns
            self.verifies.add(work.ended_ns - work.started_ns)

    def _trace_in_process(self, ended: RoundSnapshot, chain: tuple[int, ...], verified_ns: int, drafting: Span) -> None:
        """A chain that the target drafted for itself; a row of its own, though it is the target's process."""
        source = ended.proposal.source if chain else ProposalSource.NONE
        self._trace.mark(ORCHESTRATOR, source.value, verified_ns, round=ended.number, chain=len(chain), tokens=chain)
        self._trace.add(TARGETS_DRAFTER, "chain", drafting, tokens=len(chain), round=ended.number)


def _by(proposal: Proposal, outcome: Outcome, kept: int) -> dict[str, int]:
    """How many of the drafted tokens that hold are from where; of those that count."""
    held = proposal.origins(proposal.nodes(outcome) or ())[:-1]
    return dict(Counter(origin.name.lower() for origin in held[:kept]))


def _mark(proposal: Proposal) -> str:
    """What the trace calls a proposal."""
    if proposal.lookup is Lookup.NONE:
        return proposal.source.value
    return Lookup.HIT.value if proposal.lookup is Lookup.GROWN else proposal.lookup.value
