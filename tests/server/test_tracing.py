"""A request with a traceparent has spans in its trace; without a valid one there are none."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from outrider.orchestrator.http_settings import HttpSettings, is_tracing_enabled
from outrider.orchestrator.pairing.model_files import TINY_TARGET
from outrider.protocol.errors import InvalidRequest
from outrider.server.app import build_app
from outrider.server.model.served import load_served_model
from outrider.server.server_context import OrchestratorClient
from outrider.server.tracing import Tracing
from tests.server.collector import Collector
from tests.server.running_server import RunningServer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=value"}
ASKED = {"prompt": "def fibonacci(n):", "max_tokens": 12, "seed": 4, "temperature": 0.5, "speculation": {"mode": "sd"}}


class App:
    """The application in this process, with a running orchestrator; its spans are kept in memory."""

    def __init__(self, endpoint: str) -> None:
        self.exporter = InMemorySpanExporter()
        tracing = Tracing("fib", SimpleSpanProcessor(self.exporter))
        model = load_served_model("fib", TINY_TARGET, ("fib",))
        self._app = build_app(model, OrchestratorClient(endpoint), HttpSettings(), tracing)

    def post(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> tuple[httpx.Response, list[ReadableSpan]]:
        """Returns the answer and its spans, in the order in which they ended."""

        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=200) as client:
                return await client.post(path, json=body, headers=headers)

        self.exporter.clear()
        return asyncio.run(asked()), list(self.exporter.get_finished_spans())


@pytest.fixture(scope="module")
def app(pair: RunningServer) -> App:
    return App(pair.client.endpoint)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize("stream", [False, True])
def test_traced_request_has_nested_spans_for_its_choice_and_phases(app: App, stream: bool) -> None:
    answer, spans = app.post("/v1/completions", {**ASKED, "stream": stream}, TRACED)
    named = {span.name: span for span in spans}
    names = ["queue", "prefill", "decode", "text_completion fib", "POST /v1/completions"]
    assert answer.status_code == 200 and [span.name for span in spans] == names
    request, choice = named["POST /v1/completions"], named["text_completion fib"]
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context} == {TRACE}
    assert request.parent is not None and f"{request.parent.span_id:016x}" == PARENT and request.parent.is_remote
    assert request.context is not None and request.context.trace_state.get("vendor") == "value"
    assert choice.parent == request.context and all(named[name].parent == choice.context for name in names[:3])
    assert attributes(request)["http.response.status_code"] == 200
    assert attributes(request)["outrider.request_id"] == answer.headers["x-request-id"]
    parts = [named[name] for name in names[:3]]
    assert [part.start_time for part in parts[1:]] == [part.end_time for part in parts[:2]]
    assert request.start_time <= parts[0].start_time


def test_spans_have_genai_attributes_and_speculation_counts(app: App) -> None:
    asked = {**ASKED, "prompt": 4 * "for i in range(10):\n    print(i)\n"}  # n-grams draft it if the drafter is slow
    for seed in range(200):  # while other tests keep the drafter from its core, its chains come too late
        answer, spans = app.post("/v1/completions", {**asked, "seed": seed}, TRACED)
        body, times = answer.json(), answer.json()["timings"]
        if times["draft_n_accepted"]:
            break
    choice, decode = attributes(spans[3]), attributes(spans[2])
    expected = {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "outrider", "gen_ai.request.model": "fib",
        "gen_ai.request.max_tokens": 12, "gen_ai.request.temperature": 0.5, "gen_ai.request.seed": seed,
        "gen_ai.response.finish_reasons": ("length",), "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.input_tokens": body["usage"]["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": times["cache_n"], "outrider.mode": "sd",
    }  # fmt: skip
    assert expected.items() <= choice.items()
    assert decode["outrider.draft_n"] == times["draft_n"] > 0, body
    by_origin = {f"outrider.draft_n_accepted_from.{name}": n for name, n in times["draft_n_accepted_from"].items()}
    assert sum(by_origin.values()) == times["draft_n_accepted"] > 0 and by_origin.items() <= decode.items()
    assert all(decode[name] == times[name.removeprefix("outrider.")] for name in decode if name not in by_origin)
    assert asked["prompt"] not in str([attributes(span) for span in spans])
    assert body["choices"][0]["text"] not in str([attributes(span) for span in spans])


def test_each_choice_has_its_span_and_failures_have_their_status(app: App) -> None:
    _, spans = app.post("/v1/completions", {**ASKED, "n": 2}, TRACED)
    assert sorted(attributes(span).get("outrider.choice", -1) for span in spans) == [-1] * 7 + [0, 1]
    refused, spans = app.post("/v1/completions", {**ASKED, "prompt": [5] * 2000}, TRACED)
    assert refused.status_code == 400 and [span.name for span in spans] == [
        "text_completion fib",
        "POST /v1/completions",
    ]
    assert spans[0].status.status_code is StatusCode.ERROR and attributes(spans[0])["error.type"] == "PromptTooLong"
    assert spans[1].status.status_code is StatusCode.UNSET, "an invalid request is not an error of the server"
    _, spans = app.post("/v1/completions", {"nonsense": True}, TRACED)
    assert [attributes(span)["http.response.status_code"] for span in spans] == [400]


VERSION, SHORT = f"ff-{TRACE}-{PARENT}-01", f"00-{TRACE[:-2]}-{PARENT}-01"
MALFORMED = ["", "no", VERSION, SHORT, f"00-{TRACE.upper()}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01",
             f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{PARENT}", f"00-{TRACE}-{PARENT}-01-more"]  # fmt: skip


@pytest.mark.parametrize("traceparent", [None, *MALFORMED])
def test_request_without_a_valid_traceparent_has_no_span(app: App, traceparent: str | None) -> None:
    headers = {} if traceparent is None else {"traceparent": traceparent}
    answer, spans = app.post("/tokenize", {"content": "x"}, headers)
    assert answer.status_code == 200 and spans == []


def test_later_traceparent_version_is_accepted_and_unsampled_one_skipped(app: App) -> None:
    _, spans = app.post("/tokenize", {"content": "x"}, {"traceparent": f"01-{TRACE}-{PARENT}-01-more"})
    assert [span.name for span in spans] == ["POST /tokenize"]
    assert app.post("/tokenize", {"content": "x"}, {"traceparent": f"00-{TRACE}-{PARENT}-00"})[1] == []


def test_a_server_sends_its_spans_to_a_collector(chat: RunningServer, collector: Collector) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}]}
    httpx.post(f"{chat.url}/v1/chat/completions", json=asked, headers=TRACED, timeout=200).raise_for_status()
    until = time.monotonic() + 200
    while time.monotonic() < until and len(collector.spans) < 5:
        time.sleep(0.02)
    spans = {span.name: span for span in collector.spans}
    assert {"queue", "prefill", "decode", "chat chatty", "POST /v1/chat/completions"} <= spans.keys()
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert collector.resource["service.name"] == "outrider" and collector.resource["service.version"]


def test_opentelemetry_sdk_is_not_imported_without_tracing() -> None:
    program = "import outrider.server.__main__, sys; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], env=os.environ, timeout=200, check=False).returncode == 0


@pytest.mark.parametrize(
    ("endpoint", "environment", "wanted"),
    [
        (None, {}, False),
        ("http://127.0.0.1:4318", {}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ("http://127.0.0.1:4318", {"OTEL_SDK_DISABLED": "true"}, False),
        ("http://127.0.0.1:4318", {"OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_tracing_is_enabled_by_a_flag_or_by_opentelemetrys_variables(
    endpoint: str | None, environment: dict[str, str], wanted: bool
) -> None:
    assert is_tracing_enabled(HttpSettings(otlp_endpoint=endpoint), environment) is wanted


@pytest.mark.parametrize("url", ["collector:4318", "ftp://c", "http://", ""])
def test_invalid_collector_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="expected a collector's URL such as http:"):
        HttpSettings(otlp_endpoint=url)
