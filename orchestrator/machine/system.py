"""The machine's libraries for computing, cores and open files."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from ctypes.util import find_library
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import EndpointError, InvalidRequest
from outrider.protocol.process import CONTROL_GROUPS, cpu_flags, cpu_quota, physical_memory
from outrider.protocol.version import install_command
from outrider.protocol.worker_link import ANY_CORE, CPU_KERNELS_VARIABLE, DRAFTER_CORE_VARIABLE

NO_OPENBLAS_NOTE = (
    "no OpenBLAS was found; ONNX Runtime computes the default model and most others on a CPU and doesn't need it"
    " (docs/exactness.md), but with a model that MLX computes, verifying M tokens takes M times as long as one"
    " instead of 1.2 to 1.4 times; install it (Debian, Ubuntu: apt install libopenblas0-pthread; Fedora: dnf install"
    " openblas)"
)
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_OPENBLAS_NAMES = ("openblas", "openblasp", "openblaso")
OPENBLAS_CORE_VARIABLE = "OPENBLAS_CORETYPE"
_OPENBLAS_CORES = {"avx512f": "SkylakeX", "avx2": "Haswell"}
"""OpenBLAS's kernels by what a CPU must have, the best first."""
_find_library = cache(find_library)
MLX_LIBRARY = Path("lib", "libmlx.so")

DRAFTER_NICE = 5
"""The drafter's nice value on the orchestrator's core: about a third of the orchestrator's share when both run."""

MAX_DEFAULT_THREADS = 8
"""With more threads, generating a token hardly gets faster, since its time is that of reading the weights."""

USABLE_CPUS: list[int] = sorted(getattr(os, "sched_getaffinity", lambda _: ())(0))
"""The logical CPUs that this process may use; empty where it can't choose (macOS)."""


def _find_cores(cpus: Sequence[int], topology: Path) -> list[int]:
    """Returns the first CPU of each core, or all CPUs of a single core."""
    cores: dict[str, int] = {}
    for cpu in cpus:
        siblings = str(cpu)
        with suppress(OSError):
            siblings = (topology / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        cores.setdefault(siblings, cpu)
    return list(cores.values()) if len(cores) > 1 else list(cpus)


USABLE_CORES = _find_cores(USABLE_CPUS, Path("/sys/devices/system/cpu"))
"""The CPUs to compute on, one per core, since a second thread on a core gains little; empty as above."""

WANTED_OPEN_FILES = 65_536

# Tried in turn if more is not allowed: macOS's OPEN_MAX, and the limit that mlx-lm sets on import.
FALLBACK_OPEN_FILES = (10_240, 4_096)

_PROCESS_ERRORS = "can't start new thread", "resource temporarily unavailable"
_MEMORY_ERRORS = (
    "memoryerror", "bad_alloc", "cannot allocate memory", "failed to map segment",
    *_PROCESS_ERRORS,
)  # fmt: skip


def find_openblas() -> str | None:
    """Returns the library to preload, which LD_PRELOAD may name; None if there is none, or none is needed.

    MLX's CPU wheel for Linux has the reference BLAS, whose cost is linear in rows; preloaded, OpenBLAS replaces it. On
    macOS MLX uses Accelerate.
    """
    if not needs_openblas():
        return None
    named = (path for path in os.environ.get("LD_PRELOAD", "").split(":") if "openblas" in path)
    return next(named, None) or next(filter(None, map(_find_library, _OPENBLAS_NAMES)), None)


def needs_openblas() -> bool:
    return sys.platform.startswith("linux")


def blas_notes() -> tuple[str, ...]:
    """Returns the notes on this machine's BLAS for the user; usually none."""
    return (NO_OPENBLAS_NOTE,) if needs_openblas() and find_openblas() is None else ()


def blas_environment(base: dict[str, str], threads: int, kernels: str | None = None) -> dict[str, str]:
    """Returns the environment `base` with OpenBLAS preloaded, if it is needed and found, and `threads` BLAS threads,
    but no more than the cores, because threads that wait for each other's core would be many times slower.

    OpenBLAS chooses kernels by the CPU's model, and for a model that it does not know those of the first 64-bit CPUs.
    Therefore the environment names them by the CPU's instruction sets, unless `base` names some.

    `kernels`: what computes forwards on a CPU (`protocol.worker_link`); None: as in `base`.
    """
    threads = min(threads, len(USABLE_CPUS) or os.cpu_count() or threads)
    changed = {**base, **dict.fromkeys(THREAD_VARIABLES, str(threads))}
    if kernels is not None:
        changed[CPU_KERNELS_VARIABLE] = kernels
    library = find_openblas()
    loaded = base.get("LD_PRELOAD", "")
    if library is not None and "openblas" not in loaded:
        changed["LD_PRELOAD"] = f"{loaded}:{library}".strip(":")
    core = next((core for flag, core in _OPENBLAS_CORES.items() if flag in cpu_flags()), None)
    return changed if core is None else {OPENBLAS_CORE_VARIABLE: core, **changed}


def require_mlx() -> None:
    """Checks that MLX's library is installed, before a process that imports MLX would fail with a traceback. On Linux
    it is a separate package that the user chooses.

    Raises:
        InvalidRequest: MLX's library is not installed.
    """
    if not sys.platform.startswith("linux"):
        return
    spec = find_spec("mlx")
    folders = spec.submodule_search_locations if spec is not None else None
    if not any(Path(folder, MLX_LIBRARY).is_file() for folder in folders or ()):
        raise InvalidRequest(f"MLX has no backend installed; run {install_command('cpu')}, or the extra cuda for a GPU")


def threads_of(role: str, settings: ServeSettings) -> int:
    """Returns the number of threads with which a worker of this `role` computes on a CPU.

    By default a drafter has one, and targets and prefill workers share the other cores, unless the machine has another
    cluster.
    """
    if settings.threads is not None:
        return settings.threads
    if role == "draft" or not settings.pin_cores:
        return 1
    share = (_num_cores() - _num_drafters(settings)) // (settings.shards + settings.prefill_workers)
    return max(1, min(share, MAX_DEFAULT_THREADS))


def all_threads(settings: ServeSettings) -> int:
    """Returns the number of threads with which target and drafters compute together."""
    return threads_of("target", settings) * settings.shards + threads_of("draft", settings) * _num_drafters(settings)


def _num_cores() -> int:
    """Returns the number of cores whose time this process may use."""
    return int(min(len(USABLE_CORES), cpu_quota()))


def _num_drafters(settings: ServeSettings) -> int:
    return settings.drafters if settings.has_draft_worker else 0


def assign_core(pid: int, role: str, settings: ServeSettings) -> None:
    """Pins the process of a `role` to its core; on the orchestrator's core it gets a lower priority.

    On two cores, target and drafter have one each, and the orchestrator has priority on the drafter's. On the target's
    core it would delay the target's forwards, for which everything waits, and the drafter works ahead anyway
    (docs/log/2026-11.md).
    """
    core = core_of(role, settings)
    pin_to_core(pid, core)
    if role == "draft" and core is not None:
        lower_priority(pid)


def core_of(role: str, settings: ServeSettings) -> int | None:
    """Returns the core for a `target`, `draft` or `orchestrator` process; None for any core, and for other roles."""
    if len(USABLE_CORES) != 2 or threads_of("target", settings) != 1 or not settings.has_draft_worker:
        return None
    if settings.shards > 1 or not settings.pin_cores:  # ranks that wait for each other would take turns on one core
        return None
    return {"target": USABLE_CORES[0], "draft": USABLE_CORES[-1], "orchestrator": USABLE_CORES[-1]}.get(role)


def drafter_core_variable(role: str, settings: ServeSettings) -> dict[str, str]:
    """Returns the environment variable that tells a target the drafters' core, if its own threads leave them one."""
    if role != "target":
        return {}
    if (core := core_of("draft", settings)) is not None:
        return {DRAFTER_CORE_VARIABLE: str(core)}
    shared = settings.threads is not None or not settings.pin_cores or settings.shards + settings.prefill_workers > 1
    spare = threads_of("target", settings) < min(_num_cores(), MAX_DEFAULT_THREADS)
    return {DRAFTER_CORE_VARIABLE: ANY_CORE} if settings.has_draft_worker and spare and not shared else {}


def pin_to_core(pid: int, core: int | None) -> None:
    """Pins process `pid` (0: this one), and those that it starts later, to `core`; None: to all `USABLE_CPUS`."""
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError):  # the process has ended, or pinning is not allowed here
        os.sched_setaffinity(pid, USABLE_CPUS if core is None else {core})


def lower_priority(pid: int) -> None:
    """Lowers the priority of process `pid`, which leads a session and has one thread."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, DRAFTER_NICE)
        Path(f"/proc/{pid}/autogroup").write_text(str(DRAFTER_NICE))  # for kernels that give each session its own share


def raise_file_limit() -> int:
    """Raises the limit of open files for this process and those that it starts; returns the limit. Each connection is a
    file; a Mac's terminal allows 256 by default, and ZeroMQ ends the process when none is left.

    Raises:
        EndpointError: the system allows too few files for a server and its workers.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (WANTED_OPEN_FILES, *FALLBACK_OPEN_FILES):
        with suppress(ValueError, OSError):  # more than the hard limit; macOS reports none, but has one
            if soft < wanted:
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return max(soft, wanted)
    raise EndpointError(
        f"this process may open {hard} files, but a server and its workers need {FALLBACK_OPEN_FILES[-1]};"
        " raise the hard limit (`ulimit -Hn` shows it, the system's administrator sets it)"
    )


def describe_exit(code: int, log_tail: str) -> str:
    """Returns the words for a process's end: its exit code, the likely cause, and the last words of its log, if any."""
    cause = likely_cause(code, log_tail)
    last = log_tail.rpartition(" | ")[2] if cause else log_tail  # the error without its traceback
    return f"ended with code {code}" + (f", {cause}" if cause else "") + (f": {last}" if last else "")


def likely_cause(code: int, log_tail: str = "", groups: Path = CONTROL_GROUPS) -> str:
    """Returns why a process with this exit code most likely ended, for want of memory or threads; "" if unknown.

    Beyond a limit of the address space, allocations and starts of threads fail, and libraries crash or print an error,
    which is in `log_tail`; beyond a limit of their control groups the kernel kills the process.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    crashed = -code in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGKILL)
    if limit != resource.RLIM_INFINITY and (crashed or any(words in log_tail.lower() for words in _MEMORY_ERRORS)):
        return f"most likely out of memory (ulimit -v allows a process {limit / 2**30:.1f} GiB)"
    whole, allowed = physical_memory(own=Path(os.devnull)), physical_memory(groups)
    if allowed < whole and code == -signal.SIGKILL:
        return f"most likely out of memory (this container or service is allowed {allowed / 2**30:.1f} GiB)"
    refused = any(words in log_tail.lower() for words in _PROCESS_ERRORS)
    return "most likely out of processes or threads; raise their limit (ulimit -u)" if refused else ""
