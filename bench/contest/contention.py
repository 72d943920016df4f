"""Something else that is busy on the target's device while a bench runs; it ends with the bench, however that ends."""

from __future__ import annotations

import sys

from outrider.bench.helper import Helper
from outrider.orchestrator.machine import cores
from outrider.orchestrator.settings import ServeSettings


class Contention(Helper):
    """A context manager; `describe` says what is busy where."""

    def __init__(self, settings: ServeSettings) -> None:
        self._core = cores.core_of("target", settings)
        self._on_gpu = sys.platform == "darwin"
        super().__init__("outrider.bench.contest.busy", "gpu" if self._on_gpu else "cpu")
        cores.pin(self.pid, self._core)

    def describe(self) -> str:
        if self._on_gpu:
            return "contended: another process multiplies matrices on the GPU"
        where = "a core of its own choice" if self._core is None else f"core {self._core}, the target's"
        return f"contended: another process streams memory on {where}"
