"""OpenTelemetry spans of requests that arrive with a trace context: the request, its choices and their phases.

Imported only when tracing is configured. Names follow OpenTelemetry's conventions for HTTP and generative AI;
the numbers of `Timings` have their names with the prefix `outrider.`. Spans contain no prompts or answers.
"""

from __future__ import annotations

import time
from typing import Any

from msgspec import structs
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import Scope

from outrider import __version__
from outrider.orchestrator.client.dialogue import GenerationResult
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.sampling import SamplingParams
from outrider.server.middleware import MAX_PATH_LENGTH

SAMPLING_FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")


def create_exporter(endpoint: str | None) -> SpanProcessor:
    """Returns an exporter to the collector at `endpoint`, by default the one in OTEL_ variables, with their options."""
    target = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces"
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=target))


class Tracing:
    """The server's tracer. `processor` receives finished spans; `close` flushes it."""

    def __init__(self, model: str, processor: SpanProcessor) -> None:
        named = Resource.create({SERVICE_NAME: "outrider", SERVICE_VERSION: __version__})
        self._provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("outrider", __version__)
        self._model = model

    def start_request(self, scope: Scope) -> RequestSpan | None:
        """Starts a request's span. Returns None without a valid `traceparent`."""
        headers = Headers(scope=scope)
        parents = headers.getlist("traceparent")
        if len(parents) != 1:
            return None
        carrier = {"traceparent": parents[0], "tracestate": ",".join(headers.getlist("tracestate"))}
        context = TraceContextTextMapPropagator().extract(carrier)
        if not get_current_span(context).get_span_context().is_valid:
            return None
        fields = {"http.request.method": scope["method"], "url.scheme": scope["scheme"]}
        fields |= {"url.path": scope["path"][:MAX_PATH_LENGTH], "outrider.request_id": scope["state"]["request_id"]}
        span = self._tracer.start_span(str(scope["method"]), context, SpanKind.SERVER, fields)
        return RequestSpan(self._tracer, span, str(scope["method"]), self._model)

    def close(self) -> None:
        self._provider.shutdown()


class RequestSpan:
    """The span of an HTTP request, until its response is complete."""

    def __init__(self, tracer: Tracer, span: Span, method: str, model: str) -> None:
        self._tracer, self._span, self._method, self._model = tracer, span, method, model

    def start_choice(self, is_chat: bool, index: int, sampling: SamplingParams) -> ChoiceSpan:
        """Starts a choice's span."""
        operation = "chat" if is_chat else "text_completion"
        fields: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "outrider",
            "gen_ai.request.model": self._model,
            **{f"gen_ai.request.{name}": getattr(sampling, name) for name in SAMPLING_FIELDS},
            "gen_ai.request.seed": sampling.seed or 0,
            "gen_ai.request.stop_sequences": sampling.stop,
            "outrider.choice": index,
        }
        parent = set_span_in_context(self._span)
        span = self._tracer.start_span(f"{operation} {self._model}", parent, attributes=fields)
        return ChoiceSpan(self._tracer, span)

    def end(self, route: str, status: int) -> None:
        """Ends the span; `route` is the path template."""
        self._span.update_name(f"{self._method} {route}")
        self._span.set_attributes({"http.route": route, "http.response.status_code": status})
        if status >= 500:
            self._span.set_attribute("error.type", str(status))
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


class ChoiceSpan:
    """The span of a choice, with child spans for queueing, prefill and decoding."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer, self._span = tracer, span
        self._began_ns = time.time_ns()

    def end(self, result: GenerationResult | None, error: Exception | None) -> None:
        """Ends the span. Without a result or an error, the choice was cancelled."""
        if result is not None:
            self._record(result)
        elif error is not None:
            self._span.set_attribute("error.type", type(error).__name__)
            self._span.set_status(Status(StatusCode.ERROR, str(error)))
        else:
            self._span.set_attribute("gen_ai.response.finish_reasons", ("cancelled",))
        self._span.end()

    def _record(self, result: GenerationResult) -> None:
        times, reason = result.timings, "stop" if result.finish_reason == "eos" else result.finish_reason
        self._span.set_attributes(
            {
                "gen_ai.response.model": result.model,
                "gen_ai.response.finish_reasons": (reason,),
                "gen_ai.usage.input_tokens": result.prompt_tokens,
                "gen_ai.usage.output_tokens": len(result.token_ids),
                "gen_ai.usage.cache_read.input_tokens": times.cache_n,
                "outrider.mode": result.mode,
            }
        )
        at_ns = self._add_phase("queue", self._began_ns, times.queue_ms, {})
        at_ns = self._add_phase("prefill", at_ns, times.prompt_ms, {"outrider.prompt_n": times.prompt_n})
        fields: dict[str, Any] = {
            f"outrider.draft_n_accepted_from.{by}": count for by, count in times.draft_n_accepted_from.items()
        }
        fields |= {f"outrider.{name}": n for name, n in structs.asdict(times).items() if isinstance(n, int | float)}
        self._add_phase("decode", at_ns, times.predicted_ms, fields)

    def _add_phase(self, name: str, began_ns: int, milliseconds: float, fields: dict[str, Any]) -> int:
        """Adds a child span, and returns its end."""
        ended_ns = began_ns + int(milliseconds * MILLISECOND_NS)
        span = self._tracer.start_span(name, set_span_in_context(self._span), attributes=fields, start_time=began_ns)
        span.end(ended_ns)
        return ended_ns
