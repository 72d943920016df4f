"""Something else that is busy on the target's device while a bench runs; it ends with the bench, however that ends."""

from __future__ import annotations

import subprocess
import sys

from outrider.orchestrator.machine import cores
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import WorkerError


class Contention:
    """A context manager; `describe` says what is busy where."""

    def __init__(self, settings: ServeSettings) -> None:
        self._core = cores.core_of("target", settings)
        self._on_gpu = sys.platform == "darwin"
        device = "gpu" if self._on_gpu else "cpu"
        self._process = subprocess.Popen(
            python("-m", "outrider.target_worker.busy", device),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**child_environment(), "OMP_NUM_THREADS": "1"},
        )
        cores.pin(self._process.pid, self._core)

    @property
    def pid(self) -> int:
        return self._process.pid

    def describe(self) -> str:
        if self._on_gpu:
            return "contended: another process multiplies matrices on the GPU"
        where = "a core of its own choice" if self._core is None else f"core {self._core}, the target's"
        return f"contended: another process streams memory on {where}"

    def __enter__(self) -> Contention:
        """
        Raises:
            WorkerError: it ended before it was busy.
        """
        if self._process.stdout is None or not self._process.stdout.readline():
            self._end()
            raise WorkerError("what should keep the target's device busy ended at once; its message stands above")
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
