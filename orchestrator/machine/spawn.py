"""Worker processes: started in a session of their own, ended with the orchestrator however it goes.

A worker holds the read end of a pipe whose end of file ends it; its stderr is a log in the run directory. Knows command
lines and process ids; knows nothing of messages.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from outrider.orchestrator.machine import blas, cores
from outrider.orchestrator.machine.log_file import log_file
from outrider.orchestrator.machine.log_tail import log_tail
from outrider.orchestrator.machine.mlx_library import require_mlx
from outrider.orchestrator.pair.heads import own_drafters
from outrider.orchestrator.pair.model_files import PACKAGE
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import WorkerError

STDERR = 2
MODULES = {"target": "outrider.target_worker", "draft": "outrider.draft_worker", "prefill": "outrider.prefill_worker"}

# Blocks of 1 MiB and more are given back when they are freed. By itself glibc raises that size with what it sees, and a
# worker keeps what lies between longer-lived blocks. What a forward frees at the heap's end stays for the next one: to
# have it back costs a quarter of a draft's forward. Other systems do not look at these.
STEADY_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(32 << 20)}


class SpawnedWorker:
    """A worker process that this process started and may end."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], lifeline: int, log: Path) -> None:
        self.name = name
        self._process = process
        self._lifeline: int | None = lifeline
        self._log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def log_tail(self) -> str:
        """The last lines of its log as one line, for an error message."""
        return log_tail(self._log)

    def terminate(self) -> None:
        """Asks it to end in order; it has the same word from the closed pipe should it miss the signal."""
        self._signal(signal.SIGTERM)
        self._let_go()

    def kill(self) -> None:
        """Ends it and whatever it started, at once."""
        self._signal(signal.SIGKILL)
        self._let_go()

    def wait(self, grace: float) -> int:
        """Its exit code; it is killed when it has not ended within `grace` seconds."""
        try:
            return self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:  # reaped only here, so the id is still its own
            os.killpg(self._process.pid, number)

    def _let_go(self) -> None:
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            os.close(lifeline)


def spawn_worker(
    role: str, name: str, endpoint: str, settings: ServeSettings, run_dir: Path, incarnation: int
) -> SpawnedWorker:
    """Starts the `role` worker (target, draft or prefill) of this cluster; it connects to `endpoint` as `incarnation`.

    Raises:
        WorkerError: the process can't be started.
        InvalidRequest: MLX's library is not installed.
    """
    require_mlx()
    log = run_dir / f"{name}.log"
    theirs, lifeline = os.pipe()
    inherited = [theirs]
    command = worker_command(role, name, endpoint, settings, theirs)
    command += ["--incarnation", str(incarnation)]
    if settings.log_format == "json":
        inherited.append(os.dup(STDERR))
        command += ["--log-fd", str(inherited[-1])]
    try:
        with log_file(log, "wb") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env={**STEADY_MEMORY, **blas.environment(child_environment(), settings.threads, settings.cpu_kernels)},
                pass_fds=inherited,
                start_new_session=True,
            )
    except OSError as error:
        os.close(lifeline)
        raise WorkerError(f"the {role} worker can't be started ({error}); expected {sys.executable} to run") from None
    finally:
        for number in inherited:
            os.close(number)
    cores.place(process.pid, role, settings)
    return SpawnedWorker(name, process, lifeline, log)


def worker_command(
    role: str, name: str, endpoint: str, settings: ServeSettings, parent_fd: int | None = None
) -> list[str]:
    """The command line of a worker; `settings` must name folders (see `pairing`)."""
    replay = role == "draft" and settings.draft_backend == "replay"
    model = settings.replay if replay else settings.draft_model if role == "draft" else settings.model
    options = ["--endpoint", endpoint, "--name", name, "--model", str(model), "--log-level", settings.log_level]
    options += ["--log-format", settings.log_format] if settings.log_format != "text" else []
    if role == "draft":
        options += ["--backend", settings.draft_backend, "--fan-out", settings.fan_out]
        options += ["--prefill", settings.draft_prefill] if settings.draft_prefill != "auto" else []
        options += ["--device", settings.draft_device] if settings.draft_device != "auto" else []
        options += ["--target", str(settings.model)] if settings.drafts_by_head else []
    if role == "prefill":
        options += ["--backend", settings.prefill_backend]
    for own in own_drafters(settings) if role == "target" else ():
        options += ["--own", *own]
    if role == "target" and settings.drafts_by_head and not settings.colocate:
        options += ["--tell", settings.draft_backend, str(settings.draft_model)]
    if role == "target" and settings.shards > 1:
        options += ["--shards", str(settings.shards)]
    if settings.simulate is not None and role != "prefill":
        options += ["--simulate", str(settings.simulate)]
    if parent_fd is not None:
        options += ["--parent-fd", str(parent_fd)]
    return [*python("-m", MODULES[role]), *options]


def python(*arguments: str) -> list[str]:
    """This interpreter, without the current directory on its path: a folder of the user's may be named like a room."""
    return [sys.executable, "-P", *arguments]


def child_environment() -> dict[str, str]:
    """This process's environment, in which our rooms are found wherever it was started."""
    paths = [str(PACKAGE.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "TOKENIZERS_PARALLELISM": "false"}
