"""Sends random valid and invalid requests by the server's OpenAPI document: the server must not fail, hang or grow.

    python -m tests.harness.fuzz_http                       # 100,000 requests: an hour
    python -m tests.harness.fuzz_http --requests 3000 --seed 7
    python -m tests.harness.fuzz_http --each 100 --at-once 2

schemathesis (`pip install schemathesis`) generates the requests; the model is a scripted one with tools and thinking,
which costs little. Each part is a process with its own seed, because schemathesis grows with its history; the first
part also tries every field's boundary values. One server answers all parts. schemathesis checks status, content type
and body of every response, events too, against /openapi.json, and that invalid requests are refused. Prints counts by
status and the server's memory. The exit code is 1 if a check failed, no response came within 30 s, the process was
lost, or its memory has grown by more than 5 % since the first fifth of the requests.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import Request, urlopen

from prometheus_client.parser import text_string_to_metric_families

from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.orchestrator.pairing.model_files import find_model
from outrider.protocol import values
from tests.harness.scripted_model import END, write_scripted
from tools.web.site import Site, run_site

GROWTH = 1.05
CONTEXT_LENGTH = 192
TIMEOUT_S = 30
CACHE_WORDS, WORDS_PER_REQUEST = 12_000, 200
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
# A request with a timeout of a microsecond gets 504; an invalid request may also be too large (413).
SETTINGS = """[checks]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "504"]
negative_data_rejection.expected-statuses = ["400", "401", "404", "405", "413", "415", "5xx"]
"""


@dataclass(slots=True)
class Tally:
    """The results so far. `findings`: schemathesis's reports. `early`: the server's memory after a fifth, in bytes."""

    statuses: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    early: int = 0

    @property
    def count(self) -> int:
        return self.statuses.total()

    def __str__(self) -> str:
        by_status = (f"{count} {status}" for status, count in sorted(self.statuses.items()))
        return f"{self.count} requests, {', '.join(by_status)}"


def set_context_length(model: Path, tokens: int) -> Path:
    """Sets a model's context length, which ends its endless texts, and returns the model."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": tokens}))
    return model


def fuzz(url: str, folder: Path, seed: int, each: int, phases: str) -> list[str]:
    """Runs schemathesis with `each` requests to each path of the server at `url`. Returns its findings."""
    (folder / "schemathesis.toml").write_text(SETTINGS)
    report = folder / "report.json"
    ended = subprocess.run(
        python("-m", "schemathesis.cli", "--config-file", str(folder / "schemathesis.toml"), "run",
               f"{url}/openapi.json", "--seed", str(seed), "--max-examples", str(each), "--phases", phases,
               "--checks", ",".join(CHECKS), "--request-timeout", str(TIMEOUT_S), "--suppress-health-check", "all",
               "--continue-on-failure", "--no-shrink", "--generation-database", "none", "--output-sanitize", "false",
               "--no-color", "--report", "json", "--report-json-path", str(report)),
        env=child_environment(), cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    parsed: dict[str, Any] = json.loads(report.read_text()) if report.is_file() else {}
    if parsed.get("failures") == [] and parsed.get("errors") == [] and parsed.get("complete"):
        return []
    return [f"seed {seed}: {ended.stdout}{ended.stderr}"]


def tokenizer_cache_texts() -> Iterator[str]:
    """Yields texts of `CACHE_WORDS` different words in all, none of which is too long for a context of
    `CONTEXT_LENGTH` tokens."""
    for first in range(0, CACHE_WORDS, WORDS_PER_REQUEST):
        yield END.join(f"a word of its own: {number}" for number in range(first, first + WORDS_PER_REQUEST))


def fill_tokenizer_cache(url: str) -> None:
    """Fills the tokenizer's cache of 10,000 words, so that it does not count as growth."""
    for words in tokenizer_cache_texts():
        body = json.dumps({"content": words}).encode()
        request = Request(f"{url}/tokenize", body, {"content-type": "application/json"})
        with urlopen(request, timeout=TIMEOUT_S) as answer:
            answer.read()


def statuses(site: Site) -> Counter[str]:
    """Returns the server's counts of all answers by status."""
    with urlopen(f"{site.url}/metrics", timeout=TIMEOUT_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    counts: Counter[str] = Counter()
    for family in families:
        for sample in family.samples:
            if sample.name == "outrider:http_requests_total":
                counts[sample.labels["status"]] += int(sample.value)
    return counts


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=100_000, help="least number of requests (default: 100000)")
    parser.add_argument("--each", type=int, default=200, help="random requests per path and part (default: 200)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first part (default: 1)")
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        help="concurrent parts (default: 1)",
    )


def run(options: argparse.Namespace) -> int:
    count = values.check_int("requests", options.requests, 1, 10**9)
    at_once = values.check_int("at-once", options.at_once, 1, 64)
    tally, seed = Tally(), options.seed
    with TemporaryDirectory() as name, ThreadPoolExecutor(at_once) as threads:
        folder = Path(name)
        model = find_model(str(set_context_length(write_scripted(folder / "model"), CONTEXT_LENGTH)))
        with (
            LocalCluster(model=model.folder, draft_model=model.folder, memory=False) as cluster,
            run_site(cluster, model) as site,
        ):
            pid = site.process.pid
            fill_tokenizer_cache(site.url)

            def part(seed: int) -> list[str]:
                phases = "coverage,fuzzing,stateful" if seed == options.seed else "fuzzing"
                with TemporaryDirectory() as own:
                    return fuzz(site.url, Path(own), seed, options.each, phases)

            while tally.count < count:
                new_findings = [
                    fault for findings in threads.map(part, range(seed, seed + at_once)) for fault in findings
                ]
                seed += at_once
                site.process.check()
                tally.findings += new_findings
                tally.statuses = statuses(site)
                if not tally.early and tally.count >= count / 5:
                    tally.early = site.resident
                print(
                    f"before seed {seed}: {tally}; {site.resident / 2**20:.1f} MiB", *new_findings, sep="\n", flush=True
                )
            growth = site.resident / tally.early
            same_process = site.process.pid == pid
    lost = "" if same_process else ", and its process was LOST"
    print(f"{tally.count} requests, {len(tally.findings)} parts with faults, memory times {growth:.3f}{lost}")
    return int(bool(tally.findings) or not same_process or growth > GROWTH)


if __name__ == "__main__":
    raise SystemExit(run_as_program())
