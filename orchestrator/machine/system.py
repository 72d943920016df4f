"""What this machine has and allows: the libraries that workers compute with, cores, open files, memory.

`openblas`: a system OpenBLAS for the workers on Linux. MLX's CPU wheel carries the reference BLAS, whose cost is linear
in rows; preloaded, OpenBLAS takes its place. On macOS MLX uses Accelerate and nothing is needed. `require_mlx`: whether
MLX has its library, which on Linux is a package of its own that a person chooses.

`place`: which CPU core a process runs on. Only two cores need telling apart: there target and drafter have one each.
The orchestrator is on the drafter's core and has priority there: on the target's core it would delay the target's
forwards, on which everything waits, and the drafter works ahead anyway (docs/log.md). Linux only.

`raise_limit`: how many files this process may have open, of which each connection is one. A Mac's terminal allows 256
unless asked for more, and ZeroMQ ends the process when none is left. `physical`: how much memory this machine has, or
this container may take. `likely_cause`: whether a process died for want of it.
"""

from __future__ import annotations

import os
import platform
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import EndpointError, InvalidRequest
from outrider.protocol.version import install
from outrider.protocol.worker_link import CPU_KERNELS

MISSING = (
    "no OpenBLAS was found, so verifying M tokens costs M times one token instead of 1.2 to 1.4 times;"
    " install it (Debian, Ubuntu: apt install libopenblas0-pthread; Fedora: dnf install openblas)"
)
CHOICE = "OUTRIDER_OPENBLAS"
"""Names the library to preload; empty: none, MLX runs on what its wheel carries."""
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_NAMES = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblaso.so.0", "libopenblas.so")
_LDCONFIG_SECONDS = 5


def openblas() -> Path | None:
    """The library to preload, that of `CHOICE` before any other; None where there is none, or none is needed.

    Raises:
        InvalidRequest: `CHOICE` names no file.
    """
    chosen = os.environ.get(CHOICE)
    if not needs_openblas() or chosen == "":
        return None
    if chosen is not None:
        return _given(Path(chosen))
    machine = platform.machine()
    folders = [f"/usr/lib/{machine}-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib64", "/usr/local/lib"]
    for folder in folders:
        for name in _NAMES:
            if Path(folder, name).is_file():
                return Path(folder, name)
    return _known_to_loader()


def _given(library: Path) -> Path:
    if not library.is_file():
        raise InvalidRequest(f"{CHOICE} names {library}, which is not a file; expected a libopenblas.so.0, or nothing")
    return library


def needs_openblas() -> bool:
    return sys.platform.startswith("linux")


def notes() -> tuple[str, ...]:
    """What a person should know about this machine's BLAS; mostly nothing."""
    wanted = needs_openblas() and os.environ.get(CHOICE) != ""
    return (MISSING,) if wanted and openblas() is None else ()


def environment(base: dict[str, str], threads: int, kernels: str | None = None) -> dict[str, str]:
    """`base` with OpenBLAS preloaded where it is needed and found, and `threads` threads for any BLAS there is.

    `kernels`: what makes forwards on a CPU (`protocol.worker_link`); None: what `base` says.
    """
    changed = {**base, **dict.fromkeys(THREAD_VARIABLES, str(threads))}
    if kernels is not None:
        changed[CPU_KERNELS] = kernels
    library = openblas()
    loaded = base.get("LD_PRELOAD", "")
    if library is not None and "openblas" not in loaded:
        changed["LD_PRELOAD"] = f"{loaded}:{library}".strip(":")
    return changed


def _known_to_loader() -> Path | None:
    """What the dynamic loader's cache lists, for libraries in unusual places."""
    for command in ("ldconfig", "/sbin/ldconfig"):
        try:
            listing = subprocess.run([command, "-p"], capture_output=True, text=True, timeout=_LDCONFIG_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            continue
        for line in listing.stdout.splitlines():
            name, _, path = line.strip().partition(" => ")
            if name.split(" ")[0] in _NAMES and Path(path).is_file():
                return Path(path)
    return None


LIBRARY = Path("lib", "libmlx.so")


def require_mlx() -> None:
    """Before a process is started that imports MLX: there it would be a traceback.

    Raises:
        InvalidRequest: MLX's library is not installed.
    """
    if not sys.platform.startswith("linux"):
        return
    found = find_spec("mlx")
    places = found.submodule_search_locations if found is not None else None
    if not any(Path(place, LIBRARY).is_file() for place in places or ()):
        raise InvalidRequest(f"MLX has no backend installed; run {install('cpu')}, or the extra cuda for a GPU")


BEHIND = 5
"""How nice a drafter is to the orchestrator: a third of its weight where both want to run."""
GIVEN = sorted(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else []
"""The cores this process was given."""


def place(pid: int, role: str, settings: ServeSettings) -> None:
    """Keeps the process of a `role` to its core; on the orchestrator's it comes after that."""
    core = core_of(role, settings)
    pin(pid, core)
    if role == "draft" and core is not None:
        put_behind(pid)


def core_of(role: str, settings: ServeSettings) -> int | None:
    """The core for a `target`, `draft` or `orchestrator` process; None, and for all others: any."""
    if len(GIVEN) != 2 or settings.threads != 1 or not settings.has_draft_worker:
        return None
    if settings.shards > 1 or not settings.pin_cores:  # ranks that wait for each other on one core would take turns
        return None
    return {"target": GIVEN[0], "draft": GIVEN[-1], "orchestrator": GIVEN[-1]}.get(role)


def pin(pid: int, core: int | None) -> None:
    """Keeps process `pid` (0: this one), and what it starts from now on, on `core`; None: on any it was given."""
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError):  # gone already, or not allowed here: it runs where it runs
        os.sched_setaffinity(pid, GIVEN if core is None else {core})


def put_behind(pid: int) -> None:
    """Has process `pid`, which leads a session and has one thread, run after others that want its core."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, BEHIND)
        Path(f"/proc/{pid}/autogroup").write_text(str(BEHIND))  # where a session's processes have a share of their own


WANTED = 65_536
# What systems allow that don't allow WANTED: macOS's OPEN_MAX, and what mlx-lm asks for when it is imported.
LESS = (10_240, 4_096)


def raise_limit() -> int:
    """Asks for more files, for this process and those that it starts; how many it may have open.

    Raises:
        EndpointError: the system allows too few for a server and its workers.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (WANTED, *LESS):
        if soft >= wanted or _raised(wanted, hard):
            return max(soft, wanted)
    raise EndpointError(
        f"this process may open {hard} files, but a server and its workers need {LESS[-1]}; raise the hard limit"
        " (`ulimit -n` tells it, your system's administrator sets it)"
    )


def _raised(wanted: int, hard: int) -> bool:
    if hard != resource.RLIM_INFINITY and hard < wanted:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError):  # macOS tells no limit and has one
        return False
    return True


_CGROUP = Path("/sys/fs/cgroup/memory.max")


def physical(bound: Path = _CGROUP) -> int:
    """In bytes; `bound` is the file of a container's limit, where there is one."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(whole, int(bound.read_text()))
    except (OSError, ValueError):  # no such file, or the word "max"
        return whole


_REFUSED = ("MemoryError", "bad_alloc", "Cannot allocate memory", "Resource temporarily unavailable")


def likely_cause(code: int, last_words: str = "", bound: Path = _CGROUP) -> str:
    """What a process that ended with this code most likely died of, where its memory has a limit; empty: unknown.

    Beyond a limit of its address space allocations fail, and threads can't be started, which libraries answer by a
    crash or an error in the process's `last_words`; a container's kernel kills.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    crashed = -code in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGKILL)
    if limit != resource.RLIM_INFINITY and (crashed or any(words in last_words for words in _REFUSED)):
        return f"most likely out of memory (ulimit -v allows a process {limit / 2**30:.1f} GiB)"
    whole, allowed = physical(Path(os.devnull)), physical(bound)
    if allowed < whole and code == -signal.SIGKILL:
        return f"most likely out of memory (this container is allowed {allowed / 2**30:.1f} GiB)"
    return ""
