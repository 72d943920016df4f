"""How many files this process may have open, of which every connection is one.

A Mac's terminal allows 256 unless asked for more, and ZeroMQ ends the process when the next connection finds none left.
"""

from __future__ import annotations

import resource

from outrider.protocol.errors import EndpointError

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
