"""Starts the workers' processes, finds those that died or hang, and restarts them or gives them up.

A worker that never became ready is an error of the server's start; a drafter that can't draft here is left out. A
worker that had been ready is restarted; its successor keeps its name, its memory cost and its abilities. A worker that
joined by itself is not restarted; if it was a target, another may join. Knows workers and processes, but no sockets or
requests.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from pathlib import Path

from outrider.orchestrator.core.worker_registry import MAX_DEATHS, TARGET_NAME, Worker, WorkerLoss, WorkerRegistry
from outrider.orchestrator.machine import system
from outrider.orchestrator.machine.spawn import MALLOC_ENV, STDERR, SpawnedProcess, child_environment, worker_command
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import clock
from outrider.protocol.errors import InvalidRequest, WorkerError
from outrider.protocol.worker_link import INCARNATION_BITS

log = logging.getLogger(__name__)

STDIN = 0
STOP_GRACE_SECONDS = 5.0
TARGET_WAIT_SECONDS = 600


def spawn_worker(
    role: str, name: str, endpoint: str, settings: ServeSettings, run_dir: Path, incarnation: int
) -> SpawnedProcess:
    """Starts the `role` worker (target, draft or prefill) of this cluster; it connects to `endpoint` as `incarnation`.

    Raises:
        WorkerError: the process can't be started.
        InvalidRequest: MLX's library is not installed.
    """
    system.require_mlx()
    env = {
        **MALLOC_ENV,
        **system.blas_environment(child_environment(), system.threads_of(role, settings), settings.cpu_kernels),
        **system.drafter_core_variable(role, settings),
    }
    inherited = [os.dup(STDERR)] if settings.log_format == "json" else []
    command = worker_command(role, name, endpoint, settings, STDIN)
    command += [f"--incarnation={incarnation}", *(f"--log-fd={number}" for number in inherited)]
    try:
        process = SpawnedProcess(f"{role} worker", command, env, run_dir / f"{name}.log", "wb", inherited)
    finally:
        for number in inherited:
            os.close(number)
    system.assign_core(process.pid, role, settings)
    return process


class Supervisor:
    """Supervises the workers in `registry`."""

    def __init__(
        self, registry: WorkerRegistry, settings: ServeSettings, endpoint: str, run_dir: Path, ping_interval_s: float
    ) -> None:
        self._registry = registry
        self._settings = settings
        self._endpoint = endpoint
        self._run_dir = run_dir
        self._ping_interval_s = ping_interval_s
        self._dismissed: list[WorkerLoss] = []

    def start(self) -> None:
        """Starts the worker processes, which report their progress while they load."""
        if not self._settings.await_target:
            self._spawn("target", TARGET_NAME)
        for number in range(self._settings.drafters if self._settings.has_draft_worker else 0):
            self._spawn("draft", f"draft-{number}")
        for number in range(self._settings.prefill_workers):
            self._spawn("prefill", f"prefill-{number}")

    def losses(self, now_ns: int) -> list[WorkerLoss]:
        """Returns the workers newly found lost, which are ended, and newly frozen drafters, which keep running."""
        lost, self._dismissed = self._dismissed, []
        for worker in self._registry.all():
            if worker.state in ("lost", "refused") or worker.restarts.due_ns is not None:
                continue
            why = worker.loss_reason(self._ping_interval_s)
            if why is not None:
                lost.append(self._give_up(worker, why, now_ns))
            elif worker.state == "ready" and worker.heartbeat.is_frozen(self._ping_interval_s):
                worker.state = "frozen"
                if worker.role == "target":
                    log.warning("%s does not answer; requests wait for it", worker)
                else:  # the caller logs a loss
                    lost.append(WorkerLoss(worker, f"{worker} does not answer; requests continue without it"))
        return lost

    def revive(self) -> list[Worker]:
        """Marks the frozen workers that answer again as ready, and returns them."""
        frozen = [worker for worker in self._registry.all() if worker.state == "frozen"]
        revived = [worker for worker in frozen if not worker.heartbeat.is_frozen(self._ping_interval_s)]
        for worker in revived:
            worker.state = "ready"
            log.warning("%s answers again", worker)
        return revived

    def restart(self, now_ns: int) -> list[WorkerLoss]:
        """Restarts workers that are due, once their processes are gone. A failed start counts as a death.

        A target that joined by itself is given up instead: no other has joined in its place for `TARGET_WAIT_SECONDS`.
        """
        lost = []
        for before in self._registry.all():
            if not before.restarts.is_due(now_ns) or (before.spawned and before.spawned.poll() is None):
                continue
            if before.spawned is None:
                before.state, before.restarts.due_ns = "lost", None
                before.fault = f"{before.fault}; none has joined in its place for {TARGET_WAIT_SECONDS // 60} minutes"
                lost.append(WorkerLoss(before, before.fault, gone=True, fatal=True))
                continue
            before.restarts.begun()
            log.warning("restarting %s", before)
            try:
                self._spawn(before.role, before.name, before)
            except (WorkerError, InvalidRequest) as error:
                lost.append(self._schedule(before, str(error), now_ns))
        return lost

    def dismiss(self, worker: Worker, why: str) -> None:
        """Disconnects a worker and never restarts it; `losses` will report it."""
        self._registry.ban_worker(worker, why)
        worker.state, worker.fault = "refused" if worker.spawned else "lost", why
        if worker.spawned:
            worker.spawned.kill()
        self._dismissed.append(WorkerLoss(worker, why, gone=True))

    def close(self) -> None:
        """Ends all processes: with SIGTERM, and after a grace period for all together with SIGKILL."""
        spawned = [worker.spawned for worker in self._registry.all() if worker.spawned]
        for process in spawned:
            process.terminate()
        deadline = time.monotonic() + STOP_GRACE_SECONDS
        for process in spawned:
            process.wait(max(deadline - time.monotonic(), 0))

    def _give_up(self, worker: Worker, why: str, now_ns: int) -> WorkerLoss:
        """Ends a worker's process, and schedules a restart if it was started here and had been ready."""
        self._registry.drop_routing_ids(worker)
        worker.state, worker.fault = "lost", why
        if worker.spawned is None:
            if worker.role == "target":
                worker.state, worker.restarts.due_ns = "restarting", now_ns + TARGET_WAIT_SECONDS * clock.SECOND_NS
            return WorkerLoss(worker, why, gone=True)
        code = worker.spawned.poll()
        worker.spawned.kill()
        if worker.hello is None:
            return WorkerLoss(worker, why, gone=True, fatal=True)
        failed_load = why if not worker.entered_ns and code is not None and code > 0 else ""
        return self._schedule(worker, why, now_ns, worker.is_steady(now_ns), failed_load)

    def _schedule(
        self, worker: Worker, why: str, now_ns: int, was_steady: bool = False, failed_load: str = ""
    ) -> WorkerLoss:
        """Schedules a restart, unless the worker has died too often; see `Restarts.died`."""
        needed, restarts = worker.role == "target", worker.restarts
        will_restart = restarts.died(now_ns, was_steady, needed, failed_load)
        if restarts.deaths >= MAX_DEATHS:
            seconds = restarts.wait_ns / clock.SECOND_NS
            then = f"the next start is in {seconds:g} s" if will_restart else "it is not started again"
            why = f"{why}; it died {restarts.deaths} times in a row, and {then}"
        worker.state, worker.fault = "restarting" if will_restart else "lost", why
        return WorkerLoss(worker, why, gone=True, fatal=needed and not will_restart)

    def _spawn(self, role: str, name: str, before: Worker | None = None) -> None:
        incarnation = secrets.randbits(INCARNATION_BITS)
        spawned = spawn_worker(role, name, self._endpoint, self._settings, self._run_dir, incarnation)
        worker = Worker(name, role, incarnation, spawned, begun_ns=clock.now())
        if before is not None:
            worker.state, worker.hello, worker.restarts = "restarting", before.hello, before.restarts
            load_s = (before.entered_ns - before.begun_ns) / clock.SECOND_NS if before.entered_ns else 0.0
            worker.heartbeat.expected_s = load_s or before.heartbeat.expected_s
        self._registry.assign(worker)
