"""locust's file: a user that sends each request of a plan at its time, and records when each event arrives.

The environment variable PLAN names a JSON file, {requests: [{after, body}], answers: a path}. Each request that has
ended adds a line to the file of answers, {number, sent, events: [[seconds, data]], error}. Does not depend on Outrider.
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
TIMEOUT_SECONDS = 600.0


class PlannedUser(FastHttpUser):  # type: ignore[misc]
    """Sends requests without waiting for earlier answers."""

    concurrency = len(PLAN["requests"])
    network_timeout = connection_timeout = TIMEOUT_SECONDS

    @task  # type: ignore[untyped-decorator]
    def send_plan(self) -> None:
        """Sends the whole plan once."""
        started, group = time.perf_counter(), Group()
        with Path(PLAN["answers"]).open("w") as answers:
            for number, request in enumerate(PLAN["requests"]):
                gevent.sleep(max(0.0, started + request["after"] - time.perf_counter()))
                group.spawn(lambda *of: print(json.dumps(self.ask(*of)), file=answers), number, request["body"])
            group.join()
        self.environment.runner.quit()

    def ask(self, number: int, body: dict[str, Any]) -> dict[str, Any]:
        """Sends a request, and returns its record when it has ended."""
        record: dict[str, Any] = {"number": number, "sent": time.perf_counter(), "events": [], "error": ""}
        with self.client.post("/v1/completions", json=body, stream=True, catch_response=True) as answer:
            if answer.status_code != 200:
                record["error"] = f"{answer.status_code}: {answer.error or answer.text}"
                answer.failure(record["error"])
                return record
            while line := answer.stream.readline(b"\n"):
                if line.startswith(b"data: "):
                    record["events"].append((time.perf_counter(), line[6:].decode()))
        return record
