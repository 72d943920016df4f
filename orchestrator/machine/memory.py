"""How much memory this machine has, or this container may take."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup/memory.max")


def physical(bound: Path = _CGROUP) -> int:
    """In bytes; `bound` is the file of a container's limit, where there is one."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(whole, int(bound.read_text()))
    except (OSError, ValueError):  # no such file, or the word "max"
        return whole
