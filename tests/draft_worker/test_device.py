"""A drafter's device is chosen before it is created."""

from __future__ import annotations

import mlx.core as mx
import pytest

from outrider.draft_worker import __main__ as program


@pytest.mark.parametrize(("given", "chosen"), [([], []), (["--device", "auto"], []), (["--device", "cpu"], [mx.cpu])])
def test_device_option_keeps_a_drafter_on_the_cpu(monkeypatch, given, chosen):
    devices = []

    monkeypatch.setattr(mx, "set_default_device", devices.append)
    monkeypatch.setattr(program.worker_link, "run_worker", lambda options, load: 7)
    monkeypatch.setattr(program.process, "configure_logging", lambda *given: None)
    monkeypatch.setattr("sys.argv", ["draft_worker", "--endpoint", "ipc:///e", "--model", "m", *given])
    assert program.main() == 7
    assert devices == chosen
