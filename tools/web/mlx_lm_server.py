"""Runs `mlx_lm.server` with the same weights, as its users would start it.

The weights are first copied as float32: on a CPU mlx-lm is several times faster with them, and Outrider uses float32,
too. The server uses the BLAS of Outrider's workers and all cores.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from outrider.orchestrator.machine import system
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.protocol.errors import WorkerError
from outrider.target_worker.rank_link import free_ports
from tools.web.site import wait_for_url

START_TIMEOUT_SECONDS, EXIT_TIMEOUT_SECONDS = 120.0, 10.0


def copy_as_float32(model: Path, to: Path) -> Path:
    """Copies the model's folder to `to` with float32 weights, and returns `to`."""
    shutil.copytree(model, to, ignore=shutil.ignore_patterns("*.safetensors*"))
    for file in model.glob("*.safetensors"):
        weights = {name: value.astype(np.float32) for name, value in load_file(file).items()}
        save_file(weights, to / file.name, metadata={"format": "mlx"})
    return to


@contextmanager
def run_mlx_lm_server(model: Path, draft: Path | None, log: Path) -> Iterator[str]:
    """Runs the server, and yields its URL. With a draft it serves a request at a time, without one it batches.

    Raises:
        WorkerError: the server does not start.
    """
    (port,) = free_ports(1)
    drafting = ["--draft-model", str(draft)] if draft is not None else []
    command = ["--model", str(model), "--port", str(port), "--log-level", "WARNING", *drafting]
    with log.open("wb") as output:
        process = subprocess.Popen(
            python("-m", "mlx_lm", "server", *command),
            env=system.blas_environment(child_environment(), os.cpu_count() or 1),
            stdout=output,
            stderr=output,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        if not wait_for_url(f"{url}/v1/models", lambda: process.poll() is None, START_TIMEOUT_SECONDS):
            raise WorkerError(f"mlx_lm.server does not start: {log.read_text(errors='replace')[-1000:]}")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(EXIT_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
