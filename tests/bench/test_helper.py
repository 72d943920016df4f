"""A helper process runs exactly as long as its block, and all threads of a process are pinned to a core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.bench.comparison.runners import pin_process
from outrider.bench.helper import HelperProcess
from outrider.protocol.errors import WorkerError

READY = "import sys; print('{}', flush=True); sys.stdin.read()"


def run_helper(monkeypatch: pytest.MonkeyPatch, program: str) -> HelperProcess:
    monkeypatch.setattr("outrider.bench.helper.python", lambda *_: [sys.executable, "-c", program])
    return HelperProcess("the helper")


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_helper_ends_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    with run_helper(monkeypatch, READY) as helper:
        assert not is_gone(helper.pid)
    assert is_gone(helper.pid)
    with pytest.raises(ValueError, match="bench"), run_helper(monkeypatch, READY) as helper:
        raise ValueError("bench")
    assert is_gone(helper.pid)


def test_helper_that_fails_to_start_is_a_worker_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerError, match="ended; see its message"), run_helper(monkeypatch, "raise SystemExit(1)"):
        pytest.fail("it has started")


def test_helper_that_reads_no_request_is_a_worker_error(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os, time; os.close(0); print('{}', flush=True); time.sleep(1)"
    with pytest.raises(WorkerError, match="ended; see its message"), run_helper(monkeypatch, program) as helper:
        helper.ask({})


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux pins threads to cores")
def test_pinning_moves_all_threads_of_a_running_process() -> None:
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
