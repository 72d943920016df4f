"""Runs every query of the Grafana dashboard in a real Prometheus that scrapes a running server.

    outrider serve --port 8080 &
    python -m tools.dashboard --url http://127.0.0.1:8080

Needs `prometheus` on the path, and docs/grafana.json of the checkout. Fails if a query has no result.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import Request, urlopen

from outrider.orchestrator.cli import run_as_program
from outrider.protocol.errors import EndpointError, InvalidRequest
from outrider.target_worker.rank_link import free_ports
from tools.web.site import wait_for_url

SCRAPES = 8
START_TIMEOUT_SECONDS = 30.0
CONFIG = """global: {{scrape_interval: 1s}}
scrape_configs: [{{job_name: outrider, static_configs: [{{targets: ["{target}"]}}]}}]
"""


@dataclass(frozen=True, slots=True)
class Query:
    """A panel's PromQL, with the dashboard's variables filled in."""

    panel: str
    promql: str


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, help="URL of a running `outrider serve`")
    parser.add_argument(
        "--dashboard",
        type=Path,
        default=Path("docs/grafana.json"),
        metavar="FILE",
        help="the dashboard (default: docs/grafana.json)",
    )


def run(options: argparse.Namespace) -> int:
    program = shutil.which("prometheus")
    if program is None:
        raise InvalidRequest("prometheus is not on the path; install it, as with apt-get install prometheus")
    try:
        dashboard = json.loads(options.dashboard.read_text(encoding="utf-8"))
        model = _get(f"{options.url}/v1/models")["data"][0]["id"]
    except URLError as error:
        raise EndpointError(f"{options.url} does not answer ({error}); expected a running `outrider serve`") from None
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{options.dashboard} can't be read ({error}); expected docs/grafana.json") from None
    with TemporaryDirectory() as folder, _prometheus(program, Path(folder), urlsplit(options.url).netloc) as base:
        for _ in range(SCRAPES):
            _send_requests(options.url)
            time.sleep(1.0)
        results = [(query.panel, _run_query(base, query.promql)) for query in queries(dashboard, model)]
    for panel, result in results:
        print(f"{panel:32} {result}")
    bad = [panel for panel, text in results if not text[:1].isdigit() or text.startswith("0 ") or "NaN" in text]
    failed = f"; without: {', '.join(bad)}" if bad else ""
    print(f"{len(results) - len(bad)} of {len(results)} queries have a result{failed}")
    return 1 if bad else 0


def queries(dashboard: dict[str, Any], model: str) -> list[Query]:
    """Returns the queries of all panels about `model`."""
    return [
        Query(panel["title"], target["expr"].replace("$model_name", model).replace("$__rate_interval", "10s"))
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]


def _send_requests(url: str) -> None:
    """Sends a request in each mode, and one that is refused, so that all metrics count something."""
    bodies: list[dict[str, Any]] = [{"speculation": {"mode": mode}} for mode in ("ar", "sd", "ssd")]
    for body in (*bodies, {"max_tokens": -1}):
        data = json.dumps({"prompt": "def fibonacci(n):", "max_tokens": 24, **body}).encode()
        request = Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
        with suppress(HTTPError), urlopen(request) as answer:
            answer.read()


def _run_query(base: str, promql: str) -> str:
    """Returns the number of series and the first one's value, or Prometheus' error."""
    try:
        series = _get(f"{base}/api/v1/query?{urlencode({'query': promql}, quote_via=quote)}")["data"]["result"]
    except HTTPError as error:
        return str(json.load(error)["error"])
    return f"{len(series)} series" + (f", the first is {series[0]['value'][1]}" if series else "")


@contextmanager
def _prometheus(program: str, folder: Path, target: str) -> Iterator[str]:
    """Runs a Prometheus that scrapes `target` every second and stores its data in `folder`. Yields its URL."""
    (folder / "prometheus.yml").write_text(CONFIG.format(target=target), encoding="utf-8")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    line = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process = subprocess.Popen([*line, f"--web.listen-address={address}", "--log.level=error"])
    try:
        if not wait_for_url(f"http://{address}/-/ready", lambda: process.poll() is None, START_TIMEOUT_SECONDS):
            raise EndpointError(f"prometheus does not answer at {address}; see its messages above")
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def _get(url: str) -> Any:
    with urlopen(url) as answer:
        return json.load(answer)


if __name__ == "__main__":
    raise SystemExit(run_as_program())
