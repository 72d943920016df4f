"""Who is in the cluster: who is let in, who has which place, and what all of them can do.

`WorkerRegistry`: who is in the cluster, by routing id: a place is given once, to one process, and names are the
orchestrator's. A worker's routing id is its incarnation, which the orchestrator draws for those that it spawns and a
drafter that joins draws for itself. Nobody can take a living worker's place: ZeroMQ leaves a routing id with whoever
has it, beyond this machine with whoever comes with its key, and a name stays with its incarnation. Knows who is who;
knows nothing of sockets or requests.

`WorkerAdmission`: who is let in at the workers' socket, and who may stay: by key, by what it says of itself, by what
its model speaks. Reads the places and asks the gate; sends nothing and changes nothing but the keys that the gate
refuses.

`Roster`: who is in the cluster and what they can do: what the rounds, the front and `outrider status` ask about the
workers. Reads the places and changes nothing. Knows nothing of sockets or requests.
"""

from __future__ import annotations

import itertools
from collections import deque

import zmq

from outrider.orchestrator.auth import CurveAuth
from outrider.orchestrator.core.workers.worker import Worker, reads_alike
from outrider.orchestrator.events import ModelVocabulary
from outrider.orchestrator.limits import KVBudget, kv_budget
from outrider.orchestrator.machine.system import physical
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.digest import fits
from outrider.protocol.keyring import DRAFTER, PREFILL
from outrider.protocol.keys import ServerKeys, key_shown
from outrider.protocol.messages import Abilities, Hello, WorkerStats
from outrider.protocol.worker_link import heartbeat_of, routing_id

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
        """Whose hot socket or heartbeat this is; None for strangers and for those who were given up."""
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
        """A place for who came by itself, with this key, and was not refused; those who left earlier are forgotten."""
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
    """`auth`: who asks for keys; None: nobody does. `language`: what tokens mean in this cluster, once it is known."""

    def __init__(self, registry: WorkerRegistry, auth: CurveAuth | None) -> None:
        self._places, self._auth = registry, auth
        self.language = ModelVocabulary("", "")

    @property
    def keys(self) -> ServerKeys | None:
        """What an endpoint for workers of other machines is bound with, where it is to ask for keys."""
        return self._auth.keys(DRAFTER) if self._auth is not None else None

    def refuse_key(self, key: str, why: str) -> None:
        """Lets it in no more, and sends away who is here with it; an empty one is nobody's."""
        if self._auth is not None and key:
            self._auth.refuse(key, why)

    def may_stay(self, role: str, key: str) -> bool:
        allowed = PREFILL if role == "prefill" else DRAFTER  # who reads prompts is trusted with the text
        return self._auth is not None and self._auth.is_allowed(allowed, key)

    def is_unauthorized(self, identity: bytes, first: zmq.Frame) -> bool:
        """Whether it has taken over a routing id whose owner came in with another key, or without one."""
        worker = self._places.at(identity) if self._auth is not None else None
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
        return self._places.refusal(identity, hello)


class Roster:
    """The workers that have a place, by name and by what they do."""

    def __init__(self, registry: WorkerRegistry, settings: ServeSettings) -> None:
        self._places, self._settings = registry, settings
        self._memory = physical()

    @property
    def ready(self) -> bool:
        """Every worker this cluster was meant to have is there, or is done without."""
        spawned = [worker for worker in self._places.all() if worker.spawned]
        return self.has_target() and all(worker.state in ("ready", "refused", "lost") for worker in spawned)

    @property
    def target_context(self) -> int:
        target = self._places.named(TARGET)
        return target.hello.context_length if target and target.hello else 0

    @property
    def target_abilities(self) -> Abilities:
        target = self._places.named(TARGET)
        return target.hello.abilities if target and target.hello else Abilities()

    @property
    def kv_budget(self) -> KVBudget:
        """What texts may take in all workers that are there."""
        return kv_budget(self._settings.kv_memory, self.stats(), self._memory)

    def notes(self) -> list[str]:
        """Why requests get less speculation than was asked for, a sentence each."""
        able = self.target_abilities
        drafters = [worker for worker in self._places.all() if worker.role == "draft" and worker.spawned]
        refused = [worker.fault for worker in drafters if worker.state in ("refused", "lost")]
        if not able.chains:
            return [f"speculation is off: {able.why}"]
        return [*(f"no draft model: {why}" for why in refused), *able.left_out]

    def is_target(self, name: str) -> bool:
        worker = self._places.named(name)
        return worker is not None and worker.role == "target"

    def drafters(self) -> set[str]:
        return {worker.name for worker in self._places.all() if worker.role == "draft" and worker.state == "ready"}

    def prefill_workers(self) -> set[str]:
        """Those of the target's own model, if it takes over what they read."""
        target = self._places.named(TARGET)
        if target is None or target.hello is None or not target.hello.abilities.takes_kv:
            return set()
        found = [worker for worker in self._places.all() if worker.role == "prefill" and worker.state == "ready"]
        return {worker.name for worker in found if worker.hello and reads_alike(worker.hello, target.hello)}

    def vocabulary(self, name: str) -> int:
        worker = self._places.named(name)
        return worker.hello.vocab_size if worker and worker.hello else 0

    def features(self, name: str) -> str:
        worker = self._places.named(name)
        return worker.hello.features if worker and worker.hello else ""

    def model(self, name: str) -> object:
        worker = self._places.named(name)
        return (worker.hello.vocab_size, worker.hello.parameters) if worker and worker.hello else None

    def has_target(self) -> bool:
        target = self._places.named(TARGET)
        return target is not None and target.entered

    def stats(self) -> tuple[WorkerStats, ...]:
        return tuple(worker.stats() for worker in self._places.all())
