"""How much memory this machine has, or this container may take; and whether a process died for want of it."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

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
