"""The workers' processes: starts them, finds which have died or hang, restarts those, and gives up.

A worker that never came up is an error of the start, and a drafter that can't draft here is done without. One that had
been ready is restarted after a while that grows with each death in a row; its place keeps its memory cost and its
abilities. A target is given up after some deaths in a row, others only where each load fails alike. A worker that
joined by itself is not restarted; a target that did is waited for. Knows places and processes; nothing of sockets or
requests.

`Restarts`: when a worker that died is restarted, and when no more. The wait doubles with each death in a row, up to a
minute; a worker that has done something since its start, or stood for a while, begins a new row. A worker on which all
requests depend is given up after so many deaths in a row, so that whoever runs the server notices; so is one whose
load fails again and again with the same error.

`Exits`: a descriptor that a poller can wait for, readable when one of our processes has ended. Linux has that;
elsewhere the core looks at its processes a few times a second. It reaps nothing: the process id stays the process's
until its owner asks for the exit code.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import sys
from dataclasses import dataclass
from pathlib import Path

from outrider.orchestrator.core.worker_registry import TARGET, Worker, WorkerLoss, WorkerRegistry
from outrider.orchestrator.machine.spawn import spawn_worker
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import clock
from outrider.protocol.errors import WorkerError
from outrider.protocol.worker_link import INCARNATION_BITS

FIRST_NS, LONGEST_NS = 250_000_000, 60_000_000_000
MOST_DEATHS = 5
STEADY_NS = 60_000_000_000


@dataclass(slots=True)
class Restarts:
    """One worker's: `done` so far, `deaths` in a row, and when the next start is due, if one is.

    `failed_loads`: the latest deaths in a row of which each was a load that ended with `error`.
    """

    done: int = 0
    deaths: int = 0
    due_ns: int | None = None
    failed_loads: int = 0
    error: str = ""

    def died(self, now_ns: int, worked: bool, stood_ns: int, needed: bool, error: str = "") -> bool:
        """Counts a death; False: it is given up.

        Args:
            worked: it had done something for a request.
            stood_ns: for so long it had been ready.
            needed: no request can do without it.
            error: what its load said at its own end, if that was its end.
        """
        self.deaths = 1 if worked or stood_ns >= STEADY_NS else self.deaths + 1
        self.failed_loads = self.failed_loads + 1 if error and error == self.error else int(bool(error))
        self.error = error
        comes_back = (self.deaths if needed else self.failed_loads) < MOST_DEATHS
        self.due_ns = now_ns + self.wait_ns if comes_back else None
        return comes_back

    @property
    def wait_ns(self) -> int:
        """How long after the latest death it is started again."""
        return min(FIRST_NS << min(self.deaths - 1, 32), LONGEST_NS)

    def is_due(self, now_ns: int) -> bool:
        return self.due_ns is not None and now_ns >= self.due_ns

    def begun(self) -> None:
        """It was started again."""
        self.done, self.due_ns = self.done + 1, None


class Exits:
    """Watches processes of this one by id. `fileno` is None where that can't be waited for."""

    def __init__(self) -> None:
        self._waiting = select.epoll() if sys.platform == "linux" else None
        self._watched: dict[int, int] = {}

    @property
    def fileno(self) -> int | None:
        return self._waiting.fileno() if self._waiting is not None else None

    def watch(self, pid: int) -> None:
        """From now on its end wakes; where the system refuses that, nothing happens."""
        if self._waiting is None:
            return
        try:
            self._watched[pid] = os.pidfd_open(pid)
        except OSError:
            return
        self._waiting.register(self._watched[pid], select.EPOLLIN)

    def forget(self, pid: int) -> None:
        """Its end is known, or does not matter any more."""
        held = self._watched.pop(pid, None)
        if held is not None:
            os.close(held)  # and so it is waited for no more

    def close(self) -> None:
        for pid in list(self._watched):
            self.forget(pid)
        if self._waiting is not None:
            self._waiting.close()


log = logging.getLogger(__name__)

STOP_GRACE_SECONDS = 5.0
AWAITED_SECONDS = 600


class Supervisor:
    """Of the workers at `registry`. `exits` wakes whoever waits for it when one of its processes has ended."""

    def __init__(
        self, registry: WorkerRegistry, settings: ServeSettings, endpoint: str, run_dir: Path, seconds_a_ping: float
    ) -> None:
        self.exits = Exits()
        self._registry = registry
        self._settings = settings
        self._endpoint = endpoint
        self._run_dir = run_dir
        self._seconds_a_ping = seconds_a_ping
        self._restarts: dict[str, Restarts] = {}
        self._dismissed: list[WorkerLoss] = []

    def start(self) -> None:
        """Starts the worker processes; they report as they load."""
        if not self._settings.await_target:
            self._spawn("target", TARGET)
        for number in range(self._settings.drafters if self._settings.has_draft_worker else 0):
            self._spawn("draft", f"draft-{number}")
        for number in range(self._settings.prefill_workers):
            self._spawn("prefill", f"prefill-{number}")

    def losses(self, now_ns: int) -> list[WorkerLoss]:
        """Workers newly found gone, which are ended, and drafters newly found frozen, which are left alone."""
        lost, self._dismissed = self._dismissed, []
        for worker in self._registry.all():
            if worker.state == "restarting" and worker.spawned is None:
                lost += self._overdue(worker, now_ns)
                continue
            if worker.state in ("lost", "refused") or self._awaits_start(worker):
                self._forget(worker)
                continue
            why = worker.why_gone(self._seconds_a_ping)
            if why is not None:
                lost.append(self._give_up(worker, why, now_ns))
            elif worker.state == "ready" and worker.heartbeat.is_frozen(self._seconds_a_ping):
                worker.state = "frozen"
                log.warning("%s does not answer", worker)
                if worker.role != "target":
                    lost.append(WorkerLoss(worker, f"{worker} does not answer; requests continue without it"))
        return lost

    def thawed(self) -> list[Worker]:
        """Workers that were frozen and answer again."""
        frozen = [worker for worker in self._registry.all() if worker.state == "frozen"]
        found = [worker for worker in frozen if not worker.heartbeat.is_frozen(self._seconds_a_ping)]
        for worker in found:
            worker.state = "ready"
            log.warning("%s answers again", worker)
        return found

    def restart(self, now_ns: int) -> list[WorkerLoss]:
        """Restarts workers that are due, once their processes are gone. A failed start counts as a death."""
        lost = []
        for name, restarts in self._restarts.items():
            before = self._registry.named(name)
            if before is None or not restarts.is_due(now_ns) or before.runs:
                continue
            restarts.begun()
            log.warning("restarting %s", before)
            try:
                self._spawn(before.role, name, before, restarts.done)
            except WorkerError as error:
                lost.append(self._again(before, str(error), now_ns))
        return lost

    def dismiss(self, worker: Worker, why: str) -> None:
        """It is not to be heard any more, nor started again; `losses` will tell."""
        self._registry.shut_out(worker)
        worker.state, worker.fault = "refused" if worker.spawned else "lost", why
        if worker.spawned:
            worker.spawned.kill()
        self._dismissed.append(WorkerLoss(worker, why, gone=True))

    def close(self) -> None:
        """Ends all processes, in order where they let it."""
        spawned = [worker.spawned for worker in self._registry.all() if worker.spawned]
        for process in spawned:
            process.terminate()
        for process in spawned:
            process.wait(STOP_GRACE_SECONDS)
        self.exits.close()

    def _awaits_start(self, worker: Worker) -> bool:
        restarts = self._restarts.get(worker.name)
        return restarts is not None and restarts.due_ns is not None

    def _give_up(self, worker: Worker, why: str, now_ns: int) -> WorkerLoss:
        """Ends what is left of it; one that was started here and had been ready is to come again."""
        self._registry.take_away(worker)
        worker.state, worker.fault = "lost", why
        if worker.spawned is None:
            if worker.role == "target":
                worker.state, worker.begun_ns = "restarting", now_ns
            return WorkerLoss(worker, why, gone=True)
        code = worker.spawned.exit_code()
        worker.spawned.kill()
        self._forget(worker)
        if worker.hello is None:
            return WorkerLoss(worker, why, gone=True, fatal=True)
        failed_load = why if not worker.entered_ns and code is not None and code > 0 else ""
        return self._again(worker, why, now_ns, worker.worked, worker.stood_ns(now_ns), failed_load)

    def _again(
        self, worker: Worker, why: str, now_ns: int, worked: bool = False, stood_ns: int = 0, failed_load: str = ""
    ) -> WorkerLoss:
        """Has it come again, unless it has died too often; see `Restarts.died`."""
        needed = worker.role == "target"
        restarts = self._restarts.setdefault(worker.name, Restarts())
        comes_back = restarts.died(now_ns, worked, stood_ns, needed, failed_load)
        if restarts.deaths >= MOST_DEATHS:
            seconds = restarts.wait_ns / clock.SECOND_NS
            then = f"the next start is in {seconds:g} s" if comes_back else "it is not started again"
            why = f"{why}; it died {restarts.deaths} times in a row, and {then}"
        worker.state, worker.fault = "restarting" if comes_back else "lost", why
        return WorkerLoss(worker, why, gone=True, fatal=needed and not comes_back)

    def _overdue(self, worker: Worker, now_ns: int) -> list[WorkerLoss]:
        """A target that came by itself, is gone, and has been waited for long enough."""
        if now_ns - worker.begun_ns < AWAITED_SECONDS * clock.SECOND_NS:
            return []
        worker.state = "lost"
        worker.fault = f"{worker.fault}; none has joined in its place for {AWAITED_SECONDS // 60} minutes"
        return [WorkerLoss(worker, worker.fault, gone=True, fatal=True)]

    def _forget(self, worker: Worker) -> None:
        if worker.spawned is not None:
            self.exits.forget(worker.spawned.pid)

    def _spawn(self, role: str, name: str, before: Worker | None = None, restarts: int = 0) -> None:
        incarnation = secrets.randbits(INCARNATION_BITS)
        spawned = spawn_worker(role, name, self._endpoint, self._settings, self._run_dir, incarnation)
        self.exits.watch(spawned.pid)
        worker = Worker(name, role, incarnation, spawned, restarts=restarts, begun_ns=clock.now())
        if before is not None:
            worker.state, worker.hello = "restarting", before.hello
            worker.heartbeat.expected_s = before.load_s or before.heartbeat.expected_s
        self._registry.give(worker)
