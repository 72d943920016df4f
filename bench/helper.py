"""Both sides of a helper process that answers JSON requests, one object per line.

The helper keeps MLX out of the measuring process. As a program, this module serves a peer: another engine's class.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any, Self

from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.machine import system
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.protocol.errors import WorkerError

EXIT_TIMEOUT_SECONDS = 5


class HelperProcess:
    """A context manager that runs a module or a .py file, in the workers' BLAS environment or the given one.

    The program ends when its stdin closes.
    """

    def __init__(self, *command: str, threads: int = 1, environment: Mapping[str, str] | None = None) -> None:
        self._name = command[0]
        self._process = subprocess.Popen(
            python(*command) if command[0].endswith(".py") else python("-m", *command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment or system.blas_environment(child_environment(), threads),
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        """Waits until the process is ready.

        Raises:
            WorkerError: the process ended before.
        """
        try:
            self._read_answer()
        except WorkerError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._process.communicate(timeout=EXIT_TIMEOUT_SECONDS)  # closes its stdin
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a request, and returns the answer.

        Raises:
            WorkerError: the process ended instead of answering.
        """
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it ended
                print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._read_answer()

    def _read_answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise WorkerError(f"{self._name} ended; see its message above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("peer", help="the engine's class, as MODULE:CLASS")
    parser.add_argument("given", type=json.loads, help="its arguments, as JSON")


def run(options: argparse.Namespace) -> int:
    """Reports readiness, then answers every line of stdin: one prompt by the peer's `run`, many by its `batch`."""
    peer = resolve_name(options.peer)(**options.given)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps((peer.batch if "batch" in request else peer.run)(**request)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
