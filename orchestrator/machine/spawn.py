"""The processes that the orchestrator starts, and what is read, logged and removed beside them.

`SpawnedWorker`: a worker process, in a session of its own, which ends with the orchestrator however that ends: it holds
the read end of a pipe whose end of file ends it. Its stderr is a log in the run directory. Knows command lines and
process ids; knows nothing of messages.

`Sweeper`: removes what a killed server leaves behind: its run directory and its socket file. A shell waits at the end
of a pipe that only the server holds, and removes them when the pipe ends. A server that ends in order removes its files
itself and dismisses the sweeper first.

`measured`: which reads a draft's prompts sooner on this Mac: MLX, or its Core ML package. The draft worker's process
measures it and keeps the result, where a drafter finds it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

from outrider.orchestrator.machine import system
from outrider.orchestrator.machine.system import require_mlx
from outrider.orchestrator.pairing.model_files import PACKAGE, in_process_drafters
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import WorkerError
from outrider.protocol.socket_files import SocketLock

log = logging.getLogger(__name__)


def log_file(path: Path, mode: str) -> BinaryIO:
    """Opened; a process that can't be heard is better than none."""
    try:
        return open(path, mode)  # type: ignore[return-value]
    except OSError as error:
        log.warning("can't write %s (%s): that process runs without a log", path, error.strerror)
        return open("/dev/null", "wb")


TAIL_BYTES = 4096
TAIL_LINES = 3


def log_tail(path: Path) -> str:
    """The last lines; empty when there are none, or no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - TAIL_BYTES, 0))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return " | ".join(line.strip() for line in lines[-TAIL_LINES:] if line.strip())


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
                env={
                    **STEADY_MEMORY,
                    **system.environment(child_environment(), settings.threads, settings.cpu_kernels),
                },
                pass_fds=inherited,
                start_new_session=True,
            )
    except OSError as error:
        os.close(lifeline)
        raise WorkerError(f"the {role} worker can't be started ({error}); expected {sys.executable} to run") from None
    finally:
        for number in inherited:
            os.close(number)
    system.place(process.pid, role, settings)
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
    for own in in_process_drafters(settings) if role == "target" else ():
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


# $1: the run directory. $2: a socket elsewhere, $3: what its lock file holds and $4: its inode while it is still ours.
_SCRIPT = """
while read -r _; do :; done
rm -rf -- "$1"
[ -n "$2" ] && [ "$(cat -- "$2.lock")" = "$3" ] && [ "$(ls -di -- "$2")" = "$4 $2" ] && rm -f -- "$2" "$2.lock"
"""


class Sweeper:
    """Waits beside the server for its end, to remove `directory` and the socket of `lock`; what others made stays."""

    def __init__(self, directory: Path, lock: SocketLock | None) -> None:
        elsewhere = [lock.path, lock.token, str(lock.inode)] if lock is not None else ["", "", ""]
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "outrider-sweeper", str(directory), *elsewhere],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal to the server's group must not end the one who sweeps after it
        )

    def dismiss(self) -> None:
        """Nothing is left to sweep."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


READER_SECONDS = 1200.0


def measured(draft_model: str) -> str | None:
    """A sentence that says who reads which prompts, or why that is not known; None where there is no Core ML."""
    if sys.platform != "darwin":
        return None
    command = python("-m", "outrider.drafters.coreml.prompts", "--model", draft_model)
    try:
        done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=READER_SECONDS)
    except subprocess.TimeoutExpired:
        return f"prompts stay with MLX: Core ML had not read them after {READER_SECONDS:g} s"
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["no reason told"]
        return f"MLX reads prompts: {said[-1]}"
    return str(json.loads(done.stdout)["sentence"])
