"""The command line as a process: its standard streams, signals, and failures to start."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from queue import SimpleQueue

import psutil
import pytest

from outrider.orchestrator import serve
from outrider.orchestrator.cli.doctor import REPORT_MODULE
from outrider.orchestrator.events import Admit
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.orchestrator.pairing.model_files import TINY_TARGET
from outrider.protocol.errors import EndpointError, ModelError
from tests.orchestrator.scripted_server import generates

LIMIT = 200.0
HAS_DEV_FULL = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full is Linux's")


def outrider(*arguments, shell="", before="", **environment):
    """Runs `outrider ARGUMENTS` in a shell, after the commands `before` and with the redirections `shell`."""
    return subprocess.run(
        ["/bin/sh", "-c", f'{before} exec "$@" {shell}', "sh", *python("-m", "outrider", *arguments)],
        env=child_environment() | {"PYTHONUNBUFFERED": ""} | environment, capture_output=True, timeout=LIMIT,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


@HAS_DEV_FULL
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["pairs"], ["generate", "--help"]])
def test_full_output_device_prints_one_sentence(arguments, unbuffered):
    done = outrider(*arguments, shell=">/dev/full", PYTHONUNBUFFERED=unbuffered)
    if unbuffered and "--help" in arguments:
        assert done.stderr == b""  # argparse ignores the error
    else:
        assert done.returncode == 1
        assert done.stderr.startswith(b"outrider: the output can't be written (No space left on device)")
        assert done.stderr.count(b"\n") == 1


@HAS_DEV_FULL
def test_full_output_device_hides_no_earlier_error():
    done = outrider("generate", "-p", "x", "--connect", "ipc:///no/such", shell=">/dev/full", PYTHONUNBUFFERED="1")
    assert done.returncode == EndpointError.exit_code and b"no server at ipc:///no/such" in done.stderr


def test_closed_pipe_reader_is_not_an_error():
    done = outrider("pairs", shell="| head -n 1")
    assert done.stdout.count(b"\n") == 1 and done.stderr == b""


@pytest.mark.parametrize("shell", ["2>&- <&-", ">&- 2>&- <&-", pytest.param("2>/dev/full", marks=HAS_DEV_FULL)])
def test_closed_standard_streams_do_not_fail_the_command(shell):
    done = outrider("pairs", shell=shell)
    assert done.returncode == 0 and done.stderr == b""
    assert ("models/target" in done.stdout.decode()) is (">&- 2" not in shell)
    assert outrider("generate", "-p", "", shell=shell).returncode == 2


def test_generate_works_with_closed_standard_streams(server, codec):
    """No socket gets the file descriptor of a closed stream, and the text is written only to stdout."""
    server.core.on_admit = generates(codec, "x = 1")
    done = outrider("generate", "-p", "x", "--connect", server.endpoint, shell="2>&- <&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"x = 1\n", b"")


def test_byte_order_mark_on_stdin_is_no_part_of_the_prompt(server, codec):
    """Editors and shells on Windows write one at the beginning of a file."""
    server.core.on_admit = generates(codec, "x = 1")
    done = outrider("generate", "-", "--connect", server.endpoint, before=r"printf '\357\273\277x' |")
    assert done.returncode == 0 and server.core.wait_for(Admit)[0].tokens == codec.encode("x")


def test_program_that_doctor_starts_has_the_standard_streams_too():
    """Otherwise a file that MLX opens would get the file descriptor of stdin."""
    done = outrider("doctor", "--draft-model", str(TINY_TARGET), "--json", shell="2>&- <&-")
    assert done.returncode == 0 and json.loads(done.stdout)["placements"]


def test_server_reports_a_path_that_is_not_utf8():
    done = outrider("generate", "x", "--model", os.fsdecode(b"/no/such/mod\xe8le"))
    assert done.returncode == ModelError.exit_code and done.stderr.count(b"\n") == 1
    assert b"no such path: /no/such/mod\\udce8le; expected a name" in done.stderr


def test_ascii_terminal_replaces_unprintable_characters(server, codec):
    server.core.on_admit = generates(codec, "x = 'é'")
    ask = ("generate", "-p", "x", "--connect", server.endpoint)
    done = outrider(*ask, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout.startswith(b"x = '?") and b"Traceback" not in done.stderr
    assert json.loads(outrider(*ask, "--json", PYTHONIOENCODING="ascii").stdout)["text"] == "x = 'é'"


INTERRUPTED_IMPORT = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may ignore it, as background jobs do
sys.meta_path.insert(0, Interrupt())
from outrider.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("module", ["numpy", "zmq", "outrider.orchestrator.cli.generate"])
def test_interrupt_during_an_import_exits_quietly(module):
    command = python("-c", INTERRUPTED_IMPORT, module, "generate", "-p", "x", "--connect", "ipc:///no/such")
    done = subprocess.run(command, env=child_environment(), capture_output=True, timeout=LIMIT)
    assert (done.stdout, done.stderr) == (b"", b"") and done.returncode in (-signal.SIGINT, 130)


def busy_report(doctor):
    """Returns the process that `outrider doctor` started, once it has used some CPU time; None before."""
    for child in psutil.Process(doctor.pid).children():
        with suppress(psutil.NoSuchProcess):
            if REPORT_MODULE in child.cmdline() and child.cpu_times().user > 0.2:
                return child
    return None


def test_interrupted_doctor_ends_its_process_without_a_traceback():
    """Ctrl-C interrupts the whole process group, and Python would print a traceback in the child as well."""
    command = python("-m", "outrider", "doctor", "--draft-model", TINY_TARGET)
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=child_environment(), start_new_session=True, **pipes) as doctor:
        deadline = time.monotonic() + LIMIT
        while (report := busy_report(doctor)) is None:
            assert doctor.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        assert os.getpgid(report.pid) != doctor.pid
        os.killpg(doctor.pid, signal.SIGINT)
        assert doctor.communicate(timeout=LIMIT)[1] == b"" and doctor.returncode == 130
    assert not psutil.wait_procs([report], LIMIT)[1]


ENDED_IN_A_FINALIZER = """
import os, signal, sys, time
for one in (signal.SIGINT, signal.SIGHUP):
    signal.signal(one, signal.SIG_DFL)
from outrider.orchestrator.cli.terminal import unwind_on_signals
class Late:
    def __del__(self):
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        self.steps = sum(range(1000))
        self.whole = True
        print("whole")
with unwind_on_signals():
    late = Late()
    del late
    time.sleep(60)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", -signal.SIGINT)])
def test_signal_during_a_finalizer_takes_effect_after_it(name, code):
    done = subprocess.run(
        python("-c", ENDED_IN_A_FINALIZER, name), env=child_environment(), capture_output=True, timeout=LIMIT
    )
    assert (done.returncode, done.stdout) == (code, b"whole\n") and b"Exception ignored" not in done.stderr
    assert done.stderr == b"" or name == "SIGINT"


@pytest.mark.parametrize("seconds", [0, 2], ids=["ends at once", "waits for a thread"])
def test_signal_during_the_last_finalizer_of_a_command_is_dropped(seconds):
    """An exception raised while Python waits for its threads prints "Exception ignored in: <module 'threading' ...>",
    and a signal that is retried after Python has removed its handlers ends the process."""
    waited_for = f"import threading, time\nthreading.Thread(target=time.sleep, args=({seconds},)).start()\n"
    ended = waited_for + ENDED_IN_A_FINALIZER.replace("    time.sleep(60)\n", "")
    done = subprocess.run(python("-c", ended, "SIGTERM"), env=child_environment(), capture_output=True, timeout=LIMIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"whole\n", b"")


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.SIG_DFL], ids=["nohup", "terminal"])
def test_server_started_by_nohup_survives_its_terminal(before):
    previous = signal.signal(signal.SIGHUP, before)
    try:
        with serve._end_on_signals(SimpleQueue()):
            assert (signal.getsignal(signal.SIGHUP) == signal.SIG_IGN) == (before == signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGHUP, previous)


def copy_with_corrupt_weights(folder):
    shutil.copytree(TINY_TARGET, folder)
    (folder / "model.safetensors").write_bytes(random.Random(1).randbytes(100))
    return str(folder)


LITTLE_KB = 425_000 if sys.version_info >= (3, 14) else 325_000
"""Enough for the server, and too little for a worker or a thread."""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="/dev/full and limits of the address space are Linux's"
)
@pytest.mark.parametrize("case", ["corrupt weights", "little memory", "full trace"])
def test_failed_start_prints_one_sentence(case, tmp_path):
    model = ["--model", copy_with_corrupt_weights(tmp_path / "model")] if case == "corrupt weights" else []
    trace = ["--trace", "/dev/full"] if case == "full trace" else []
    before = f"ulimit -v {LITTLE_KB};" if case == "little memory" else ""
    done = outrider("generate", "-p", "x", "--max-tokens", "4", *model, *trace, before=before)
    errors = done.stderr.decode()
    assert (
        done.returncode in (2, 5) and done.stdout == b"" and errors.count("\n") == 1 and errors.startswith("outrider")
    )
    expected = {
        "corrupt weights": (f"{tmp_path}/model can't be loaded as llama: ",),
        "little memory": (  # what ends first varies
            f"most likely out of memory (ulimit -v allows a process {LITTLE_KB / 2**20:.1f} GiB)",
            "MLX can't start its threads (can't start new thread): allow this process more memory (ulimit -v) or"
            " threads (ulimit -u)\n",
        ),
        "full trace": ("the trace can't be written to /dev/full: No space left on device",),
    }
    assert any(words in errors for words in expected[case]) and "Exception ignored" not in errors
