"""Sends requests at given times with locust, in a process of its own."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.protocol.errors import InvalidRequest, WorkerError
from tools.web.streams import StreamTimes, parse_stream

LOCUST_FILE = Path(__file__).with_name("locustfile.py")


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """The times of a stream, or its error."""

    stream: StreamTimes | None
    error: str = ""


def require_locust() -> None:
    """Checks that locust is installed.

    Raises:
        InvalidRequest: locust is not installed.
    """
    if find_spec("locust") is None:
        raise InvalidRequest("locust, which sends the requests, is not installed; run: pip install locust")


def poisson_arrivals(count: int, rate: float, seed: str) -> list[float]:
    """Returns the times of `count` requests in seconds: a Poisson process with `rate` requests per second."""
    rng, at, times = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        times.append(at)
    return times


def send_requests(url: str, times: Sequence[float], bodies: Sequence[dict[str, Any]]) -> list[TimedAnswer]:
    """Sends each body to the completions of `url` at its time. Returns all answers when all requests have ended.

    Raises:
        WorkerError: locust failed.
    """
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    requests = [{"after": after, "body": {**body, **streamed}} for after, body in zip(times, bodies, strict=True)]
    with TemporaryDirectory() as name:
        plan, answers = Path(name) / "plan.json", Path(name) / "answers"
        plan.write_text(json.dumps({"requests": requests, "answers": str(answers)}))
        ended = subprocess.run(
            python("-m", "locust", "-f", str(LOCUST_FILE), "--headless", "--users", "1", "--host", url,
                   "--only-summary"),
            env={**child_environment(), "PLAN": str(plan)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        lines = answers.read_text().splitlines() if answers.is_file() else []
    if len(lines) != len(requests):
        raise WorkerError(f"locust ended with {ended.returncode} after {len(lines)} answers: {ended.stderr[-1000:]}")
    return [_answer(json.loads(line)) for line in lines]


def _answer(record: dict[str, Any]) -> TimedAnswer:
    if record["error"]:
        return TimedAnswer(None, record["error"])
    try:
        return TimedAnswer(parse_stream(record["sent"], [(at, data.encode()) for at, data in record["events"]]))
    except WorkerError as error:
        return TimedAnswer(None, str(error))
