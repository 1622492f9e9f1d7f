"""OpenTelemetry spans of requests, by the conventions for generative AI; imported only with otlp_traces_endpoint."""

from __future__ import annotations

import time
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from nanovllm.outputs import RequestOutput
from nanovllm.sequence import NewRequest
from nanovllm.serving.server.request_facts import RequestFacts

OPERATIONS = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}  # default: "chat"
# Sampling parameters -> attributes.
PARAMETERS = {
    "max_tokens": "gen_ai.request.max_tokens", "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p", "top_k": "gen_ai.request.top_k", "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty", "presence_penalty": "gen_ai.request.presence_penalty",
    "n": "gen_ai.request.choice.count",
}  # fmt: skip


def exporting(endpoint: str) -> TracerProvider:
    """Create a provider that sends spans to an OTLP endpoint, in batches from a separate thread."""
    provider = TracerProvider(resource=Resource.create({"service.name": "nanovllm"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class SpanWriter:
    """Writes a span per ended request, as a child of the client's span if it sent a traceparent."""

    def __init__(self, provider: Any, model_name: str) -> None:
        self._tracer = provider.get_tracer("nanovllm")
        self._model_name = model_name
        self._epoch = time.time() - time.monotonic()  # Unix time at zero of the engine's clock
        self._propagator = TraceContextTextMapPropagator()

    def write(self, facts: RequestFacts, request: NewRequest, output: RequestOutput | None) -> None:
        """Write the span of an ended request; a listener of `InFlight`."""
        operation = OPERATIONS.get(facts.path, "chat")
        now = time.monotonic()
        span = self._tracer.start_span(
            f"{operation} {self._model_name}",
            context=self._propagator.extract(facts.headers),
            kind=SpanKind.SERVER,
            attributes=self._attributes(operation, facts, request),
            start_time=self._nanoseconds(request.arrival_time),
        )
        if span.is_recording():
            span.set_attributes(_results(request, output, now))
            if output is None or output.error is not None:
                span.set_status(StatusCode.ERROR, "the engine died" if output is None else output.error)
        span.end(end_time=self._nanoseconds(now))

    def _attributes(self, operation: str, facts: RequestFacts, request: NewRequest) -> dict[str, Any]:
        given = {name: getattr(request.params, field, None) for field, name in PARAMETERS.items()}
        return {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "nanovllm",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.id": facts.answer_id,
            "http.request.header.x-request-id": facts.request_id,
        } | {name: value for name, value in given.items() if value is not None}

    def _nanoseconds(self, seconds: float) -> int:
        return int(1e9 * (self._epoch + seconds))


def _results(request: NewRequest, output: RequestOutput | None, now: float) -> dict[str, Any]:
    results: dict[str, Any] = {
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        "gen_ai.usage.output_tokens": output.metrics.num_output_tokens if output else 0,
        "gen_ai.latency.e2e": now - request.arrival_time,
    }
    if output is not None:
        results["gen_ai.usage.cache_read.input_tokens"] = output.num_cached_tokens
        results["gen_ai.response.finish_reasons"] = [c.finish_reason or "abort" for c in output.outputs]
        if output.metrics.queue_time is not None:
            results["gen_ai.latency.time_in_queue"] = output.metrics.queue_time
        if output.metrics.ttft is not None:
            results["gen_ai.latency.time_to_first_token"] = output.metrics.ttft
    return results
