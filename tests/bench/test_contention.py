"""The process that keeps the target's device busy runs exactly as long as the bench."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.bench.comparison.runners import pin_process
from outrider.orchestrator.machine import system
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import WorkerError
from tools.contention import Contention

ROOT = Path(__file__).parents[2]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_contention_process_is_on_the_targets_core_and_ends_with_the_bench() -> None:
    with Contention(ServeSettings()) as busy:
        assert not is_gone(busy.pid)
        core = system.core_of("target", ServeSettings())
        if core is not None:
            assert os.sched_getaffinity(busy.pid) == {core}
            assert f"core {core}, the target's" in busy.describe()
    assert is_gone(busy.pid)


def test_contention_process_ends_when_the_bench_fails() -> None:
    with pytest.raises(ValueError, match="bench"), Contention(ServeSettings()) as busy:
        raise ValueError("bench")
    assert is_gone(busy.pid)


def test_contention_process_ends_when_its_stdin_closes() -> None:
    """Its stdin is a pipe, which the parent's death closes."""
    process = subprocess.Popen(
        python("-m", "tools.contention", "cpu"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(),
    )
    if process.stdin is None or process.stdout is None:
        pytest.fail("no pipes")
    assert b"ready" in process.stdout.readline()
    process.stdin.close()
    assert process.wait(200) == 0
    process.stdout.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="cores are told apart on Linux alone")
def test_pinning_moves_all_threads_of_a_running_process() -> None:
    """Otherwise it would run on a core without contention, and win."""
    work = "import threading, sys; e = threading.Event(); threading.Thread(target=e.wait, daemon=True).start();"
    work += "print('up', flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        if process.stdout is None:
            pytest.fail("no pipe")
        process.stdout.readline()
        core = max(os.sched_getaffinity(0))
        pin_process(process.pid, core)
        threads = [int(thread.name) for thread in Path(f"/proc/{process.pid}/task").iterdir()]
        assert len(threads) == 2
        assert all(os.sched_getaffinity(thread) == {core} for thread in threads)


def test_contention_process_that_fails_to_start_is_a_worker_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.bench.helper.python", lambda *_: [sys.executable, "-c", "raise SystemExit(1)"])
    with pytest.raises(WorkerError, match="ended; see its message"), Contention(ServeSettings()):
        os.kill(os.getpid(), signal.SIGTERM)  # never reached
