"""The workers of this cluster: who has which place, who may join, and what is known of each.

`Worker`: one worker as the pool knows it. `WorkerLoss`: the report that one is gone.

`FarClock`: the clock of another machine's worker, as this machine would read it, by NTP's method: a heartbeat carries
the worker's time, which lies between the ping and its answer. The quickest answer is the most precise, and grows old,
for clocks drift. Two clocks that may be one are taken for one. A worker's clock that jumps (its machine slept) is
believed at once, and work that it reports as not yet ended has ended when it was heard.

`Heartbeat`: whether a worker answers and makes progress, counted in pings and not in seconds, so a server that was
stopped, or slept with its machine, finds no worker silent. A worker that answers may take ten times as long for one
operation as it says that this should take; one that loads does not answer yet, and may take ten times as long as its
predecessor took.

`Trust`: how many invalid messages a worker has sent, by kind. An honest worker sends none, however late its messages
come, so a few are enough to disconnect it.

`WorkerRegistry`: the workers by routing id: a place is given once, to one process, and names are the orchestrator's. A
worker's routing id is its incarnation, which the orchestrator draws for those that it spawns and a drafter that joins
draws for itself. A living worker's place can't be taken: ZeroMQ leaves a routing id with its holder, beyond this
machine with the holder's key, and a name stays with its incarnation.

`WorkerAdmission`: which workers may join and stay: by key, by what they say of themselves, by their vocabulary.
Changes nothing but the keys that `CurveAuth` refuses. Knows nothing of sockets or requests.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import zmq

from outrider.orchestrator.auth import CurveAuth
from outrider.orchestrator.events import ModelVocabulary
from outrider.orchestrator.machine import system
from outrider.orchestrator.machine.spawn import SpawnedWorker
from outrider.protocol import clock
from outrider.protocol.clock import MILLISECOND_NS, SECOND_NS
from outrider.protocol.digest import fits
from outrider.protocol.keys import DRAFTER, PREFILL, ServerKeys, key_shown
from outrider.protocol.messages import Branches, Drafted, Hello, Message, Span, WorkerStats
from outrider.protocol.stats import CacheUse, Tally
from outrider.protocol.worker_link import heartbeat_of, routing_id

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
# may be silent; where that time is not known, for so many times that.
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
        """It may come back, but must not be waited for."""
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


MOST_INVALID = 8


class Trust:
    """One worker's."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    @property
    def is_lost(self) -> bool:
        return self._counts.total() >= MOST_INVALID

    def record_invalid(self, kind: str) -> None:
        self._counts[kind] += 1

    def tallies(self) -> tuple[Tally, ...]:
        """How often it lied, by kind."""
        return tuple(Tally(kind, count) for kind, count in sorted(self._counts.items()))

    def format(self, words: Mapping[str, str]) -> str:
        """What it said, for a person; `words` for each kind."""
        return ", ".join(f"{words.get(kind, kind)} ({count})" for kind, count in sorted(self._counts.items()))


_UNKNOWN = Hello("target", "", 0, 0, "", "", 0, 0, 0, 0)
"""Stands for the HELLO of a worker that has not said one."""


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
        hello = self.hello or _UNKNOWN
        return WorkerStats(
            role=self.role,
            name=self.name,
            state=self.state,
            pid=self.spawned.pid if self.spawned else hello.pid,
            backend=hello.backend,
            model=hello.model,
            vocab_size=hello.vocab_size,
            context_length=hello.context_length,
            parameters=hello.parameters,
            weight_bytes=hello.weight_bytes,
            note=self.fault or hello.note,
            kv=hello.kv,
            cache=self.cache,
            restarts=self.restarts,
            lies=self.trust.tallies(),
            round_trip_ms=self.clock.round_trip_ns / MILLISECOND_NS,
            clock_ahead_ms=0.0 if self.spawned else self.clock.ahead_ns(clock.now()) / MILLISECOND_NS,
            fingerprint="-".join(filter(None, (hello.files, hello.number_format))),
        )

    def __str__(self) -> str:
        return f"{self.role} worker {self.name}"


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """A drafter that must not be waited for, or a worker that is `gone`; `fatal`: the server can't do without it."""

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


TARGET = "target-0"
MAX_WORKERS = 32
MAX_NAME = 64
MOST_SHUT_OUT = 4096


class WorkerRegistry:
    """Every worker by name and by routing id.

    `drafters_may_join`: False where the target drafts for itself. `awaited`: the files of the target that may join, see
    `protocol.digest`; None: none may.
    """

    def __init__(self, drafters_may_join: bool, awaited: str | None = None) -> None:
        self._drafters_may_join, self._awaited = drafters_may_join, awaited
        self._named: dict[str, Worker] = {}
        self._at: dict[bytes, Worker] = {}
        self._shut_out: deque[int] = deque(maxlen=MOST_SHUT_OUT)

    def all(self) -> list[Worker]:
        return list(self._named.values())

    def named(self, name: str) -> Worker | None:
        return self._named.get(name)

    def at(self, identity: bytes) -> Worker | None:
        """The worker of this hot socket or heartbeat; None for strangers and workers that were given up."""
        return self._at.get(identity)

    def give(self, worker: Worker) -> None:
        """Its name and routing ids are this worker's from now on; a predecessor of the name has none any more."""
        before = self._named.pop(worker.name, None)
        if before is not None:
            self.take_away(before)
        self._named[worker.name] = worker
        hot = routing_id(worker.incarnation)
        self._at[hot] = self._at[heartbeat_of(hot)] = worker

    def take_away(self, worker: Worker) -> None:
        """What this process says from now on is a stranger's; its name stays known."""
        hot = routing_id(worker.incarnation)
        self._at.pop(hot, None)
        self._at.pop(heartbeat_of(hot), None)

    def shut_out(self, worker: Worker) -> None:
        """As `take_away`, and this process does not come in again."""
        self.take_away(worker)
        self._shut_out.append(worker.incarnation)

    def refusal(self, identity: bytes, hello: Hello) -> str | None:
        """Why a stranger that says HELLO is turned away; None when it may join."""
        if identity != routing_id(hello.incarnation):
            return "its routing id is not that of its incarnation; run the same release of outrider on both sides"
        if hello.incarnation in self._shut_out:
            return "it sent too many invalid messages, so this cluster ignores it"
        if hello.role == "target":
            return self._target_refusal(hello)
        if hello.role == "prefill" and (why := self._prefill_refusal(hello)) is not None:
            return why
        if hello.role == "draft" and not self._drafters_may_join:
            return "the target of this cluster drafts for itself; start it without colocate for drafters to join"
        if len(hello.name) > MAX_NAME or not hello.name.isprintable():
            return (
                f"the name {hello.name[:MAX_NAME]!r} is not a valid name; expected at most"
                f" {MAX_NAME} printable characters"
            )
        holder = self._named.get(hello.name)
        if holder is not None and (holder.spawned is not None or holder.entered):
            theirs = _shown(holder.hello) if holder.hello is not None else f"a {holder.role} worker that starts"
            return (
                f"the name {hello.name} is taken in this cluster by {theirs}, and {_shown(hello)} wants it, too; choose"
                " another, or leave it out to be given one"
            )
        if sum(worker.state != "lost" for worker in self.all()) >= MAX_WORKERS:
            return f"the cluster has {MAX_WORKERS} workers, the maximum; stop one first"
        return None

    def _target_refusal(self, hello: Hello) -> str | None:
        """Why this target may not join. One that was there before must have been the same."""
        before = self._named.get(TARGET)
        if self._awaited is None:
            return (
                "this cluster starts its own target and accepts no other; join as a draft worker,"
                " or start the cluster with await_target"
            )
        if before is not None and before.entered:
            return "the cluster already has a target; stop that one first"
        if not fits(self._awaited, hello.files):
            return (
                f"its model {hello.model} is another ({hello.files}) than the server was started with"
                f" ({self._awaited}); expected the same files on both"
            )
        return before.other_model(hello) if before is not None else None

    def _prefill_refusal(self, hello: Hello) -> str | None:
        """Why it can't read prompts for this target: keys and values of other weights would make another text."""
        target = self._named.get(TARGET)
        if target is None or target.hello is None:
            return None  # it is asked for nothing that does not fit
        if not target.hello.abilities.takes_kv:
            return "the target of this cluster must read its prompts itself: its state can't be transferred"
        if hello.files != target.hello.files:
            return (
                f"its model {hello.model} is another ({hello.files}) than the target's ({target.hello.files}); expected"
                " the same files on both"
            )
        if not reads_alike(hello, target.hello):
            own = hello.number_format or "another format"
            return (
                f"it computes in {own} and the target in {target.hello.number_format}:"
                " their keys and values differ; expected --cpu-kernels mlx on both, or CPUs of one kind"
            )
        return None

    def join(self, hello: Hello, key: str = "") -> Worker:
        """A place for a worker that joins by itself, with this key; those that left earlier are forgotten."""
        if hello.role == "target":
            before = self._named.get(TARGET)
            worker = Worker(TARGET, hello.role, hello.incarnation, None, restarts=before.restarts + 1 if before else 0)
            self.give(worker)
            return worker
        for left in [worker for worker in self.all() if worker.spawned is None and worker.state == "lost"]:
            del self._named[left.name]
        free = (name for n in itertools.count(1) if (name := f"{hello.role}-{n}") not in self._named)
        worker = Worker(hello.name or next(free), hello.role, hello.incarnation, None, key=key)
        self.give(worker)
        return worker


def _shown(hello: Hello) -> str:
    return f"a {hello.role} worker (process {hello.pid}, {hello.model or hello.backend})"


NOT_ALLOWED = "its key is not allowed (any more); allow it on the server with `outrider keys allow`"


class WorkerAdmission:
    """`auth`: asks for keys; None: there are none. `language`: what tokens stand for in this cluster, once known."""

    def __init__(self, registry: WorkerRegistry, auth: CurveAuth | None) -> None:
        self._registry, self._auth = registry, auth
        self.language = ModelVocabulary("", "")

    @property
    def keys(self) -> ServerKeys | None:
        """What an endpoint for workers of other machines is bound with, where it is to ask for keys."""
        return self._auth.keys(DRAFTER) if self._auth is not None else None

    def refuse_key(self, key: str, why: str) -> None:
        """Refuses it from now on, and dismisses workers that joined with it; an empty one is no key."""
        if self._auth is not None and key:
            self._auth.refuse(key, why)

    def may_stay(self, role: str, key: str) -> bool:
        allowed = PREFILL if role == "prefill" else DRAFTER  # a prefill worker is trusted with the text
        return self._auth is not None and self._auth.is_allowed(allowed, key)

    def is_unauthorized(self, identity: bytes, first: zmq.Frame) -> bool:
        """Whether it has taken over a routing id whose owner came in with another key, or without one."""
        worker = self._registry.at(identity) if self._auth is not None else None
        return worker is not None and worker.key != key_shown(first)

    def refusal(self, identity: bytes, hello: Hello, key: str) -> str | None:
        """Why a stranger may not join; None when it may."""
        if key and not self.may_stay(hello.role, key):  # its connection is from when it still might
            return NOT_ALLOWED
        if key and hello.role == "target":
            return "its key is for drafters; expected a target's rank 0 on the server's machine, by its local endpoint"
        if not all(text.isprintable() for text in (hello.backend, hello.model, hello.note, hello.files)):
            return "its description is not printable text"
        ours, theirs = self.language, hello.vocabulary
        if theirs and ours.vocabulary and theirs != ours.vocabulary:
            return (
                f"its model {hello.model} has another vocabulary than this cluster's {ours.model}; expected a"
                " draft of the target's own family (`outrider pairs` lists some)"
            )
        return self._registry.refusal(identity, hello)
