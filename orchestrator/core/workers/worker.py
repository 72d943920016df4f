"""A worker as the pool knows it: what it is, whether it answers, how it reads its clock, what it may get wrong.

`Worker`: a worker as the pool knows it, and the word that one is gone.

`FarClock`: the clock of another machine's worker, as this machine would read it. As NTP does it: a heartbeat tells the
worker's time, which lies between the ping and its answer; the answer that came soonest says it best, and what it said
grows old, for clocks drift. Two clocks that may be one are taken for one. A worker's clock that jumps (its machine
slept) is believed at once, and what it said of no time yet ended when it was heard. Knows no socket.

`Heartbeat`: whether a worker answers and moves, counted in pings and not in seconds. Who does not run sends no pings: a
server that was stopped, or slept with the whole machine, finds nobody silent. A worker that answers may take its time
over one operation, ten times what it says that this should take; one that loads does not answer yet, and may take ten
times what its predecessor took.

`Trust`: how often one worker has said what cannot be, by kind, and when that is too often. An honest worker says no
such thing, however late its words come, so few are enough. Knows counts and words only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from outrider.orchestrator.machine import system
from outrider.orchestrator.machine.spawn import SpawnedWorker
from outrider.protocol import clock
from outrider.protocol.clock import MILLISECOND_NS, SECOND_NS
from outrider.protocol.messages import Branches, Drafted, Hello, Message, Span, WorkerStats
from outrider.protocol.stats import CacheUse, Tally

# Two quartz clocks part by less than this share of the time.
DRIFT = 200e-6


class FarClock:
    """One worker's. `round_trip_ns`: from a ping to its answer, of late; 0: none has come."""

    def __init__(self) -> None:
        self.round_trip_ns = 0
        self._ahead_ns = 0
        self._error_ns: int | None = None
        self._at_ns = 0

    def observe(self, asked_ns: int, theirs_ns: int, now_ns: int) -> None:
        """Asked at `asked_ns`, heard at `now_ns`, both of this clock, it says that it is `theirs_ns`."""
        self.round_trip_ns = now_ns - asked_ns
        ahead_ns, error_ns = theirs_ns - (asked_ns + now_ns) // 2, self.round_trip_ns // 2 + 1
        known_ns = self._error(now_ns)
        has_jumped = known_ns is not None and abs(ahead_ns - self._ahead_ns) > known_ns + error_ns
        if known_ns is None or error_ns <= known_ns or has_jumped:
            self._ahead_ns, self._error_ns, self._at_ns = ahead_ns, error_ns, now_ns

    def ahead_ns(self, now_ns: int) -> int:
        """How far it is before this one; 0 where they may be the same."""
        error_ns = self._error(now_ns)
        return 0 if error_ns is None or abs(self._ahead_ns) <= error_ns else self._ahead_ns

    def to_local(self, message: Message, now_ns: int) -> Message:
        """The same word, heard at `now_ns`, with its times on this clock."""
        if not isinstance(message, Branches | Drafted):
            return message
        return replace(message, work=self._moved(message.work, now_ns))

    def _moved(self, work: Span, now_ns: int) -> Span:
        """It has ended by now, whatever the clock or the worker says."""
        lasted_ns = max(work.ended_ns - work.started_ns, 0)
        ended_ns = now_ns if self._error_ns is None else min(work.ended_ns - self.ahead_ns(now_ns), now_ns)
        return Span(max(ended_ns - lasted_ns, 0), max(ended_ns, 0))

    def _error(self, now_ns: int) -> int | None:
        """By how much what is known may be wrong; None: nothing is."""
        return None if self._error_ns is None else self._error_ns + int(DRIFT * (now_ns - self._at_ns))


# Pings go out this often in the time for which a worker may be silent. A quiet drafter is done without much earlier.
SILENT = 40
QUIET = 8
# A worker that answers may stand still for so many times the time that its work should take, and never for less than it
# may be silent; where nobody knows how long that should take, for so many times that.
SLACK = 10
UNKNOWN = 6


@dataclass(slots=True)
class Heartbeat:
    """One worker's answers. `unanswered` pings since it was last heard; `still`: answers in a row without progress;
    `expected_s`: how long what it does should take, 0: not known."""

    unanswered: int = 0
    still: int = 0
    progress: int = -1
    expected_s: float = 0.0

    def on_pong(self, progress: int, newest: bool, expected_s: float = 0.0) -> None:
        """`newest`: it answers the latest ping; older ones, answered late and at once, say nothing of its speed."""
        self.unanswered, self.expected_s = 0, expected_s
        if progress != self.progress:
            self.progress, self.still = progress, 0
        elif newest:
            self.still += 1

    def most(self, seconds_a_ping: float) -> float:
        """Pings for which it may stand still at its work."""
        return max(SLACK * self.expected_s / seconds_a_ping, SILENT) if self.expected_s else UNKNOWN * SILENT

    def is_frozen(self, seconds_a_ping: float) -> bool:
        """It may come back; nobody should wait for it."""
        return self.unanswered >= QUIET or self.still >= self.most(seconds_a_ping) / 2

    def is_lost(self, seconds_a_ping: float) -> str | None:
        """Why it is given up, or None."""
        if self.unanswered >= SILENT:
            return f"has not answered for {self.unanswered * seconds_a_ping:.0f} s"
        if self.still >= self.most(seconds_a_ping):
            return f"has made no progress for {self.still * seconds_a_ping:.0f} s"
        return None

    def is_stuck(self, seconds_a_ping: float) -> str | None:
        """Why a worker that loads is given up: no news of it for too long, by what it should take, if that is known."""
        if self.expected_s and self.unanswered >= self.most(seconds_a_ping):
            return f"has made no progress in starting for {self.unanswered * seconds_a_ping:.0f} s"
        return None


MOST_LIES = 8


class Trust:
    """One worker's."""

    def __init__(self) -> None:
        self._lies: Counter[str] = Counter()

    @property
    def is_lost(self) -> bool:
        return self._lies.total() >= MOST_LIES

    def record_lie(self, kind: str) -> None:
        self._lies[kind] += 1

    def tallies(self) -> tuple[Tally, ...]:
        """How often it lied, by kind."""
        return tuple(Tally(kind, count) for kind, count in sorted(self._lies.items()))

    def format(self, words: Mapping[str, str]) -> str:
        """What it said, for a person; `words` for each kind."""
        return ", ".join(f"{words.get(kind, kind)} ({count})" for kind, count in sorted(self._lies.items()))


@dataclass(slots=True)
class Worker:
    """`state` is starting, ready, refused (of no use here), frozen (silent, and may come back), restarting or lost.

    `spawned` None: it joined by itself. `hello` of one that is restarting is its predecessor's. `kv_limit`: the bytes
    for texts that it was told. `worked`: it has done something for a request, since it was let in at `entered_ns`; from
    `begun_ns` until then it loaded. `key`: what it came in with, if it had to have one; `unwelcome`: why it may stay no
    longer.
    """

    name: str
    role: str
    incarnation: int
    spawned: SpawnedWorker | None
    state: str = "starting"
    hello: Hello | None = None
    fault: str = ""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    kv_limit: int = 0
    cache: CacheUse = field(default_factory=CacheUse)
    restarts: int = 0
    worked: bool = False
    begun_ns: int = 0
    entered_ns: int = 0
    trust: Trust = field(default_factory=Trust)
    key: str = ""
    unwelcome: str = ""
    clock: FarClock = field(default_factory=FarClock)

    @property
    def entered(self) -> bool:
        """It said HELLO and is not given up."""
        return self.state in ("ready", "frozen")

    @property
    def runs(self) -> bool:
        """Its process, if it was started here, has not ended."""
        return self.spawned is not None and self.spawned.exit_code() is None

    def other_model(self, hello: Hello) -> str | None:
        """Why what says `hello` can't go on in this one's place: it runs another model, whose texts are others."""
        known = self.hello
        if known is None or _what_runs(known) == _what_runs(hello):
            return None
        return f"{self} came back with another model ({hello.model}) than before ({known.model}); restart the server"

    @property
    def load_s(self) -> float:
        """How long its start took; 0: that is not known."""
        return (self.entered_ns - self.begun_ns) / SECOND_NS if self.begun_ns and self.entered_ns else 0.0

    def stood_ns(self, now_ns: int) -> int:
        """How long it has been one of the cluster."""
        return now_ns - self.entered_ns if self.entered_ns else 0

    def why_gone(self, seconds_a_ping: float) -> str | None:
        """Why it must be given up: its process ended, or nothing is heard of it for too long."""
        code = self.spawned.exit_code() if self.spawned else None
        if self.spawned and code is not None:
            tail = self.spawned.log_tail()
            cause = system.likely_cause(code, tail)
            ended = f"{self} ended with code {code}" + (f", {cause}" if cause else "")
            return self.fault or ended + (f": {tail}" if tail else "")
        if self.unwelcome:
            return f"{self} is dismissed: {self.unwelcome}"
        silence = self.heartbeat.is_lost(seconds_a_ping) if self.entered else self.heartbeat.is_stuck(seconds_a_ping)
        return f"{self} {silence}" if silence else None

    def stats(self) -> WorkerStats:
        hello = self.hello
        pid = self.spawned.pid if self.spawned else hello.pid if hello else 0
        if hello is None:
            return WorkerStats(
                self.role, self.name, self.state, pid, "", "", 0, 0, 0, 0, self.fault, lies=self.trust.tallies()
            )
        note = self.fault or hello.note
        return WorkerStats(
            self.role,
            self.name,
            self.state,
            pid,
            hello.backend,
            hello.model,
            hello.vocab_size,
            hello.context_length,
            hello.parameters,
            hello.weight_bytes,
            note,
            hello.kv,
            self.cache,
            self.restarts,
            self.trust.tallies(),
            self.clock.round_trip_ns / MILLISECOND_NS,
            0.0 if self.spawned else self.clock.ahead_ns(clock.now()) / MILLISECOND_NS,
            "-".join(filter(None, (hello.files, hello.number_format))),
        )

    def __str__(self) -> str:
        return f"{self.role} worker {self.name}"


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """A drafter that nobody should wait for, or a worker that is `is_lost`; `fatal`: the server can't do without it."""

    worker: Worker
    why: str
    gone: bool = False
    fatal: bool = False


def _what_runs(hello: Hello) -> tuple[object, ...]:
    sizes = hello.vocab_size, hello.context_length, hello.parameters, hello.weight_bytes
    return hello.backend, *sizes, hello.files, hello.number_format


def reads_alike(reader: Hello, target: Hello) -> bool:
    """Whether what this prefill worker remembers of a prompt is what the target itself would.

    Where the target's activations are rounded (`int8-...`) the same kernels must have made it, bit by bit.
    """
    same = reader.number_format == target.number_format or not target.number_format.startswith("int8-")
    return same and reader.files == target.files


def misfit(drafter: Hello, target: Hello) -> str:
    """Why this drafter can't read what this target tells, in a sentence; empty: it can, or reads nothing of it."""
    if not drafter.features or drafter.features == target.features:
        return ""
    made = f"provides those of {target.features}" if target.features else "makes none"
    why = f" ({target.note})" if target.note and not target.features else ""
    return (
        f"{drafter.model} reads features of {drafter.features}, and the target {made}{why}; expected the same head and"
        " the same model on both sides"
    )
