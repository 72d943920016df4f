"""The processes that the orchestrator starts, their logs, and the removal of their files.

`SpawnedWorker`: a worker process in a session of its own. It holds the read end of a pipe and ends when the pipe
closes, and so with the orchestrator, however that ends. Its stderr is a log in the run directory. Knows command lines
and process ids; knows nothing of messages.

`Sweeper`: a shell that removes the run directory and the socket file of a server that was killed. It waits for the end
of a pipe that only the server holds. A server that ends in order removes its files itself, and dismisses the sweeper
first.

`measured`: whether MLX or a Core ML package reads a draft model's prompts faster on this Mac. The process that measures
it saves the result where drafters look for it.
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
    """Opens a log file, or /dev/null if that fails: a process without a log is better than none."""
    try:
        return open(path, mode)  # type: ignore[return-value]
    except OSError as error:
        log.warning("can't write %s (%s): that process runs without a log", path, error.strerror)
        return open("/dev/null", "wb")


TAIL_BYTES = 4096
TAIL_LINES = 3


def log_tail(path: Path) -> str:
    """Returns the last lines of a log as one line; empty if there is no file or it is empty."""
    try:
        with path.open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - TAIL_BYTES, 0))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return " | ".join(line.strip() for line in lines[-TAIL_LINES:] if line.strip())


STDERR = 2
MODULES = {"target": "outrider.target_worker", "draft": "outrider.draft_worker", "prefill": "outrider.prefill_worker"}

# Freed blocks of 1 MiB and more return to the system. By default glibc raises this threshold when it sees such blocks;
# a worker then keeps free memory between longer-lived blocks. What a forward frees at the heap's end is kept for the
# next forward: to request it again costs a quarter of a drafter's forward. Other systems ignore these variables.
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
        """Returns the exit code, negative for the signal that ended the process; None while it runs."""
        return self._process.poll()

    def log_tail(self) -> str:
        """Returns the last lines of its log as one line, for an error message."""
        return log_tail(self._log)

    def terminate(self) -> None:
        """Asks the process to end in order, by a signal and by closing the pipe."""
        self._signal(signal.SIGTERM)
        self._close_lifeline()

    def kill(self) -> None:
        """Ends the process and all processes of its session at once."""
        self._signal(signal.SIGKILL)
        self._close_lifeline()

    def wait(self, grace: float) -> int:
        """Returns the exit code; kills the process if it has not ended within `grace` seconds."""
        try:
            return self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:  # reaped only here, so the id still belongs to this process
            os.killpg(self._process.pid, number)

    def _close_lifeline(self) -> None:
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
    """Returns the command line of a worker; `settings` must name folders (see `pairing`)."""
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
    for drafter in in_process_drafters(settings) if role == "target" else ():
        options += ["--own", *drafter]
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
    """Returns this interpreter's command line, without the current directory on the path, where a folder of the user
    may have the name of a package."""
    return [sys.executable, "-P", *arguments]


def child_environment() -> dict[str, str]:
    """Returns this process's environment, with the package on the path for any current directory."""
    paths = [str(PACKAGE.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "TOKENIZERS_PARALLELISM": "false"}


# $1: the run directory. $2: a socket elsewhere; it is still ours if its lock file holds $3 and its inode is $4.
_SCRIPT = """
while read -r _; do :; done
rm -rf -- "$1"
[ -n "$2" ] && [ "$(cat -- "$2.lock")" = "$3" ] && [ "$(ls -di -- "$2")" = "$4 $2" ] && rm -f -- "$2" "$2.lock"
"""


class Sweeper:
    """Removes `directory` and the socket of `lock` once the server has ended; a socket that is not ours stays."""

    def __init__(self, directory: Path, lock: SocketLock | None) -> None:
        elsewhere = [lock.path, lock.token, str(lock.inode)] if lock is not None else ["", "", ""]
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "outrider-sweeper", str(directory), *elsewhere],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal to the server's process group must not end the sweeper
        )

    def dismiss(self) -> None:
        """Ends the sweeper, once the server has removed its files."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


READER_SECONDS = 1200.0


def measured(draft_model: str) -> str | None:
    """Returns a note on what reads which prompts, or why that was not measured; None on systems without Core ML."""
    if sys.platform != "darwin":
        return None
    command = python("-m", "outrider.drafters.coreml.prompts", "--model", draft_model)
    try:
        done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=READER_SECONDS)
    except subprocess.TimeoutExpired:
        return f"MLX reads prompts: Core ML took more than {READER_SECONDS:g} s"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["the measurement failed without a message"]
        return f"MLX reads prompts: {lines[-1]}"
    return str(json.loads(done.stdout)["sentence"])
