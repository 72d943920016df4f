"""Worker processes start as configured, and none survives its orchestrator."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import zmq

from outrider.orchestrator import serve
from outrider.orchestrator.core import worker_pool
from outrider.orchestrator.core.worker_pool import WorkerPool
from outrider.orchestrator.core.worker_registry import Worker
from outrider.orchestrator.http_settings import HttpSettings
from outrider.orchestrator.machine import spawn, system
from outrider.orchestrator.machine.http_process import HttpListener, HttpProcess
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import clock
from outrider.protocol.errors import InvalidRequest, WorkerError
from outrider.protocol.socket_files import PrivateDirectory
from outrider.protocol.worker_link import ANY_CORE, DRAFTER_CORE_VARIABLE

SETTINGS = ServeSettings(model="/m", draft_model="/d", log_level="info", fan_out="uniform")
WAITS = "import os, sys; fd = int(sys.argv[1]); print('up', flush=True); os.read(fd, 1)"
STUBBORN = "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); print('up', flush=True); time.sleep(600)"
FAILS = "import sys; sys.stderr.write('first\\n\\nlast words\\n'); sys.exit(7)"


@pytest.fixture
def spawned(monkeypatch, tmp_path):
    """`spawned(code) -> SpawnedProcess` runs Python code, with the file descriptor of its pipe as the argument."""
    workers = []

    def start(code, wait_for="up"):
        monkeypatch.setattr(spawn, "worker_command", lambda *a: [sys.executable, "-c", code, str(a[-1])])
        worker = spawn.spawn_worker("target", "target-0", "ipc:///none", SETTINGS, tmp_path, 1)
        workers.append(worker)
        while wait_for and wait_for not in worker.log_tail():
            assert worker.poll() is None, worker.log_tail()
        return worker

    yield start
    for worker in workers:
        worker.kill()
        worker.wait(200)


@pytest.fixture
def pool():
    with zmq.Context() as context, PrivateDirectory() as directory:
        pool = WorkerPool(context, SETTINGS, directory.path)
        yield pool
        pool.router.close()


def test_worker_commands_follow_the_settings():
    target = spawn.worker_command("target", "target-0", "ipc:///e", SETTINGS, 9)
    assert target[1:] == [
        "-P", "-m", "outrider.target_worker", "--endpoint", "ipc:///e", "--name", "target-0", "--model", "/m",
        "--log-level", "info", "--log-format", "text", "--ngrams", "", "--shards", "1", "--parent-fd", "9",
    ]  # fmt: skip
    with_table = spawn.worker_command("target", "target-0", "ipc:///e", replace(SETTINGS, ngram_table="/t"))
    assert with_table[with_table.index("--ngrams") + 1] == "/t"
    assert "--ngrams" not in spawn.worker_command("target", "target-0", "ipc:///e", replace(SETTINGS, ngrams=False))
    draft = spawn.worker_command("draft", "draft-0", "ipc:///e", SETTINGS)
    assert draft[3:] == [
        "outrider.draft_worker", "--endpoint", "ipc:///e", "--name", "draft-0", "--model", "/d", "--log-level", "info",
        "--log-format", "text", "--backend", "mlx", "--fan-out", "uniform", "--prefill", "mlx", "--device", "auto",
    ]  # fmt: skip
    colocated = ServeSettings(model="/m", draft_model="/d", colocate=True)
    command = spawn.worker_command("target", "target-0", "ipc:///e", colocated)
    assert command[command.index("--drafter") :][1:3] == ["draft", "/d"]
    by_head = ServeSettings(model="/m", draft_model="/d", draft_backend="eagle3")
    command = spawn.worker_command("target", "target-0", "ipc:///e", by_head)
    assert command[command.index("--drafter") :][1:3] == ["eagle3", "/d"]


def test_environment_names_another_implementation_of_a_worker(monkeypatch):
    monkeypatch.setenv("OUTRIDER_WORKER_MODULES", '{"target": ["elsewhere.target", "--on", "/d v"]}')
    target, draft = (spawn.worker_command(role, "w", "ipc:///e", SETTINGS) for role in ("target", "draft"))
    assert target[2:6] == ["-m", "elsewhere.target", "--on", "/d v"] and target[6] == "--endpoint"
    assert draft[2:4] == ["-m", "outrider.draft_worker"]
    monkeypatch.setenv("OUTRIDER_WORKER_MODULES", "elsewhere.target")
    with pytest.raises(InvalidRequest, match=r"OUTRIDER_WORKER_MODULES can't be read .*; expected JSON such as"):
        spawn.worker_command("target", "w", "ipc:///e", SETTINGS)


@pytest.mark.parametrize("role", ["target", "draft", "prefill"])
def test_workers_accept_their_command_lines(role):
    command = spawn.worker_command(role, "w", "ipc:///e", SETTINGS, 9)
    asked = subprocess.run(
        [*command, "--help"], env=spawn.child_environment(), capture_output=True, text=True, timeout=200
    )
    assert asked.returncode == 0, asked.stderr
    for flag in (word for word in command if word.startswith("--")):
        assert flag in asked.stdout


def test_worker_has_its_own_session(spawned):
    worker = spawned(WAITS)
    assert os.getsid(worker.pid) == worker.pid != os.getsid(0)


def test_closed_pipe_ends_a_worker_that_ignores_the_signal(spawned):
    worker = spawned("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + WAITS)
    worker.terminate()
    assert worker.wait(200) == 0


def test_second_worker_does_not_inherit_the_first_workers_pipe(spawned):
    first = spawned("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + WAITS)
    spawned(WAITS)
    first.terminate()
    assert first.wait(200) == 0


def test_worker_is_killed_after_its_grace_period(spawned):
    worker = spawned(STUBBORN)
    worker.terminate()
    assert worker.wait(0.2) == -signal.SIGKILL


def test_a_stopped_worker_can_be_killed(spawned):
    worker = spawned(WAITS)
    os.kill(worker.pid, signal.SIGSTOP)
    worker.kill()
    assert worker.wait(200) == -signal.SIGKILL


def test_worker_that_ends_before_its_signal_can_be_killed_on_macos(spawned, monkeypatch):
    """On macOS, a process that has ended but was not waited for can't be sent a signal."""

    def end_first(pid, number):
        os.kill(pid, signal.SIGKILL)
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    worker = spawned(WAITS)
    monkeypatch.setattr(spawn.os, "killpg", end_first)
    worker.kill()
    assert worker.wait(200) == -signal.SIGKILL


def test_frozen_workers_share_one_grace_period(monkeypatch, pool):
    now_s = [0.0]

    class Frozen:
        def terminate(self):
            pass

        def wait(self, grace):
            now_s[0] += grace

    for number in range(4):
        pool._registry.assign(Worker(f"draft-{number}", "draft", number, Frozen()))
    monkeypatch.setattr(worker_pool, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    pool.close()
    assert now_s[0] == worker_pool.STOP_GRACE_SECONDS < serve.JOIN_TIMEOUT_SECONDS


def test_stderr_of_an_ended_worker_is_kept(spawned):
    worker = spawned(FAILS, wait_for=None)
    assert worker.wait(200) == 7
    assert worker.log_tail() == "first | last words"
    worker.terminate()  # sends no signal, because the process is gone


def test_a_worker_that_can_not_be_restarted_is_lost_and_ends_nothing(monkeypatch, pool):
    worker = Worker("draft-0", "draft", 1, SimpleNamespace(pid=1, poll=lambda: 1, kill=lambda: None))
    pool._registry.assign(worker)
    worker.restarts.died(0, True, False, "")
    monkeypatch.setattr(system, "require_mlx", mock.Mock(side_effect=InvalidRequest("MLX has no backend installed")))
    (loss,) = pool.losses(clock.SECOND_NS * 10**6)
    assert "no backend" in loss.why and not loss.fatal


def test_failed_thread_start_is_a_sentence(monkeypatch):
    monkeypatch.setattr(serve.threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
    with pytest.raises(WorkerError, match=r"the server can't start a thread .*: most likely out of"):
        serve._start_thread(lambda: None, "core")


def test_process_start_beyond_the_limit_of_processes_names_it(monkeypatch, tmp_path):
    refused = BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    monkeypatch.setattr(subprocess.Popen, "__init__", mock.Mock(side_effect=refused))
    with pytest.raises(WorkerError, match=r"can't be started .*; most likely out of .*ulimit"):
        spawn.spawn_worker("draft", "draft-0", "ipc:///none", SETTINGS, tmp_path, 1)


def test_failed_process_start_raises_worker_error(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/no/python")
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(WorkerError, match="can't be started"):
        spawn.spawn_worker("target", "t", "ipc:///e", SETTINGS, tmp_path, 1)
    assert len(os.listdir("/dev/fd")) == before, "a pipe was left open"


def test_http_process_that_cannot_be_started_raises_worker_error(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/no/python")
    with closing(HttpListener(HttpSettings(port=0))) as listener:
        before = len(os.listdir("/dev/fd"))
        model = SimpleNamespace(name="m", folder="/m")
        with pytest.raises(WorkerError, match=r"the HTTP server can't be started .* expected /no/python to run"):
            HttpProcess(listener, "ipc:///e", model, tmp_path, ServeSettings())
        assert len(os.listdir("/dev/fd")) == before, "a pipe or the shared log was left open"


def test_workers_import_our_packages_from_any_folder(tmp_path):
    (tmp_path / "protocol").mkdir()
    (tmp_path / "protocol" / "__init__.py").write_text("raise SystemExit('the wrong package')")
    found = subprocess.run(
        spawn.python("-c", "import protocol, target_worker; print(protocol.__doc__)"),
        cwd=tmp_path, env=spawn.child_environment(), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert found.returncode == 0 and "The messages between processes" in found.stdout, found.stderr


# --- BLAS and cores -----------------------------------------------------------------------------------------------


def test_draft_device_flag_goes_to_the_drafter_only():
    settings = replace(SETTINGS, draft_device="cpu")
    lines = {role: spawn.worker_command(role, "w", "ipc:///e", settings) for role in ("target", "draft", "prefill")}
    assert lines["draft"][lines["draft"].index("--device") :][:2] == ["--device", "cpu"]
    assert "--device" not in lines["target"] + lines["prefill"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere MLX's package brings its library")
def test_missing_mlx_backend_is_reported_before_any_start(monkeypatch, tmp_path):
    monkeypatch.setattr(system, "MLX_LIBRARY", Path("lib", "libnone.so"))
    with pytest.raises(InvalidRequest, match=r"pip install '\.\[cpu\]' in a checkout"):
        spawn.spawn_worker("target", "t", "ipc:///e", SETTINGS, tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_openblas_is_preloaded_if_found(monkeypatch):
    monkeypatch.setattr(system, "find_openblas", lambda: "/lib/libopenblas.so.0")
    monkeypatch.setattr(system, "USABLE_CPUS", [0, 1, 2, 3])
    made = system.blas_environment({"LD_PRELOAD": "/other.so", "A": "b"}, 3)
    assert made["LD_PRELOAD"] == "/other.so:/lib/libopenblas.so.0" and made["A"] == "b"
    assert {made[name] for name in system.THREAD_VARIABLES} == {"3"}
    assert system.blas_environment({"LD_PRELOAD": "/my/libopenblas.so"}, 1)["LD_PRELOAD"] == "/my/libopenblas.so"
    many = system.blas_environment({}, 1000)
    assert {many[name] for name in system.THREAD_VARIABLES} == {
        "4"
    }  # more threads than cores would wait for each other


@pytest.mark.parametrize(
    ("flags", "core"), [({"avx512f", "avx2"}, "SkylakeX"), ({"avx2"}, "Haswell"), ({"asimd"}, None)]
)
def test_openblas_uses_kernels_that_the_cpu_has(monkeypatch, flags, core):
    """OpenBLAS does not know CPUs that are newer than itself, and would use kernels without AVX for them."""
    monkeypatch.setattr(system, "cpu_flags", lambda: flags)
    assert system.blas_environment({}, 1).get(system.OPENBLAS_CORE_VARIABLE) == core
    assert system.blas_environment({system.OPENBLAS_CORE_VARIABLE: "Zen"}, 1)[system.OPENBLAS_CORE_VARIABLE] == "Zen"


def test_openblas_that_is_preloaded_already_is_used(monkeypatch):
    monkeypatch.setattr(system, "needs_openblas", lambda: True)
    monkeypatch.setattr(system, "_find_library", lambda name: None)
    monkeypatch.setenv("LD_PRELOAD", "/lib/libother.so:/home/me/libopenblas.so.0")
    assert system.find_openblas() == "/home/me/libopenblas.so.0" and system.blas_notes() == ()
    assert system.blas_environment(dict(os.environ), 1)["LD_PRELOAD"] == os.environ["LD_PRELOAD"]


def test_missing_openblas_is_noted_with_its_cost(monkeypatch):
    monkeypatch.setattr(system, "find_openblas", lambda: None)
    monkeypatch.setattr(system, "needs_openblas", lambda: True)
    assert "LD_PRELOAD" not in system.blas_environment({}, 1)
    assert "M times" in system.blas_notes()[0] and "libopenblas0-pthread" in system.blas_notes()[0]
    monkeypatch.setattr(system, "needs_openblas", lambda: False)
    assert system.blas_notes() == ()


def test_orchestrator_shares_the_drafters_core_on_two_cores(monkeypatch):
    monkeypatch.setattr(system, "USABLE_CORES", [4, 9])
    monkeypatch.setattr(system, "cpu_quota", lambda: math.inf)
    assert [system.core_of(role, SETTINGS) for role in ("target", "orchestrator", "draft", "prefill")] == [
        4,
        9,
        9,
        None,
    ]
    assert system.drafter_core_variable("target", SETTINGS) == {DRAFTER_CORE_VARIABLE: "9"}
    assert system.drafter_core_variable("draft", SETTINGS) == {}
    assert system.core_of("draft", ServeSettings(model="m", draft_model="d", threads=2)) is None
    assert system.core_of("target", ServeSettings(draft_backend="ngram")) is None
    monkeypatch.setattr(system, "USABLE_CORES", [0, 1, 2, 3])
    assert system.core_of("draft", SETTINGS) is None
    assert system.drafter_core_variable("target", SETTINGS) == {DRAFTER_CORE_VARIABLE: ANY_CORE}
    assert system.drafter_core_variable("target", replace(SETTINGS, pin_cores=False)) == {}
    monkeypatch.setattr(system, "cpu_quota", lambda: 1.5)
    assert system.drafter_core_variable("target", SETTINGS) == {}


@pytest.mark.parametrize(
    ("cores", "quota", "settings", "target", "everyone"),
    [
        (2, math.inf, {}, 1, 2),
        (2, math.inf, {"colocate": True}, 2, 2),
        (2, math.inf, {"draft_backend": "ngram", "draft_model": None}, 2, 2),
        (2, math.inf, {"threads": 2}, 2, 4),
        (4, math.inf, {}, 3, 4),
        (4, math.inf, {"drafters": 2}, 2, 4),
        (4, math.inf, {"prefill_workers": 2}, 1, 2),
        (6, math.inf, {"shards": 2}, 2, 5),
        (64, math.inf, {}, system.MAX_DEFAULT_THREADS, system.MAX_DEFAULT_THREADS + 1),
        (64, 4.0, {}, 3, 4),
        (64, math.inf, {"pin_cores": False}, 1, 2),
        (64, 0.5, {}, 1, 2),
        (1, math.inf, {"drafters": 3}, 1, 4),
        (0, math.inf, {}, 1, 2),  # a Mac
    ],
)
def test_target_computes_on_the_cores_that_drafters_leave(
    monkeypatch: pytest.MonkeyPatch, cores: int, quota: float, settings: dict[str, Any], target: int, everyone: int
) -> None:
    monkeypatch.setattr(system, "USABLE_CORES", list(range(cores)))
    monkeypatch.setattr(system, "cpu_quota", lambda: quota)
    chosen = replace(SETTINGS, **settings)
    assert system.threads_of("target", chosen) == target and system.all_threads(chosen) == everyone


@pytest.mark.parametrize(
    ("siblings", "cores"),
    [
        ({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, [0, 1]),
        ({4: "4-5", 5: "4-5"}, [4, 5]),  # a single core, on which two threads are still better than one
        ({0: "0", 3: "3"}, [0, 3]),
        ({0: None, 3: None}, [0, 3]),  # a system that does not tell
    ],
)
def test_second_hardware_thread_of_a_core_does_not_count(
    tmp_path: Path, siblings: dict[int, str | None], cores: list[int]
) -> None:
    for cpu, text in siblings.items():
        folder = tmp_path / f"cpu{cpu}/topology"
        folder.mkdir(parents=True)
        if text is not None:
            (folder / "thread_siblings_list").write_text(f"{text}\n")
    assert system._find_cores(list(siblings), tmp_path) == cores


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux pins processes to cores")
def test_process_can_be_lowered_in_priority_pinned_and_unpinned():
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        system.lower_priority(process.pid)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == system.DRAFTER_NICE
        system.pin_to_core(process.pid, system.USABLE_CPUS[-1])
        assert os.sched_getaffinity(process.pid) == {system.USABLE_CPUS[-1]}
        system.pin_to_core(process.pid, None)
        assert sorted(os.sched_getaffinity(process.pid)) == system.USABLE_CPUS
        process.kill()


def test_log_is_locked_while_its_process_lives(spawned, tmp_path):
    """The lock keeps macOS from removing the log, as it does with files in $TMPDIR that are not read for three days."""
    worker = spawned("import time; print('up', flush=True); time.sleep(600)")
    with (tmp_path / "target-0.log").open() as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        worker.kill()
        worker.wait(200)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_unwritable_log_is_a_worker_error(spawned, tmp_path):
    (tmp_path / "target-0.log").mkdir()
    with pytest.raises(WorkerError, match=r"the target worker can't be started .*target-0\.log"):
        spawned(WAITS)
