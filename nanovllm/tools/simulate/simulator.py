"""Simulator: replays a workload in virtual time on one or more replicas, without a model or a device.

Scheduling, prefix caching and preemption are the engine's own code on the workload's token ids. Step times come from
`features/costs/cost_model.py`, and output tokens are ids outside any vocabulary. Nothing here imports torch.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from nanovllm.features.costs.cost_model import CostModel
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.engine_stats import EngineStats
from nanovllm.features.groups.block_checks import check_scheduler
from nanovllm.features.groups.cache_pools import CachePools
from nanovllm.features.policies.opening import check_policies
from nanovllm.features.prompt_hashes import PromptHashes
from nanovllm.features.refusals import check_one_process
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.observability.percentiles import percentiles
from nanovllm.observability.step_records import StepRecord
from nanovllm.outputs import RequestMetrics
from nanovllm.sequence import NewRequest
from nanovllm.sequence import Sequence as RequestSequence
from nanovllm.serving.replicas.routing import Route, round_robin
from nanovllm.tools.simulate.indexed_replica import IndexedReplica
from nanovllm.tools.simulate.replica import ONE_POOL, Replica
from nanovllm.tools.workloads.workloads import TimedRequest, Workload

# Lowest id of output tokens, above any vocabulary.
FIRST_DRAWN_TOKEN = 2**24


@dataclass(frozen=True, slots=True)
class Simulation:
    """Result of a simulation. Times are virtual seconds since its start.

    requests: metrics of the requests with all `itls`, in the order of the workload.
    replica_of: index of the replica that served each request.
    stats: final counters of each replica.
    steps: step records of each replica; empty without `keep_steps`.
    """

    workload: Workload
    requests: list[RequestMetrics]
    replica_of: list[int]
    stats: list[EngineStats]
    steps: list[list[StepRecord]]

    def figures(self) -> dict[str, Any]:
        return figures(self.requests, self.stats)


def simulate(
    workload: Workload,
    config: EngineConfig,
    cost_model: CostModel,
    *,
    num_replicas: int = 1,
    route: Route | None = None,
    keep_steps: bool = False,
    index_delay: int | None = None,
    pools: CachePools = ONE_POOL,
) -> Simulation:
    """Simulate a workload to its end.

    Args:
        config: fully resolved options, the same for every replica.
        route: assigns a replica to each arriving request; None: round robin.
        keep_steps: keep a `StepRecord` of every step.
        index_delay: steps until a router sees a change of a replica's prefix cache, see `IndexedReplica`; None: at
            once.
        pools: KV pools of the model's cache groups, see `Calibration.pools`; by default one for full attention.

    A router sees the queues of a replica as of the end of its current step.

    Raises ValueError with the index of a request that the engine would refuse.
    """
    check_one_process("nanovllm simulate", {"data_parallel_size": config.data_parallel_size})
    _check_options(config, cost_model, num_replicas, index_delay)
    _check_drafts(config, workload.draft_acceptance)
    check_policies(config)
    if not workload.requests:
        raise ValueError("the workload has no requests.")
    for number, request in enumerate(workload.requests):
        _check(number, request, config.max_model_len)
    drawn = count(FIRST_DRAWN_TOKEN)
    steps: list[list[StepRecord]] = [[] for _ in range(num_replicas)]
    make = Replica if index_delay is None else partial(IndexedReplica, delay=index_delay)
    hooks = [records.append if keep_steps else None for records in steps]
    replicas = [make(config, cost_model, drawn, on_step=hook, pools=pools) for hook in hooks]
    if workload.draft_acceptance is not None:
        from nanovllm.tools.simulate.simulated_drafts import SimulatedDrafts

        for replica in replicas:
            replica.drafts = SimulatedDrafts(
                replica.scheduler, config, replica.observers, workload.draft_acceptance, drawn
            )
    run = _Run(workload.requests, replicas, route or round_robin(), cost_model.front_delay)
    run.to_its_end()
    metrics = [run.metrics[number] for number in range(len(workload.requests))]
    replica_of = [run.replica_of[number] for number in range(len(workload.requests))]
    return Simulation(workload, metrics, replica_of, [replica.stats() for replica in replicas], steps)


class _Run:
    """Event loop over arrivals and steps of all replicas in time order; at equal times arrivals come first."""

    def __init__(self, requests: list[TimedRequest], replicas: list[Replica], route: Route, front_delay: float) -> None:
        self.metrics: dict[int, RequestMetrics] = {}  # metrics by index, once the request has finished
        self.replica_of: dict[int, int] = {}
        self._requests = requests
        self._replicas = replicas
        self._route = route
        self._front_delay = front_delay
        self._num_arrived = 0
        self._followers: defaultdict[int, list[int]] = defaultdict(list)  # indexes of requests by their `after`
        self._arrivals: list[tuple[float, int, float]] = []  # heap of (time at the engine, index, arrival)
        self._begins: list[tuple[float, int]] = []  # heap of (start of the next step, replica) of busy replicas
        for number, request in enumerate(requests):
            if request.after is None:
                self._arrivals.append((request.arrival + front_delay, number, request.arrival))
            else:
                self._followers[request.after].append(number)
        heapq.heapify(self._arrivals)

    def to_its_end(self) -> None:
        arrivals = self._arrivals
        begins = self._begins
        while arrivals or begins:
            if arrivals and (not begins or arrivals[0][0] <= begins[0][0]):
                self._arrive(*heapq.heappop(arrivals))
            else:
                self._step(heapq.heappop(begins)[1])
        for replica in self._replicas:
            check_scheduler(replica.scheduler)

    def _arrive(self, time: float, number: int, arrival: float) -> None:
        config = self._replicas[0].config
        sequence = _sequence(number, self._requests[number], arrival, self._num_arrived, config.max_model_len)
        self._num_arrived += 1
        hashes = PromptHashes(
            sequence.token_ids, config.block_size, cache_salt=sequence.cache_salt, known=sequence.block_hashes
        )
        index = self.replica_of[number] = self._route(hashes, self._replicas)
        replica = self._replicas[index]
        if not replica.has_unfinished:
            heapq.heappush(self._begins, (max(replica.now, time), index))
        replica.add(sequence, time)

    def _step(self, index: int) -> None:
        replica = self._replicas[index]
        for request_id, metrics in replica.step().items():
            number = int(request_id)
            self.metrics[number] = metrics
            for follower in self._followers[number]:
                arrival = replica.now + self._requests[follower].arrival
                heapq.heappush(self._arrivals, (arrival + self._front_delay, follower, arrival))
        if replica.has_unfinished:
            heapq.heappush(self._begins, (replica.now, index))


def _check_options(config: EngineConfig, cost_model: CostModel, num_replicas: int, index_delay: int | None) -> None:
    if config.max_queue is not None:
        raise ValueError(
            f"max_queue is {config.max_queue}, but retries of refused requests are not simulated. Leave max_queue out."
        )
    if num_replicas < 1:
        raise ValueError(f"num_replicas is {num_replicas}; it must be at least 1.")
    if index_delay is not None and index_delay < 0:
        raise ValueError(f"index_delay is {index_delay}; it must be at least 0 steps.")
    if not (math.isfinite(cost_model.front_delay) and cost_model.front_delay >= 0.0):
        raise ValueError(f"front_delay is {cost_model.front_delay}; it must be 0 seconds or more.")


def _check_drafts(config: EngineConfig, acceptance: float | None) -> None:
    if config.speculation is not None and acceptance is None:
        raise ValueError(
            f"speculation is {config.speculation!r}, but a simulation has no text to draft from. Pass "
            "--draft-acceptance: num_accepted_tokens by num_draft_tokens of a run's statistics."
        )
    if config.speculation is None and acceptance is not None:
        raise ValueError(
            f"draft_acceptance is {acceptance:g}, but without speculation nothing is drafted. "
            "Set speculation, or leave it out."
        )


def _check(number: int, request: TimedRequest, max_model_len: int) -> None:
    prompt = request.prompt_token_ids
    num_output_tokens = request.num_output_tokens
    if not prompt or num_output_tokens < 1:
        raise ValueError(
            f"request {number} has {len(prompt)} prompt tokens and {num_output_tokens} output tokens; it needs at "
            "least one of each."
        )
    if len(prompt) + num_output_tokens > max_model_len:
        raise ValueError(
            f"request {number} has {len(prompt)} prompt tokens and {num_output_tokens} output tokens, more than "
            f"max_model_len ({max_model_len}). Shorten it, or raise max_model_len if the model allows."
        )
    if min(prompt) < 0 or max(prompt) >= FIRST_DRAWN_TOKEN:
        raise ValueError(f"request {number} holds a token id outside 0 to {FIRST_DRAWN_TOKEN - 1}.")
    if not (math.isfinite(request.arrival) and request.arrival >= 0.0):
        raise ValueError(f"request {number} arrives at {request.arrival} s; it must be 0 or later.")
    if request.after is not None and not 0 <= request.after < number:
        raise ValueError(f"request {number} waits for request {request.after}, which is not an earlier one.")


def _sequence(number: int, request: TimedRequest, time: float, arrival: int, max_model_len: int) -> RequestSequence:
    new = NewRequest(
        str(number),
        request.prompt_token_ids,
        SamplingParams(temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True),
        priority=request.priority,
        cache_salt=request.cache_salt,
        client=request.client,
        arrival_time=time,
    )
    return RequestSequence(new, arrival=arrival, max_model_len=max_model_len)


# ----------------------------------------------------------------------------------------------------------- figures


def figures(requests: Sequence[RequestMetrics], stats: Iterable[EngineStats]) -> dict[str, Any]:
    """Return the figures of a run, simulated or real, from its requests (with `itls`) and its engines' counters.

    seconds: time from the first arrival to the last token.
    ttft, itl: `percentiles` over all requests, and over all inter-token latencies, in seconds.
    hit_rate: prefix cache hits / queries, in tokens; None without queries.
    """
    stats = list(stats)
    ends = [m.finished_time for m in requests if m.finished_time is not None]
    seconds = max(ends) - min(m.arrival_time for m in requests)
    num_output_tokens = sum(m.num_output_tokens for m in requests)
    queries = sum(engine.prefix_cache_queries for engine in stats)
    hits = sum(engine.prefix_cache_hits for engine in stats)
    return {
        "num_requests": len(requests),
        "num_prompt_tokens": sum(m.num_prompt_tokens for m in requests),
        "num_output_tokens": num_output_tokens,
        "seconds": seconds,
        "output_tokens_per_second": num_output_tokens / seconds,
        "steps": sum(engine.num_steps for engine in stats),
        "ttft": percentiles(m.ttft for m in requests if m.ttft is not None),
        "itl": percentiles(itl for m in requests for itl in m.itls or ()),
        "cached_tokens": hits,
        "hit_rate": hits / queries if queries else None,
        "preemptions": sum(engine.num_preemptions for engine in stats),
        "evictions": sum(engine.prefix_cache_evictions for engine in stats),
    }


def report(result: dict[str, Any]) -> str:
    """Format the result of `figures` as text, with its "interval" and "utilisation" if it has them."""
    within = ""
    if (interval := result.get("interval")) is not None:
        bounds = f"{interval['low']:.0f} to {interval['high']:.0f}"
        within = f" (± {interval['relative']:.1%}, the p90 of the fit: {bounds})"
    load = "" if result.get("utilisation") is None else f"; utilisation {result['utilisation']:.2f}"
    lines = [
        f"{result['num_requests']} requests, {result['num_prompt_tokens']} tokens in, "
        f"{result['num_output_tokens']} out",
        f"{result['output_tokens_per_second']:.0f} output tokens/s{within}; {result['steps']} steps in "
        f"{result['seconds']:.2f} s{load}",
        f"{'ms':<24}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}",
    ]
    for name, title in (("ttft", "TTFT"), ("itl", "ITL")):
        if (latency := result[name]) is not None:
            columns = (f"{1e3 * latency[key]:>10.1f}" for key in ("mean", "p50", "p90", "p99"))
            lines.append(f"{title:<24}" + "".join(columns))
    rate = "" if result["hit_rate"] is None else f" ({result['hit_rate']:.0%})"
    lines.append(
        f"{result['cached_tokens']} prompt tokens from the prefix cache{rate}; {result['preemptions']} preemptions"
    )
    return "\n".join(lines)
