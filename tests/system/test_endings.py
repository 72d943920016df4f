"""Commands that start processes leave none behind, however they end, and report failures."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import Client, InvalidRequest, SamplingParams
from outrider.orchestrator.machine.spawn import child_environment, python
from tests.tiny import Pair

LIMIT = 200.0
SMALL_FILES = 2048
"""The largest allowed file in bytes, to simulate a full disk."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder for run directories, with a path short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="or-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def outrider(folder: Path, *arguments: str, file_size: int | None = None) -> subprocess.Popen[str]:
    def limit() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, children would inherit that it is ignored
        if file_size is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))

    own = {"TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.Popen(
        python("-m", "outrider", *arguments),
        env=child_environment() | own | {"MLX_DISABLE_COMPILE": "1"},  # MLX keeps what it compiles in TMPDIR
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        preexec_fn=limit,
    )


def run_folders(folder: Path) -> list[Path]:
    return list(folder.glob("outrider-run-*"))


def until_something_runs(folder: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while not any((run / "target-0.log").exists() for run in run_folders(folder)):
        if time.monotonic() > deadline:
            pytest.fail(f"no worker came up within {LIMIT} s")
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "command"),
    [
        (signal.SIGTERM, ["tune"]),
        (signal.SIGHUP, ["overlap", "--out", "out"]),
        (signal.SIGTERM, ["bench", "--peers", "none", "--prompts", "1", "--out", "out"]),
        (signal.SIGHUP, ["generate", "-p", "x", "-m", "1000", "--ignore-eos"]),
    ],
)
def test_a_signal_leaves_no_run_folder(folder: Path, number: signal.Signals, command: list[str]) -> None:
    process = outrider(folder, *command)
    until_something_runs(folder)
    process.send_signal(number)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + number and "Traceback" not in err
    assert run_folders(folder) == []


def test_generate_reports_an_unwritable_trace_after_the_text(folder: Path, served: Pair) -> None:
    models = ("--model", str(served.target), "--draft-backend", "ngram")
    asked = ("generate", *models, "-p", "def f(", "-m", "60", "--trace", "t.json")
    process = outrider(folder, *asked, file_size=SMALL_FILES)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == InvalidRequest.exit_code and len(out) > 20
    assert err.splitlines()[-1] == "outrider generate: the trace can't be written to t.json: File too large"


def test_serve_reports_an_unwritable_trace_at_its_end(folder: Path, served: Pair) -> None:
    models = ("--model", str(served.target), "--draft-backend", "ngram")
    process = outrider(folder, "serve", "--no-http", *models, "--trace", "t.json", file_size=SMALL_FILES)
    endpoint = (process.stdout.readline() if process.stdout else "").split()[1]
    Client(endpoint).generate("def f(", SamplingParams(max_tokens=40))
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == InvalidRequest.exit_code and "outrider serve: the trace can't be written to" in err
