"""Deployment on an existing Ray cluster by `serve run outrider.fleet.deployment:app plan=fleet.yaml`, until Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleet.running_fleet import BODY, KEY, TIMEOUT_S, Fleet, wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(400)]
NAME = "by-serve"
AS_IF_TYPED = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
APP = "outrider.fleet.deployment:app"
SERVE = (sys.executable, "-c", AS_IF_TYPED + "from ray.serve.scripts import cli; cli()", "run", APP)


def test_serve_run_answers_over_http_and_stops_on_interrupt(hosts: Any, expected_text: str, tmp_path: Path) -> None:
    from ray import serve

    (tmp_path / "fleet.yaml").write_text(f"placed: {{needs: {{metal: 1}}}}\ningress: {{port: 0, api_keys: [{KEY}]}}\n")
    command = [*SERVE, "plan=fleet.yaml", "--address", hosts.address, "--name", NAME]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log) as run:
        try:
            wait_until(
                lambda: b"is ready" in (tmp_path / "log").read_bytes() or run.poll() is not None, "it does not start"
            )
            url = serve.get_deployment_handle("ingress", NAME).url.remote().result()
            fleet = Fleet(NAME, "placed", url)
            wait_until(lambda: fleet.is_complete(1), "no engine")
            answer = httpx.post(f"{url}/v1/completions", json=BODY, headers={"x-api-key": KEY}, timeout=TIMEOUT_S)
            assert answer.json()["choices"][0]["text"] == expected_text
            proxied_answer = serve.get_deployment_handle("ingress", NAME).remote(None).result()  # as by Serve's proxy
            assert proxied_answer.status_code == 421 and url in proxied_answer.body.decode()
        finally:
            run.send_signal(signal.SIGINT)
        assert run.wait(TIMEOUT_S) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/live")
