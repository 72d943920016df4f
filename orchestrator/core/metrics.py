"""Counts and times of requests and rounds, and the trace. Decides nothing."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from outrider.orchestrator.core.proposal import Lookup, Proposal
from outrider.protocol.clock import MILLISECOND_NS, SECOND_NS
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.heads import NGRAM
from outrider.protocol.messages import Branches, Drafted, DraftWork, RoundRecord, Span, Timings
from outrider.protocol.schema import MAX_SERIAL, Origin
from outrider.protocol.stats import DURATION_BOUNDS_MS, Durations

if TYPE_CHECKING:
    from outrider.orchestrator.core.request import Request, SettledRound

log = logging.getLogger(__name__)

TARGET_DRAFTER_TRACK = "target's drafter"
"""The track of an in-process drafter, in the target's process."""
# The latest rounds, which may turn out not to count.
MAX_RECENT_ROUNDS = 64
# A round's report names at most this much work of drafters, so that no drafter makes it too large to be sent.
MAX_REPORTED_WORKS = 2048
_DURATION_BOUNDS_NS = tuple(int(bound * MILLISECOND_NS) for bound in DURATION_BOUNDS_MS)
ORCHESTRATOR_TRACK = "orchestrator"
TARGET_TRACK = "target"
MAX_TRACE_EVENTS = 1 << 20
TRACE_BUFFER_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class RoundEntry:
    """One round that has ended.

    The outcome before it had `after` accepted tokens; its `proposal` `waited` for a drafter. The `nodes` were accepted,
    and `kept` tokens became final. The times are the target's (0: they are not those of a verify).
    """

    proposal: Proposal
    after: int
    waited: bool
    nodes: Sequence[int]
    kept: int
    verify_ns: int
    idle_ns: int
    ended_ns: int


@dataclass(slots=True)
class RoundSums:
    """The sums over rounds."""

    tokens: int = 0
    rounds: int = 0
    chains: int = 0
    drafted: int = 0
    copied: int = 0
    waits: int = 0
    verify_ns: int = 0
    idle_ns: int = 0
    last_ns: int = 0
    drafted_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    hits_at: Counter[int] = field(default_factory=Counter)
    misses_at: Counter[int] = field(default_factory=Counter)
    after_misses: Counter[Origin] = field(default_factory=Counter)
    accepted_by_drafter: Counter[str] = field(default_factory=Counter)
    accepted_by_origin: Counter[Origin] = field(default_factory=Counter)

    def add(self, entry: RoundEntry, max_tokens: int) -> None:
        """Adds a round; only its first `max_tokens` tokens count, and no drafted token after them."""
        proposal, kept = entry.proposal, min(entry.kept, max_tokens)
        drafted, depth = len(proposal.chain), proposal.depth
        if kept <= len(entry.nodes):
            drafted, depth = min(drafted, kept), min(depth, kept)
        by = proposal.origins(entry.nodes)[:-1][:kept]
        self.tokens += kept
        self.rounds += 1
        self.chains += drafted > 0
        self.drafted += drafted
        self.drafted_at.update(range(depth))
        self.accepted_at.update(range(len(by)))
        if proposal.lookup is not Lookup.NONE:
            (self.misses_at if proposal.lookup.missed else self.hits_at)[entry.after] += 1
            self.after_misses[proposal.source] += proposal.lookup is Lookup.MISS
        if proposal.drafter not in ("", NGRAM):
            others = (Origin.COPIED, Origin.PREPARED) if proposal.source is Origin.HEAD else (Origin.COPIED,)
            self.accepted_by_drafter[proposal.drafter] += sum(origin not in others for origin in by)
        self.accepted_by_origin.update(by)
        self.copied += proposal.source is Origin.COPIED
        self.waits += entry.waited
        self.verify_ns += entry.verify_ns
        self.idle_ns += entry.idle_ns
        self.last_ns = entry.ended_ns


@dataclass(slots=True)
class RequestMetrics:
    """Counts and times of one request; `timings` gives them their public names. With `reports` each round that ends is
    also reported, in nanoseconds since `admitted_ns`, with the drafting since the report before.

    The latest rounds are kept individually: a stop string is found only after the core has continued, and rounds after
    it do not count.
    """

    admitted_ns: int = 0
    reports: bool = False
    first_ns: int = 0
    resumed: int = 0
    rejoined: int = 0
    remote_prefill_tokens: int = 0
    cached_tokens: int = 0
    _peaks: dict[str, int] = field(default_factory=dict)
    _sums: RoundSums = field(default_factory=RoundSums)
    _recent: dict[int, RoundEntry] = field(default_factory=dict)
    _drafting: list[DraftWork] = field(default_factory=list)

    def on_drafts(self, drafter: str, message: Branches | Drafted, now_ns: int) -> None:
        """Records drafting; work from before the request, or with impossible times, is left out."""
        work, is_full = message.work, len(self._drafting) >= MAX_REPORTED_WORKS
        if self.reports and not is_full and self.admitted_ns <= work.started_ns <= work.ended_ns <= now_ns:
            made = (message.depth, len(message.entries)) if isinstance(message, Branches) else (len(message.chain), 0)
            self._drafting.append(DraftWork(drafter, message.round, *made, self._relative(work)))

    def on_ended(self, ended: SettledRound, now_ns: int) -> RoundRecord | None:
        """Records the end of a round, and returns its report, if requested; the first round ends the prompt's time.

        The time of a round that began by reading the whole text is not that of a verify.
        """
        outcome, source = ended.outcome, ended.proposal.source
        source = source if ended.proposal.chain else Origin.TARGET  # also if a drafter here found nothing
        proposal = replace(ended.proposal, source=source, q=None)  # q may hold a whole message
        after = len(self._recent[ended.number - 1].nodes) if ended.number - 1 in self._recent else 0
        verify_ns, idle_ns = outcome.work.duration_ns, outcome.idle_ns
        if ended.read or not self.first_ns:
            verify_ns = idle_ns = 0
        self._recent[ended.number] = RoundEntry(
            proposal, after, ended.waited, ended.nodes, len(ended.kept), verify_ns, idle_ns, now_ns
        )
        if len(self._recent) > MAX_RECENT_ROUNDS:
            oldest = self._recent.pop(min(self._recent))
            self._sums.add(oldest, oldest.kept)
        self.first_ns = self.first_ns or now_ns
        return self._report(ended, proposal) if self.reports else None

    def _report(self, ended: SettledRound, proposal: Proposal) -> RoundRecord:
        outcome, kept = ended.outcome, len(ended.kept)
        drafting, self._drafting = self._drafting, []
        if outcome.drafted is not None:
            name, work = proposal.drafter or TARGET_DRAFTER_TRACK, self._relative(outcome.drafted.span)
            drafting.append(DraftWork(name, ended.number, len(proposal.chain), 0, work))
        return RoundRecord(
            round=ended.number,
            lookup=proposal.lookup.value,
            source=proposal.source.label,
            drafted=len(proposal.chain),
            accepted=min(outcome.accepted, kept),
            tokens=kept,
            verify=self._relative(outcome.work),
            decided=self._relative(ended.decided) if ended.decided is not None else None,
            drafting=tuple(drafting),
        )

    def _relative(self, span: Span) -> Span:
        """Returns a span in nanoseconds since the request began."""
        return Span(max(span.started_ns - self.admitted_ns, 0), max(span.ended_ns - self.admitted_ns, 0))

    def on_peak_memory(self, worker: str, peak_bytes: int) -> None:
        """Records the peak memory of a worker."""
        self._peaks[worker] = max(self._peaks.get(worker, 0), peak_bytes)

    def timings(self, prompt_n: int, predicted_n: int) -> Timings:
        """Returns the timings of the rounds up to token `predicted_n`."""
        sums, cached = deepcopy(self._sums), min(self.cached_tokens, prompt_n)
        for entry in self._recent.values():
            if sums.tokens < predicted_n:
                sums.add(entry, predicted_n - sums.tokens)
        predicted_ms = max(sums.last_ns - self.first_ns, 0) / MILLISECOND_NS
        positions = range(max(sums.drafted_at, default=-1) + 1)
        looked_up = range(max((*sums.hits_at, *sums.misses_at), default=-1) + 1)
        # The first token belongs to the prompt's time, so the rate is that of the tokens after it (as mlx-lm counts).
        rate = (predicted_n - 1) / predicted_ms * 1000 if predicted_ms > 0 and predicted_n else 0.0
        return Timings(
            prompt_n=prompt_n - cached,
            cache_n=cached,
            prefill_n=min(self.remote_prefill_tokens, prompt_n - cached),
            prompt_ms=max(self.first_ns - self.admitted_ns, 0) / MILLISECOND_NS,
            predicted_n=predicted_n,
            predicted_ms=predicted_ms,
            predicted_per_second=rate,
            draft_n=sums.drafted,
            draft_n_accepted=sums.accepted_by_origin.total(),
            draft_rounds=sums.chains,
            rounds=sums.rounds,
            cache_hits=sums.hits_at.total(),
            cache_misses=sums.misses_at.total(),
            cache_late=sums.misses_at.total() - sums.after_misses.total(),
            missed_then_plain=sums.after_misses[Origin.TARGET],
            missed_then_copied=sums.after_misses[Origin.COPIED],
            missed_then_drafted=sums.after_misses[Origin.DRAFTED] + sums.after_misses[Origin.HEAD],
            ngram_chains=sums.copied,
            draft_waits=sums.waits,
            accepted_by_position=tuple(sums.accepted_at[i] for i in positions),
            drafted_by_position=tuple(sums.drafted_at[i] for i in positions),
            looked_up_by_accepted=tuple(sums.hits_at[k] + sums.misses_at[k] for k in looked_up),
            hits_by_accepted=tuple(sums.hits_at[k] for k in looked_up),
            verify_ms=sums.verify_ns / MILLISECOND_NS,
            idle_ms=sums.idle_ns / MILLISECOND_NS,
            peak_bytes=min(sum(self._peaks.values()), MAX_SERIAL),
            resumed=self.resumed,
            rejoined=self.rejoined,
            draft_n_accepted_by=dict(sorted(sums.accepted_by_drafter.items())),
            draft_n_accepted_from={o.label: count for o, count in sorted(sums.accepted_by_origin.items())},
        )


class DurationHistogram:
    """Counts durations in fixed buckets, cheaply enough for every round. Any thread may take a snapshot, which may lack
    the newest duration."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_DURATION_BOUNDS_NS) + 1)
        self._nanoseconds = 0

    def add(self, nanoseconds: int) -> None:
        self._counts[bisect_left(_DURATION_BOUNDS_NS, nanoseconds)] += 1
        self._nanoseconds += nanoseconds

    def snapshot(self) -> Durations:
        return Durations(tuple(self._counts), self._nanoseconds / SECOND_NS)


class Trace:
    """Writes the work of every process as a Chrome/Perfetto trace (open it at ui.perfetto.dev): the first
    `MAX_TRACE_EVENTS`, as they come. Costs nothing without a path.

    All spans are CLOCK_MONOTONIC nanoseconds of this machine. Workers send theirs with their answers; those of other
    machines have been converted to this clock (`worker_registry.RemoteClock`).

    Raises:
        InvalidRequest: the file can't be written. If that happens later, events are left out, and `close` raises it.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._error: OSError | None = None
        self._numbers: dict[tuple[str, str], int] = {}  # of processes and threads, by kind and name
        self._events, self._separator = 0, b"\n"
        if path is not None:
            try:
                self._file = path.open("wb", TRACE_BUFFER_BYTES)
                self._file.write(b'{"traceEvents": [')
                self._file.flush()
            except OSError as error:
                self._stop(error)
                self.close()

    @property
    def enabled(self) -> bool:
        return self._file is not None

    def add(self, track: str, name: str, span: Span, **args: Any) -> None:
        if self._file is None:
            return
        if self._events == MAX_TRACE_EVENTS:
            log.warning("the trace is full (%d events); later events are left out", MAX_TRACE_EVENTS)
            self._end()
            return
        pid = self._number("process_name", TARGET_TRACK if track == TARGET_DRAFTER_TRACK else track)
        tid = self._number("thread_name", track, pid)
        times = {"ts": span.started_ns / 1000, "dur": span.duration_ns / 1000}
        self._write({"pid": pid, "tid": tid, "ph": "X", "name": name, "args": args, **times})
        self._events += 1

    def close(self) -> None:
        """Completes the file."""
        self._end()
        if self._error is not None:
            raise InvalidRequest(f"the trace can't be written to {self._path}: {self._error.strerror}") from self._error

    def _number(self, kind: str, name: str, pid: int = 0) -> int:
        """Returns the number of a process, or of a thread of process `pid`; a new one is named in the file."""
        number = self._numbers.get((kind, name))
        if number is None:
            number = self._numbers[kind, name] = len(self._numbers) + 1
            self._write({"ph": "M", "pid": pid or number, "tid": number, "name": kind, "args": {"name": name}})
        return number

    def _write(self, event: dict[str, Any]) -> None:
        try:
            if self._file is not None:
                self._file.write(self._separator + msgspec.json.encode(event))
                self._separator = b",\n"
        except OSError as error:
            self._stop(error)

    def _end(self) -> None:
        try:
            if self._file is not None:
                self._file.write(b"]}")
                self._file.close()
                self._file = None
        except OSError as error:
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        file, self._file, self._error = self._file, None, error
        if file is not None:
            with suppress(OSError):
                file.close()


class RoundMetrics:
    """Records each round: the request's metrics, the durations of rounds and verifies, and the trace."""

    def __init__(self, trace: Trace) -> None:
        self.rounds, self.verifies = DurationHistogram(), DurationHistogram()
        self._trace = trace
        self._verified_ns = 0

    def on_drafts(self, request: Request, sender: str, message: Branches | Drafted, now_ns: int) -> None:
        request.metrics.on_drafts(sender, message, now_ns)
        if not self._trace.enabled:
            return
        work, number = message.work, message.round
        if isinstance(message, Branches):
            self._trace.add(sender, f"depth {message.depth}", work, rows=len(message.entries), round=number)
        else:
            self._trace.add(sender, "chain", work, tokens=len(message.chain), round=number)

    def on_outcome(self, ended: SettledRound, now_ns: int) -> RoundRecord | None:
        """Records a round, and returns its report, if requested; tokens past the end of the request do not count."""
        request, outcome = ended.request, ended.outcome
        report = request.metrics.on_ended(ended, now_ns)
        if not ended.read:
            self.rounds.add(ended.took_ns)
            if outcome.work.ended_ns != self._verified_ns:  # several requests report the same forward
                self._verified_ns = outcome.work.ended_ns
                self.verifies.add(outcome.work.duration_ns)
        if self._trace.enabled:
            number, proposal, chain = ended.number, ended.proposal, ended.proposal.chain
            if ended.decided is not None and not proposal.draft:
                name = name_round(proposal.lookup.value, proposal.source.label)
                self._mark(name, ended.decided.ended_ns, number, chain)
            if outcome.drafted is not None:  # its chain has a track of its own
                source = proposal.source if chain else Origin.TARGET
                self._mark(source.label, outcome.work.started_ns, number, chain)
                self._trace.add(TARGET_DRAFTER_TRACK, "chain", outcome.drafted.span, tokens=len(chain), round=number)
            accepted = Counter(origin.label for origin in proposal.origins(ended.nodes)[:-1][: len(ended.kept)])
            name, args = f"verify {len(chain) + 1}", {"accepted": outcome.accepted, "by": dict(accepted)}
            self._trace.add(TARGET_TRACK, name, outcome.work, round=number, **args)
        return report

    def _mark(self, name: str, at_ns: int, number: int, chain: tuple[int, ...]) -> None:
        """Marks in the trace when a chain was chosen."""
        self._trace.add(ORCHESTRATOR_TRACK, name, Span(at_ns, at_ns), round=number, chain=len(chain), tokens=chain)


def name_round(lookup: str, source: str) -> str:
    """Returns what a round verifies, in words: its lookup's result, or else its chain's source (see `RoundRecord`)."""
    if lookup == Lookup.NONE.value or source == Origin.DRAFTED.label:
        return source
    return Lookup.HIT.value if lookup == Lookup.GROWN.value else lookup
