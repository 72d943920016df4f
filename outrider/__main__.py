"""`python -m outrider`, and the `outrider` command."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Before and after a command, Ctrl-C ends this process silently, even during an import."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else numpy starts threads that spin and are not used
    from outrider.orchestrator.cli import main as run

    return run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
