"""What locust runs: one user who sends each request of a plan at its time, and keeps when each event of it came.

The plan is a file that PLAN names, {requests: [{after, body}], answers: a file}. That file gets a line a request when
it has ended, {number, sent, events: [[seconds, data]], error}. Knows HTTP and clocks; knows nothing of Outrider.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import gevent
from gevent.pool import Group
from locust import FastHttpUser, task

PLAN: dict[str, Any] = json.loads(Path(os.environ["PLAN"]).read_text())
SECONDS = 600.0


class Arrivals(FastHttpUser):  # type: ignore[misc]
    """Waits for nobody's answer before the next request is due."""

    concurrency = len(PLAN["requests"])
    network_timeout = connection_timeout = SECONDS

    @task  # type: ignore[untyped-decorator]
    def all_of_them(self) -> None:
        """The whole plan, once."""
        begun, asking = time.perf_counter(), Group()
        with Path(PLAN["answers"]).open("w") as answers:
            for number, request in enumerate(PLAN["requests"]):
                gevent.sleep(max(0.0, begun + request["after"] - time.perf_counter()))
                asking.spawn(lambda *asked: print(json.dumps(self.ask(*asked)), file=answers), number, request["body"])
            asking.join()
        self.environment.runner.quit()

    def ask(self, number: int, body: dict[str, Any]) -> dict[str, Any]:
        """One request to its end."""
        told: dict[str, Any] = {"number": number, "sent": time.perf_counter(), "events": [], "error": ""}
        with self.client.post("/v1/completions", json=body, stream=True, catch_response=True) as answer:
            if answer.status_code != 200:
                told["error"] = f"{answer.status_code}: {answer.error or answer.text}"
                answer.failure(told["error"])
                return told
            while line := answer.stream.readline(b"\n"):
                if line.startswith(b"data: "):
                    told["events"].append((time.perf_counter(), line[6:].decode()))
        return told
