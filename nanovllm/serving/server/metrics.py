"""Prometheus metrics of a server, in its own registry; docs/guide/server.md lists them.

Names are vLLM's with another prefix where the meaning is the same, so that its dashboards carry over.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.engine_stats import CacheGroupStats, ReplicaStatus
from nanovllm.observability.step_records import StepRecord
from nanovllm.outputs import RequestOutput
from nanovllm.sequence import NewRequest
from nanovllm.serving.server.option_metrics import option_gauges, tier_counters
from nanovllm.serving.server.request_facts import RequestFacts
from nanovllm.serving.server.speculation_metrics import speculation_figures
from nanovllm.serving.streaming.heartbeat import Heartbeat

PREFIX = "nanovllm:"
REASONS = ("error", "abort", "timeout", "length", "stop")  # the worst first
LATENCIES = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
TOKENS = tuple(float(2**power) for power in range(18))


class EngineFigures(Collector):
    """Collector of engine metrics, from its last heartbeat."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.heartbeat: Heartbeat | None = None
        self.is_stalled = False

    def collect(self) -> Iterator[Metric]:
        if self.heartbeat is None:
            return
        stats = self.heartbeat.stats
        usage = stats.num_used_blocks / max(1, stats.num_blocks)  # none before any replica has reported
        usage = max([usage, *(group.usage for group in stats.cache_groups)])
        gauges = {
            "num_requests_running": ("Running samples.", stats.num_running),
            "num_requests_waiting": ("Waiting samples.", stats.num_waiting),
            "num_clients": ("Clients with running or waiting requests.", stats.num_clients),
            "client_service_gap": ("Largest difference of service between two waiting clients.", stats.client_gap),
            "engine_step_age_seconds": ("Seconds since the last step ended, while there is work.", self.heartbeat.age),
            "engine_stalled": ("1 if engine_step_age_seconds is above stall_timeout.", int(self.is_stalled)),
            "kv_cache_touched_bytes": ("Memory that the KV cache takes.", stats.kv_touched_bytes),
            "kv_cache_findable_bytes": ("KV memory of findable prefixes.", stats.kv_findable_bytes),
            "kv_cache_usage_perc": ("Share of the KV blocks in use, 0 to 1; of the fullest pool.", usage),
        } | option_gauges(stats)
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        blocks = GaugeMetricFamily(PREFIX + "kv_blocks", "KV blocks by state.", labels=["model_name", "state"])
        for state, count in (("used", stats.num_used_blocks), ("free", stats.num_free_blocks)):
            blocks.add_metric([self._model_name, state], count)
        blocks.add_metric([self._model_name, "findable"], stats.num_findable_blocks)
        yield blocks
        yield self._group_blocks(stats.cache_groups)
        yield from speculation_figures(PREFIX, self._model_name, stats.speculation)
        counters = {
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            "prefix_cache_evictions": ("Cached blocks reused for other content.", stats.prefix_cache_evictions),
            "num_preemptions": ("Preemptions of samples.", stats.num_preemptions),
            "generation_tokens": ("Generated tokens.", stats.num_output_tokens),
            "steps": ("Steps.", stats.num_steps),
            "failed_steps": ("Steps that failed and were undone.", stats.num_failed_steps),
        } | tier_counters(stats.tiers)
        if stats.budget is not None:
            text = "Steps of twice or half of their predicted time."
            counters["step_cost_misses"] = (text, stats.budget.num_misses)
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter

    def _group_blocks(self, groups: tuple[CacheGroupStats, ...]) -> Metric:
        labels = ["model_name", "window", "chunk", "state"]
        blocks = GaugeMetricFamily(PREFIX + "kv_group_blocks", "KV blocks of each cache group by state.", labels=labels)
        for group in groups:
            window = str(group.window or "") if group.record_bytes is None else "state"  # recurrent: sees its latest
            sight = [self._model_name, window, str(group.chunk or "")]
            blocks.add_metric([*sight, "used"], group.num_used_blocks)
            blocks.add_metric([*sight, "free"], group.num_blocks - group.num_used_blocks)
            blocks.add_metric([*sight, "findable"], group.num_findable_blocks)
        return blocks


class ReplicaFigures(Collector):
    """Collector of metrics per replica; the engine's metrics are sums over replicas."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.replicas: list[ReplicaStatus] = []

    def collect(self) -> Iterator[Metric]:
        if not self.replicas:
            return
        labels = ["model_name", "replica"]
        restarts = CounterMetricFamily(PREFIX + "replica_restarts", "Times it was started again.", labels=labels)
        up = GaugeMetricFamily(PREFIX + "replica_up", "1 if it serves.", labels=labels)
        running = GaugeMetricFamily(PREFIX + "replica_requests_running", "Its running samples.", labels=labels)
        waiting = GaugeMetricFamily(PREFIX + "replica_requests_waiting", "Its waiting samples.", labels=labels)
        for replica in self.replicas:
            names = [self._model_name, str(replica.index)]
            restarts.add_metric(names, replica.num_restarts)
            up.add_metric(names, replica.state == "up")
            running.add_metric(names, replica.num_running)
            waiting.add_metric(names, replica.num_waiting)
        yield from (up, running, waiting, restarts)


class GapHistogram(Collector):
    """Histogram of ITL with weighted values: sequences of a step share one, and prometheus-client takes one at a time.

    Written in the engine thread; a concurrent reader may see part of a step.
    """

    def __init__(self, name: str, text: str, model_name: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._model_name = model_name
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # observations per bucket
        self._sum = 0.0

    def observe(self, seconds: float, count: int) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterator[Metric]:
        totals = accumulate(self._counts)
        labels = map(floatToGoString, (*self._bounds, math.inf))
        buckets = list(zip(labels, map(float, totals), strict=True))
        histogram = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        histogram.add_metric([self._model_name], buckets, self._sum)
        yield histogram


class RequestWatch:
    """Tracks the prompts of one answer until they finish or are abandoned.

    is_queued: the engine accepted them, so each one counts at the end.
    """

    def __init__(self, metrics: ServerMetrics, num_prompts: int) -> None:
        self.is_queued = False
        self._metrics = metrics
        self._arrival_time = time.monotonic()
        self._open: dict[int, RequestOutput | None] = dict.fromkeys(range(num_prompts))  # index -> last output

    def record(self, number: int, output: RequestOutput) -> None:
        """Record an output of prompt `number`."""
        if output.finished:
            self._open.pop(number, None)
            self._metrics.record_ended(output)
        else:
            self._open[number] = output

    def end(self, *, is_left: bool) -> None:
        """Record unfinished prompts as aborted; `is_left`: the client left, so prompts without an output count too."""
        if is_left or self.is_queued:
            seconds = time.monotonic() - self._arrival_time
            for output in self._open.values():
                self._metrics.record_left(output, seconds)
        self._open.clear()


class ServerMetrics:
    """Metrics of one server. Steps are recorded in the engine thread, everything else in the event loop."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._engine = EngineFigures(model_name)
        self._replicas = ReplicaFigures(model_name)
        self.registry.register(self._engine)
        self.registry.register(self._replicas)
        ProcessCollector(registry=self.registry)
        self._outcomes = Counter(
            PREFIX + "request_success", "Requests by finish reason.", ["model_name", "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        self._responses = Counter(
            PREFIX + "http_responses", "Responses by endpoint and HTTP status.", ["model_name", "endpoint", "status"],
            registry=self.registry,
        )  # fmt: skip
        labels = ["model_name", "key"]
        self._key_requests = Counter(
            PREFIX + "key_requests", "Requests by API key, and how they ended.", [*labels, "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        self._key_tokens = Counter(
            PREFIX + "key_tokens", "Tokens by API key and kind: prompt or generation.", [*labels, "kind"],
            registry=self.registry,
        )  # fmt: skip
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._ttft = self._histogram("time_to_first_token_seconds", "Time to first token (TTFT).", LATENCIES)
        itl_name = PREFIX + "inter_token_latency_seconds"
        self._itl = GapHistogram(itl_name, "Inter-token latency (ITL) of samples.", model_name, GAPS)
        self.registry.register(self._itl)
        self._queue_time = self._histogram(
            "request_queue_time_seconds", "Time from arrival to the first step.", LATENCIES
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "Time from arrival to the end of a request.", LATENCIES
        )
        self._prompt_lengths = self._histogram("request_prompt_tokens", "Prompt tokens per request.", TOKENS)
        self._output_lengths = self._histogram("request_generation_tokens", "Generated tokens per request.", TOKENS)
        self._step_time = self._histogram("step_time_seconds", "Time from a step's scheduling to its end.", GAPS)
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens computed per step.", TOKENS)
        self._step_sequences = self._histogram("step_sequences", "Samples per step.", TOKENS)
        tokens = Counter(
            PREFIX + "step_tokens", "Tokens of steps by kind: decode, prefill, or cached.",
            ["model_name", "kind"], registry=self.registry,
        )  # fmt: skip
        self._decode, self._prefill, self._cached = (
            tokens.labels(model_name, kind) for kind in ("decode", "prefill", "cached")
        )

    def _counter(self, name: str, text: str) -> Any:
        return Counter(PREFIX + name, text, ["model_name"], registry=self.registry).labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Any:
        histogram = Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return histogram.labels(self._model_name)

    def watch(self, num_prompts: int) -> RequestWatch:
        return RequestWatch(self, num_prompts)

    def on_step(self, record: StepRecord) -> None:
        self._step_time.observe(record.time - record.start_time)
        self._step_tokens.observe(record.num_decode_tokens + record.num_prefill_tokens)
        self._step_sequences.observe(record.num_sequences)
        self._decode.inc(record.num_decode_tokens)
        self._prefill.inc(record.num_prefill_tokens)
        self._cached.inc(record.num_cached_tokens)
        for ttft in record.request_ttfts:
            self._ttft.observe(ttft)
        for itl, num_tokens in record.itls:
            self._itl.observe(itl, num_tokens)

    def record_ended(self, output: RequestOutput) -> None:
        """Record a finished request, with the worst finish reason of its samples."""
        self._outcomes.labels(self._model_name, worst_reason(output)).inc()
        metrics = output.metrics
        self._prompt_tokens.inc(metrics.num_prompt_tokens)
        self._prompt_lengths.observe(metrics.num_prompt_tokens)
        self._output_lengths.observe(metrics.num_output_tokens)
        if metrics.queue_time is not None:
            self._queue_time.observe(metrics.queue_time)
        if metrics.finished_time is not None:
            self._latency.observe(metrics.finished_time - metrics.arrival_time)

    def record_of_key(self, facts: RequestFacts, request: NewRequest, output: RequestOutput | None) -> None:
        """Record an ended request, read or abandoned, for its key; called in the engine thread."""
        name = self._model_name, facts.key
        self._key_requests.labels(*name, worst_reason(output)).inc()
        self._key_tokens.labels(*name, "prompt").inc(len(request.prompt_token_ids))
        self._key_tokens.labels(*name, "generation").inc(output.metrics.num_output_tokens if output else 0)

    def describe_cache(self, config: EngineConfig) -> None:
        """Show the options of the KV cache as labels, under vLLM's names."""
        values = {
            "model_name": self._model_name,
            "block_size": config.block_size,
            "num_gpu_blocks": config.num_kv_blocks - 1,  # the null block holds nothing
            "cache_dtype": config.dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
        }
        text = "The KV cache of an engine, as labels."
        gauge = Gauge(PREFIX + "cache_config_info", text, list(values), registry=self.registry)
        gauge.labels(*map(str, values.values())).set(1)

    def record_left(self, output: RequestOutput | None, seconds: float) -> None:
        """Record an abandoned request with its last output and its seconds since arrival."""
        self._outcomes.labels(self._model_name, "abort").inc()
        self._latency.observe(seconds)
        if output is not None:
            self._prompt_tokens.inc(len(output.prompt_token_ids))

    def record_response(self, endpoint: str, status: int) -> None:
        self._responses.labels(self._model_name, endpoint, str(status)).inc()

    def text(self, heartbeat: Heartbeat, replicas: list[ReplicaStatus], *, is_stalled: bool) -> bytes:
        """Return all metrics in Prometheus' text format."""
        self._engine.heartbeat = heartbeat
        self._engine.is_stalled = is_stalled
        self._replicas.replicas = replicas
        return generate_latest(self.registry)


def worst_reason(output: RequestOutput | None) -> str:
    """The worst finish reason among the samples of a request's last output; "error" without one: the engine died."""
    reasons = {"error"} if output is None else {completion.finish_reason for completion in output.outputs}
    return next((reason for reason in REASONS if reason in reasons), "abort")


class CountResponses:
    """Middleware that counts responses by declared path and status."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        has_begun = False

        async def counted(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                self._record(scope, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            if not has_begun:  # the handler of this error is outside this middleware
                self._record(scope, 500)
            raise

    def _record(self, scope: Scope, status: int) -> None:
        route = scope.get("route")  # None for unknown paths, which share one label to bound the cardinality
        self._metrics.record_response(getattr(route, "path", "other"), status)
