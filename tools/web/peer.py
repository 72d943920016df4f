"""`mlx_lm.server` with the same weights, as a process that its users would start.

The weights are copied as float32 first, for on a CPU it is several times faster with them, and ours are float32 there.
It has our workers' BLAS, and all cores.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import numpy as np
from safetensors.numpy import load_file, save_file

from outrider.orchestrator.machine import system
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.protocol.errors import WorkerError

START_S, END_S = 120.0, 10.0


def as_float32(model: Path, to: Path) -> Path:
    """A copy of the model's folder, its weights as float32."""
    shutil.copytree(model, to, ignore=shutil.ignore_patterns("*.safetensors*"))
    for file in model.glob("*.safetensors"):
        weights = {name: value.astype(np.float32) for name, value in load_file(file).items()}
        save_file(weights, to / file.name, metadata={"format": "mlx"})
    return to


@contextmanager
def mlx_lm_server(model: Path, draft: Path | None, log: Path) -> Iterator[str]:
    """Its address; with a draft it decodes speculatively, a request at a time, and without one in batches.

    Raises:
        WorkerError: it does not come up.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    drafting = ["--draft-model", str(draft)] if draft is not None else []
    command = ["--model", str(model), "--port", str(port), "--log-level", "WARNING", *drafting]
    with log.open("wb") as told:
        process = subprocess.Popen(
            python("-m", "mlx_lm", "server", *command),
            env=system.environment(child_environment(), os.cpu_count() or 1),
            stdout=told,
            stderr=told,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(url, process, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            with urlopen(f"{url}/v1/models", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise WorkerError(f"mlx_lm.server does not come up: {log.read_text(errors='replace')[-1000:]}")
