"""What the processes of this server take of the machine: HTTP's own, the orchestrator's and those of its workers.

A worker that joined from elsewhere is none of them: of the processes that workers name, only those are looked at that
the orchestrator started.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.protocol.messages import Stats


class Processes(Collector):
    """Looked at when asked; `stats` names the workers. This process is a child of the orchestrator's."""

    def __init__(self) -> None:
        self.stats: Stats | None = None

    def collect(self) -> Iterator[Metric]:
        labels = ("process",)
        cpu = CounterMetricFamily("outrider:process_cpu_seconds", "CPU time, user and system", labels=labels)
        memory = GaugeMetricFamily("outrider:process_resident_memory_bytes", "Resident memory", labels=labels)
        files = GaugeMetricFamily("outrider:process_open_fds", "Open files and sockets", labels=labels)
        for name, process in self._all():
            try:
                with process.oneshot():
                    times, resident, opened = process.cpu_times(), process.memory_info().rss, process.num_fds()
            except psutil.Error:  # it has ended
                continue
            cpu.add_metric((name,), times.user + times.system)
            memory.add_metric((name,), resident)
            files.add_metric((name,), opened)
        yield from (cpu, memory, files)

    def _all(self) -> Iterator[tuple[str, psutil.Process]]:
        parent = os.getppid()
        workers = self.stats.workers if self.stats is not None else ()
        named = [("http", os.getpid()), ("orchestrator", parent), *((worker.name, worker.pid) for worker in workers)]
        for name, number in named:
            try:
                process = psutil.Process(number)
                if number in (os.getpid(), parent) or process.ppid() == parent:
                    yield name, process
            except psutil.Error:  # it has ended
                continue
