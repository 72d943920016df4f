"""A drafter's device is chosen before it is created, and its memory is measured where MLX computes."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.draft_worker import __main__ as program
from outrider.drafters.drafter import BACKENDS, make_drafter
from outrider.drafters.mlx import MlxDrafter
from outrider.orchestrator.machine.spawn import worker_command
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import OutriderError
from tests.system.links import FakeLink
from tests.system.markov import markov


@pytest.mark.parametrize(("device", "chosen"), [("auto", []), ("cpu", [mx.cpu])])
def test_device_option_keeps_a_drafter_on_the_cpu(monkeypatch, device, chosen):
    devices = []

    monkeypatch.setattr(mx, "set_default_device", devices.append)
    monkeypatch.setattr(program.worker_link, "run_worker", lambda options, load: 7)
    monkeypatch.setattr(program.process, "configure_logging", lambda *given: None)
    settings = ServeSettings(model="m", draft_model="d", draft_device=device)
    command = worker_command("draft", "draft-0", "ipc:///e", settings)
    monkeypatch.setattr("sys.argv", command[command.index("outrider.draft_worker") :])
    assert program.main() == 7
    assert devices == chosen


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_has_a_case_in_make_drafter(backend: str, tmp_path: Path) -> None:
    with pytest.raises(OutriderError) as raised:
        make_drafter(backend, str(tmp_path / "nowhere"), print, target=str(tmp_path / "nowhere"))
    assert "unknown drafter" not in str(raised.value), f"make_drafter has no case for {backend}"


def test_hello_has_the_backend_that_was_loaded() -> None:
    """Not the requested one: MLX drafts where Core ML can't."""
    drafter: Any = MlxDrafter(markov(np.zeros((6, 6), np.float32)))
    drafter.left_out = ("MLX drafts",)
    options = Namespace(name="draft-0", backend="coreml", model="", target="", vocabulary="", fan_out="best-first")
    hello, _ = program.worker_of(options, 1, drafter, FakeLink("draft-0"))
    assert hello.backend == "mlx" and hello.abilities.left_out == ("MLX drafts",)
