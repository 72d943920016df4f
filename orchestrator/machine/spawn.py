"""Starts the orchestrator's processes: their command lines and logs.

Knows command lines and process ids; knows nothing of messages.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from outrider.orchestrator.machine import system
from outrider.orchestrator.pairing.model_files import PACKAGE_FOLDER, in_process_drafters
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import InvalidRequest, WorkerError
from outrider.protocol.worker_link import WORKER_MODULES_VARIABLE

LOG_TAIL_BYTES, LOG_TAIL_LINES = 4096, 3
STDIN, STDERR = 0, 2
MODELS_ONLY = "outrider.engine.models_only"  # runs a program
MODULES = {"target": "outrider.target_worker", "draft": "outrider.draft_worker", "prefill": "outrider.prefill_worker"}

# Freed blocks of 1 MiB and more return to the system. By default glibc raises this threshold when it sees such blocks;
# a worker then keeps free memory between longer-lived blocks. What a forward frees at the heap's end is kept for the
# next forward: requesting it again costs a quarter of a drafter's forward. Other systems ignore these variables.
MALLOC_ENV = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(32 << 20)}


class SpawnedProcess(subprocess.Popen[bytes]):
    """A worker or the HTTP server, in a session of its own, to all of whose processes signals go; `name` is its name in
    errors.

    It ends when its stdin closes, and so with this process, however that ends. Its output goes to `log`.

    Raises:
        WorkerError: it can't be started.
    """

    def __init__(
        self, name: str, command: list[str], env: Mapping[str, str], log: Path, log_mode: str, inherited: Sequence[int]
    ) -> None:
        """`log_mode`: see `open`. `inherited`: the file descriptors that the process keeps."""
        self._log = log
        try:
            with log.open(log_mode) as output:
                fcntl.flock(output, fcntl.LOCK_SH)  # macOS removes unlocked old files; the process inherits the lock
                super().__init__(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=env,
                    pass_fds=inherited,
                    start_new_session=True,
                )
        except OSError as error:
            cause = system.likely_cause(1, str(error)) or f"expected {sys.executable} to run, and {log} to be writable"
            raise WorkerError(f"the {name} can't be started ({error}); {cause}") from None

    def log_tail(self) -> str:
        """Returns the last lines of its log as one line, for an error message; empty if there are none."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES, 0))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return " | ".join(line.strip() for line in lines[-LOG_TAIL_LINES:] if line.strip())

    def write(self, line: bytes) -> None:
        """Writes a line to the stdin of the process; the line is lost if the process has ended."""
        if self.stdin is not None:
            with suppress(BrokenPipeError):
                os.write(self.stdin.fileno(), line)

    def close_stdin(self) -> None:
        """Asks the process to end cleanly."""
        if self.stdin is not None:
            self.stdin.close()

    def send_signal(self, sig: int) -> None:
        """Sends a signal, unless the process has ended, and closes its stdin; `terminate` and `kill` do the same."""
        if self.poll() is None:  # reaped only here, so the id still belongs to this process
            with suppress(PermissionError):  # macOS's answer if the process has ended meanwhile
                os.killpg(self.pid, sig)
        self.close_stdin()

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code; kills the process if it has not ended within `timeout` seconds."""
        try:
            return super().wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            return super().wait()


def worker_command(
    role: str, name: str, endpoint: str, settings: ServeSettings, parent_fd: int | None = None
) -> list[str]:
    """Returns the command line of a worker; `settings` must name folders (see `pairing`)."""
    model = settings.draft_model if role == "draft" else settings.model
    options = ["--endpoint", endpoint, "--name", name, "--model", str(model)]
    options += ["--log-level", settings.log_level, "--log-format", settings.log_format]
    if role == "draft":
        options += ["--backend", settings.draft_backend, "--fan-out", settings.fan_out]
        options += ["--prefill", settings.draft_prefill, "--device", settings.draft_device]
        options += ["--target", str(settings.model)] if settings.drafts_with_head else []
    if role == "prefill":
        options += ["--backend", settings.prefill_backend]
    for drafter in in_process_drafters(settings) if role == "target" else ():
        options += ["--drafter", *drafter]
    if role == "target" and settings.ngrams:
        options += ["--ngrams", settings.ngram_table or ""]
    if role == "target" and settings.drafts_with_head and not settings.colocate:
        options += ["--publish-features", settings.draft_backend, str(settings.draft_model)]
    if role == "target":
        options += ["--shards", str(settings.shards)]
    if parent_fd is not None:
        options += ["--parent-fd", str(parent_fd)]
    return [*python("-m", *worker_module(role)), *options]


def worker_module(role: str) -> list[str]:
    """Returns the module that a worker of this role runs, and its first arguments.

    Raises:
        InvalidRequest: `WORKER_MODULES_VARIABLE` can't be read.
    """
    try:
        named = msgspec.json.decode(os.environ.get(WORKER_MODULES_VARIABLE, "{}"), type=dict[str, list[str]])
    except msgspec.DecodeError as error:
        raise InvalidRequest(
            f"{WORKER_MODULES_VARIABLE} can't be read ({error}); expected JSON such as"
            ' {"target": ["MODULE", "ARGUMENT"]}'
        ) from error
    return named.get(role, [MODULES[role]])


def python(*arguments: str) -> list[str]:
    """Returns this interpreter's command line; the path excludes the current directory, which may shadow packages."""
    return [sys.executable, "-P", *arguments]


def child_environment() -> dict[str, str]:
    """Returns this process's environment, with the package on the path for any current directory."""
    paths = [str(PACKAGE_FOLDER.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "TOKENIZERS_PARALLELISM": "false"}


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
