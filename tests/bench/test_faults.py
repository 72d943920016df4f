"""Injected faults hit only running processes that this cluster has started."""

from __future__ import annotations

import os
import random
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.protocol.messages import WorkerStats
from tests.harness.faults import Faults


def worker(name: str, state: str, pid: int) -> WorkerStats:
    return WorkerStats(name.partition("-")[0], name, pid, "", "", 0, 0, 0, 0, state=state)


def test_faults_hit_only_running_workers_of_this_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    hit: set[int] = set()
    monkeypatch.setattr(os, "kill", lambda pid, number: hit.add(pid))
    workers = (worker("target-0", "ready", 7), worker("draft-0", "restarting", 8), worker("draft-1", "ready", 1))
    client = SimpleNamespace(stats=lambda: SimpleNamespace(workers=workers))
    cluster: Any = SimpleNamespace(client=lambda: client)
    faults = Faults(cluster, random.Random(1))
    for _ in range(20):
        faults._signal(signal.SIGKILL)
    assert hit == {7}
