"""The workers of this cluster: their names and state, and which workers may join. Knows no sockets or requests."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass, field

from msgspec.structs import replace

from outrider.orchestrator.auth import CurveAuth
from outrider.orchestrator.events import ModelVocabulary
from outrider.orchestrator.machine import system
from outrider.orchestrator.machine.spawn import SpawnedProcess
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.digest import digests_match
from outrider.protocol.keys import DRAFTER, PREFILL
from outrider.protocol.messages import Branches, Drafted, Hello, Message, Span, WorkerInfo, WorkerStats
from outrider.protocol.schema import clip
from outrider.protocol.stats import CacheUse
from outrider.protocol.worker_link import heartbeat_id, routing_id

# The latest offsets of a remote clock that count: those of about ten seconds, in which clocks hardly drift apart.
MAX_CLOCK_OFFSETS = 40

# After `LOST_AFTER_PINGS` unanswered pings a worker is lost; after `FROZEN_AFTER_PINGS` a drafter is not waited for.
LOST_AFTER_PINGS = 40
FROZEN_AFTER_PINGS = 8

# A worker that answers may go without progress for `MAX_STALL_RATIO` times its expected time, at least for
# `LOST_AFTER_PINGS` pings; if that time is unknown, for `UNKNOWN_STALL_RATIO` times `LOST_AFTER_PINGS` pings.
MAX_STALL_RATIO = 10
UNKNOWN_STALL_RATIO = 6
MIN_RESTART_WAIT_NS, MAX_RESTART_WAIT_NS = 250_000_000, 60_000_000_000
MAX_DEATHS = 5
STEADY_AFTER_NS = 60_000_000_000

# An honest drafter sends no invalid message, however late its messages come, so a few are enough to disconnect it.
MAX_INVALID_MESSAGES = 8
EMPTY_HELLO = Hello("target", "", 0, "", "", 0, 0, 0, 0, incarnation=0)
"""Replaces the HELLO of a worker that has not sent one."""

KEY_NOT_ALLOWED = "its key is not allowed (any more); allow it on the server with `outrider keys allow` and --as"
TARGET_NAME = "target-0"
MAX_WORKERS = 32
MAX_NAME_LENGTH = 64
MAX_BANNED_WORKERS = 4096


class RemoteClock:
    """Estimates the clock of another machine's worker by NTP's method: a heartbeat carries the worker's time, which
    lies between the ping and its answer. `round_trip_ns`: the latest time from a ping to its answer; 0: none has come.

    The fastest of the latest answers is the most precise; older ones do not count, because clocks drift. Clocks that
    may be equal are treated as equal. A jump of a worker's clock (its machine slept) is accepted at once, and work that
    it reports as not yet ended has ended when the report arrived.
    """

    def __init__(self) -> None:
        self.round_trip_ns = 0
        self._offsets = deque[tuple[int, int]](maxlen=MAX_CLOCK_OFFSETS)  # (possible error, how far it is ahead)

    def observe(self, asked_ns: int, theirs_ns: int, now_ns: int) -> None:
        """Records an answer with the worker's time: its ping left at `asked_ns`, it came at `now_ns` (this clock)."""
        self.round_trip_ns = now_ns - asked_ns
        error_ns, ahead_ns = self.round_trip_ns // 2 + 1, theirs_ns - (asked_ns + now_ns) // 2
        if any(abs(ahead_ns - before_ns) > error_ns + its_error_ns for its_error_ns, before_ns in self._offsets):
            self._offsets.clear()  # it has jumped or drifted
        self._offsets.append((error_ns, ahead_ns))

    @property
    def ahead_ns(self) -> int:
        """How far it is ahead of this clock; 0 if they may be the same."""
        error_ns, ahead_ns = min(self._offsets)
        return ahead_ns if abs(ahead_ns) > error_ns else 0

    def to_local(self, message: Message, now_ns: int) -> Message:
        """Returns a message that arrived at `now_ns` with its times on this clock, none after `now_ns`."""
        if not isinstance(message, Branches | Drafted):
            return message
        ended_ns = min(message.work.ended_ns - self.ahead_ns, now_ns) if self._offsets else now_ns
        started_ns = ended_ns - max(message.work.duration_ns, 0)
        return replace(message, work=Span(max(started_ns, 0), max(ended_ns, 0)))


@dataclass(slots=True)
class Heartbeat:
    """The answers of one worker: `unanswered` pings since the last, and `stalled` answers in a row without progress;
    `expected_s` is the expected time of its operation (0: not known).

    Pings are counted and not seconds, so after a pause of the server or its machine no worker counts as silent. A
    worker that answers may take ten times as long for an operation as it expects; one that loads does not answer yet,
    and may take ten times as long as its predecessor.
    """

    unanswered: int = 0
    stalled: int = 0
    progress: int = -1
    expected_s: float = 0.0

    def on_pong(self, progress: int, newest: bool, expected_s: float = 0.0) -> None:
        """Records an answer. Only answers to the `newest` ping count as `stalled`: late ones arrive all at once."""
        self.unanswered, self.expected_s = 0, expected_s
        if progress != self.progress:
            self.progress, self.stalled = progress, 0
        elif newest:
            self.stalled += 1

    def max_stalled(self, ping_interval_s: float) -> float:
        """Returns the number of pings that it may answer without progress."""
        if not self.expected_s:
            return UNKNOWN_STALL_RATIO * LOST_AFTER_PINGS
        return max(MAX_STALL_RATIO * self.expected_s / ping_interval_s, LOST_AFTER_PINGS)

    def is_frozen(self, ping_interval_s: float) -> bool:
        """Whether it must not be waited for; it may come back."""
        return self.unanswered >= FROZEN_AFTER_PINGS or self.stalled >= self.max_stalled(ping_interval_s) / 2

    def silence_reason(self, ping_interval_s: float, is_loading: bool) -> str | None:
        """Returns why it is given up, or None. While it loads it may be silent, unless its load time is known."""
        max_pings = self.max_stalled(ping_interval_s)
        if is_loading and self.expected_s and self.unanswered >= max_pings:
            return f"has made no progress while starting for {self.unanswered * ping_interval_s:.0f} s"
        if not is_loading and self.unanswered >= LOST_AFTER_PINGS:
            return f"has not answered for {self.unanswered * ping_interval_s:.0f} s"
        if not is_loading and self.stalled >= max_pings:
            return f"has made no progress for {self.stalled * ping_interval_s:.0f} s"
        return None


@dataclass(slots=True)
class Restarts:
    """The restarts of one worker: the number `done`, the `deaths` in a row, and when the next one is due, if at all. A
    target that joined by itself is not restarted: another must join by then.

    The wait doubles with each death in a row, up to a minute; the count starts again once the worker was steady. The
    target is given up after some deaths in a row, so that the operator notices; another worker only after as many
    loads with the same error. `failed_loads`: how many of the latest deaths in a row were loads that ended with
    `error`.
    """

    done: int = 0
    deaths: int = 0
    due_ns: int | None = None
    failed_loads: int = 0
    error: str = ""

    def died(self, now_ns: int, was_steady: bool, needed: bool, error: str = "") -> bool:
        """Counts a death; returns False if the worker is given up.

        Args:
            was_steady: it had worked for a request, or been ready for a while.
            needed: all requests depend on it.
            error: the error of its load, if the load failed.
        """
        self.deaths = 1 if was_steady else self.deaths + 1
        self.failed_loads = self.failed_loads + 1 if error and error == self.error else int(bool(error))
        self.error = error
        will_restart = (self.deaths if needed else self.failed_loads) < MAX_DEATHS
        self.due_ns = now_ns + self.wait_ns if will_restart else None
        return will_restart

    @property
    def wait_ns(self) -> int:
        """The time from the latest death to the next start."""
        return min(MIN_RESTART_WAIT_NS << min(self.deaths - 1, 32), MAX_RESTART_WAIT_NS)

    def is_due(self, now_ns: int) -> bool:
        return self.due_ns is not None and now_ns >= self.due_ns

    def begun(self) -> None:
        """Records that it was restarted."""
        self.done, self.due_ns = self.done + 1, None


@dataclass(slots=True)
class Worker:
    """One worker. `state` is starting, ready, refused (can't work here), frozen (silent, and may come back),
    restarting or lost.

    `spawned` is None if it joined by itself. While it restarts, `hello` is its predecessor's. It loaded from `begun_ns`
    to `entered_ns`, and has `worked` for a request since then. `kv_limit` is its budget for texts in bytes, `key` the
    key that it joined with, if it needed one. `invalid` counts its invalid messages by kind.
    """

    name: str
    role: str
    incarnation: int
    spawned: SpawnedProcess | None
    state: str = "starting"
    hello: Hello | None = None
    fault: str = ""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    kv_limit: int = 0
    cache: CacheUse = field(default_factory=CacheUse)
    restarts: Restarts = field(default_factory=Restarts)
    worked: bool = False
    begun_ns: int = 0
    entered_ns: int = 0
    invalid: Counter[str] = field(default_factory=Counter)
    key: str = ""
    clock: RemoteClock = field(default_factory=RemoteClock)

    @property
    def entered(self) -> bool:
        """Whether it has sent HELLO and is not given up."""
        return self.state in ("ready", "frozen")

    def other_model(self, hello: Hello) -> str | None:
        """Returns why the sender of `hello` can't replace this worker, or None: another model makes other texts."""
        before = self.hello
        if before is None or _model_identity(before) == _model_identity(hello):
            return None
        return f"{self} came back with another model ({hello.model}) than before ({before.model}); restart the server"

    def is_steady(self, now_ns: int) -> bool:
        """Whether it has worked for a request, or been ready for `STEADY_AFTER_NS`."""
        return self.worked or bool(self.entered_ns and now_ns - self.entered_ns >= STEADY_AFTER_NS)

    def loss_reason(self, ping_interval_s: float) -> str | None:
        """Returns why it must be given up, or None: its process has ended, or it is silent."""
        code = self.spawned.poll() if self.spawned else None
        if self.spawned and code is not None:
            return self.fault or f"{self} {system.describe_exit(code, self.spawned.log_tail())}"
        if self.spawned is None and self.fault:
            return f"{self} has left: {clip(self.fault)!r}"
        silence = self.heartbeat.silence_reason(ping_interval_s, not self.entered)
        return f"{self} {silence}" if silence else None

    def stats(self) -> WorkerStats:
        hello = self.hello or EMPTY_HELLO
        info = {name: getattr(hello, name) for name in WorkerInfo.__struct_fields__}
        info |= {"role": self.role, "name": self.name, "note": clip(self.fault or hello.note)}
        info |= {"pid": self.spawned.pid} if self.spawned else {}
        return WorkerStats(
            **info,
            state=self.state,
            cache=self.cache,
            restarts=self.restarts.done,
            invalid_messages=dict(sorted(self.invalid.items())),
            round_trip_ms=self.clock.round_trip_ns / MILLISECOND_NS,
            fingerprint=clip("-".join(filter(None, (hello.files, hello.number_format)))),
        )

    def __str__(self) -> str:
        return f"{self.role} worker {self.name}"


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """A drafter that must not be waited for, or a worker that is `gone`; `fatal`: the server can't run without it."""

    worker: Worker
    why: str
    gone: bool = False
    fatal: bool = False


def _model_identity(hello: Hello) -> tuple[object, ...]:
    """Returns what identifies a worker's model and number format."""
    sizes = hello.vocab_size, hello.context_length, hello.parameters, hello.weight_bytes
    return hello.backend, *sizes, hello.files, hello.number_format


def _feature_mismatch(drafter: Hello, target: Hello) -> str:
    """Returns why a drafter can't read the target's features; empty: it can, or it reads none."""
    if not drafter.features or drafter.features == target.features:
        return ""
    made = f"provides those of {target.features}" if target.features else "provides none"
    why = f" ({target.note})" if target.note and not target.features else ""
    return (
        f"{drafter.model} reads features of {drafter.features}, and the target {made}{why}; expected the same head and"
        " the same model on both sides"
    )


def _prefill_mismatch(reader: Hello, target: Hello) -> str:
    """Returns why a worker can't read prompts for the target; empty: it can.

    Keys and values of other weights would change the text. If the target's activations are rounded (`int8-...`), the
    kernels must be the same, bit by bit.
    """
    if not target.abilities.takes_kv:
        return "the target of this cluster must read its prompts itself: its state can't be transferred"
    if reader.files != target.files:
        return (
            f"its model {reader.model} ({reader.files}) is not the target's ({target.files}); expected the same files"
            " on both"
        )
    if reader.number_format == target.number_format or not target.number_format.startswith("int8-"):
        return ""
    return (
        f"it computes in {reader.number_format or 'another format'} and the target in {target.number_format}: their"
        " keys and values differ; expected --cpu-kernels mlx on both, or CPUs of one kind"
    )


class WorkerRegistry:
    """Every worker by name and by routing id.

    The orchestrator assigns names, each to one process. A worker's routing id is its incarnation, which the
    orchestrator draws for workers that it spawns, and a drafter that joins draws itself. A living worker's name can't
    be taken over: ZeroMQ leaves a routing id with its holder, on other machines with the holder's key, and a name stays
    with its incarnation. Key, description and vocabulary decide which workers may join and stay.

    `drafters_may_join`: whether draft workers are used. `awaited` is the digest of the files of the target
    that may join (`protocol.digest`); None: none may. `auth` checks keys; None: none are required. `language` is the
    vocabulary of this cluster, once known.
    """

    def __init__(self, drafters_may_join: bool, awaited: str | None = None, auth: CurveAuth | None = None) -> None:
        self._drafters_may_join, self._awaited, self._auth = drafters_may_join, awaited, auth
        self.language = ModelVocabulary("", "")
        self._named: dict[str, Worker] = {}
        self._at: dict[bytes, Worker] = {}  # by routing id
        self._banned: dict[int, str] = {}  # by incarnation: why it was dismissed

    def all(self) -> list[Worker]:
        return list(self._named.values())

    def ready(self, role: str) -> list[Worker]:
        return [worker for worker in self._named.values() if worker.role == role and worker.state == "ready"]

    def named(self, name: str) -> Worker | None:
        return self._named.get(name)

    def at(self, identity: bytes) -> Worker | None:
        """Returns the worker with this routing id or heartbeat id; None for unknown peers and workers given up."""
        return self._at.get(identity)

    def assign(self, worker: Worker) -> None:
        """Assigns its name and routing ids to a worker; its predecessor loses them."""
        before = self._named.pop(worker.name, None)
        if before is not None:
            self.drop_routing_ids(before)
        self._named[worker.name] = worker
        main_id = routing_id(worker.incarnation)
        self._at[main_id] = self._at[heartbeat_id(main_id)] = worker

    def drop_routing_ids(self, worker: Worker) -> None:
        """Makes the worker's process an unknown peer; its name stays registered."""
        self._at = {identity: one for identity, one in self._at.items() if one is not worker}

    def ban_worker(self, worker: Worker, why: str) -> None:
        """Does the same as `drop_routing_ids`, and bars the process from joining again."""
        self.drop_routing_ids(worker)
        self._banned[worker.incarnation] = why
        if len(self._banned) > MAX_BANNED_WORKERS:
            del self._banned[next(iter(self._banned))]

    def is_key_allowed(self, role: str, key: str) -> bool:
        allowed = PREFILL if role == "prefill" else DRAFTER  # a prefill worker is trusted with the text
        return self._auth is not None and self._auth.is_allowed(allowed, key)

    def misfit_reason(self, hello: Hello) -> str:
        """Returns why a worker can't work for this cluster's target; empty: it can, or too little is known of both."""
        ours, theirs = self.language, hello.vocabulary
        if theirs and ours.vocabulary and theirs != ours.vocabulary:
            return (
                f"its model {hello.model} has another vocabulary than this cluster's {ours.model}; expected a"
                " draft of the target's own family (`outrider pairs` lists some)"
            )
        target = self._named.get(TARGET_NAME)
        if hello.role == "target" or target is None or target.hello is None:
            return ""
        mismatch = _prefill_mismatch if hello.role == "prefill" else _feature_mismatch
        return mismatch(hello, target.hello)

    def refusal(self, identity: bytes, hello: Hello, key: str) -> str | None:
        """Returns why a stranger that sent HELLO is refused; None if it may join."""
        if key and not self.is_key_allowed(hello.role, key):  # it connected before its key was refused
            return KEY_NOT_ALLOWED
        if key and hello.role == "target":
            return "its key is for drafters; expected a target's rank 0 on the server's machine, by its local endpoint"
        if not all(text.isprintable() for text in (hello.backend, hello.model, hello.note, hello.files)):
            return "its description is not printable text"
        if why := self.misfit_reason(hello):
            return why
        if identity != routing_id(hello.incarnation):
            return "its routing id is not that of its incarnation; run the same release of outrider on both sides"
        if hello.incarnation in self._banned:
            return f"this cluster has dismissed it: {self._banned[hello.incarnation]}"
        if hello.role == "target":
            return self._target_refusal(hello)
        if hello.role == "draft" and not self._drafters_may_join:
            return "this server uses no draft workers; start it without --colocate and --draft-backend none"
        if len(hello.name) > MAX_NAME_LENGTH or not hello.name.isprintable():
            return (
                f"the name {hello.name[:MAX_NAME_LENGTH]!r} is not a valid name; expected at most"
                f" {MAX_NAME_LENGTH} printable characters"
            )
        holder = self._named.get(hello.name)
        if holder is not None and (holder.spawned is not None or holder.entered):
            theirs = _describe(holder.hello) if holder.hello is not None else f"a {holder.role} worker that starts"
            return (
                f"the name {hello.name} is taken in this cluster by {theirs}; choose another for {_describe(hello)}, or"
                " omit it to get one"
            )
        if hello.name == TARGET_NAME:
            return f"the name {TARGET_NAME} is the target's; choose another, or omit it to get one"
        if sum(worker.state != "lost" for worker in self.all()) >= MAX_WORKERS:
            return f"the cluster has {MAX_WORKERS} workers, the maximum; stop one first"
        return None

    def _target_refusal(self, hello: Hello) -> str | None:
        """Returns why a target may not join, or None. It must be the same as the one before, if there was one."""
        before = self._named.get(TARGET_NAME)
        if self._awaited is None:
            return (
                "this cluster starts its own target and accepts no other; join as a draft worker,"
                " or start the cluster with await_target"
            )
        if before is not None and before.entered:
            return "the cluster already has a target; stop that one, or, if it has just died, try again in a minute"
        if not digests_match(self._awaited, hello.files):
            return (
                f"its model {hello.model} ({hello.files}) is not the one that the server was started with"
                f" ({self._awaited}); expected the same files on both"
            )
        return before.other_model(hello) if before is not None else None

    def join(self, hello: Hello, key: str = "") -> Worker:
        """Registers a worker that joins by itself, with this key; workers that left earlier are dropped."""
        before = self._named.get(TARGET_NAME) if hello.role == "target" else None
        for left in [worker for worker in self.all() if worker.spawned is None and worker.state == "lost"]:
            del self._named[left.name]
        free = (name for n in itertools.count(1) if (name := f"{hello.role}-{n}") not in self._named)
        name = TARGET_NAME if hello.role == "target" else hello.name or next(free)
        worker = Worker(name, hello.role, hello.incarnation, None, key=key)
        if before is not None:
            worker.restarts = before.restarts
            worker.restarts.begun()
        self.assign(worker)
        return worker


def _describe(hello: Hello) -> str:
    return f"a {hello.role} worker (process {hello.pid}, {hello.model or hello.backend})"
