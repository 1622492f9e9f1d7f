"""Replica: one engine in virtual time, its scheduler and block manager with a cost model as model runner.

The host's and the device's clocks advance as in `Engine.step`. With overlap on a GPU::

    host     schedule 1  launch 1  schedule 2  launch 2  waits ..  update 1  schedule 3  launch 3  waits ..  update 2
    device               [====== step 1 ==================][======= step 2 =====================][= step 3 ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, NamedTuple

from nanovllm.batch import ScheduledBatch
from nanovllm.features.composition.block_managers import build_block_manager
from nanovllm.features.costs.buckets import RowSizes
from nanovllm.features.costs.cost_model import CostModel, StepWork
from nanovllm.features.costs.learned_costs import LearnedCosts, relative_decode_cost, resolve_goal
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.engine_stats import EngineStats
from nanovllm.features.goals.auto_goal import follow_costs
from nanovllm.features.goals.step_budget import StepBudget
from nanovllm.features.groups.cache_pools import CacheGroup, CachePools
from nanovllm.features.policies.opening import set_policies
from nanovllm.features.prompt_hashes import num_leading_hits
from nanovllm.features.shares.client_queue import DECODE_COST, ClientQueue
from nanovllm.observability.step_records import OnStep, StepHook, StepObservers
from nanovllm.outputs import RequestMetrics
from nanovllm.responses import StepTimes
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Sequence

if TYPE_CHECKING:
    from nanovllm.tools.simulate.simulated_drafts import SimulatedDrafts

ONE_POOL = CachePools((CacheGroup(),), (0,))  # one group of full attention with all num_kv_blocks


class _Launched(NamedTuple):
    batch: ScheduledBatch
    num_samples: int
    times: StepTimes
    done: float  # arrival of its tokens


@dataclass(slots=True)
class _Request:
    """An unfinished request and the times of its tokens."""

    sequence: Sequence
    token_times: list[float] = field(default_factory=list)

    def metrics(self) -> RequestMetrics:
        """Return the metrics of the finished request; `finished_time` is the time of the last token."""
        times = self.token_times
        sequence = self.sequence
        itls = [after - before for before, after in pairwise(times)]
        return RequestMetrics(
            arrival_time=sequence.arrival_time,
            scheduled_time=sequence.scheduled_time,
            first_token_time=times[0],
            last_token_time=times[-1],
            finished_time=times[-1],
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            num_output_tokens=len(times),
            num_preemptions=sequence.num_preemptions,
            mean_itl=(times[-1] - times[0]) / len(itls) if itls else None,
            max_itl=max(itls, default=None),
            itls=itls,
        )


class Replica:
    """Steps like an engine: requests that arrive during a step are added before the next one.

    drafts: draws the tokens of steps, with speculation.

    Args:
        config: fully resolved options (limits and pool).
        draw_token: iterator of unique token ids, so that outputs share no prefixes.
        on_step: callback with the `StepRecord` of each step.
        pools: KV pools of the model's cache groups; by default one for full attention.
    """

    def __init__(
        self,
        config: EngineConfig,
        cost_model: CostModel,
        draw_token: Iterator[int],
        *,
        on_step: StepHook | None = None,
        pools: CachePools = ONE_POOL,
    ) -> None:
        self.now = 0.0  # the host's clock, in seconds
        self._groups = () if pools.is_one_full else pools.groups
        self.observers = StepObservers([] if on_step is None else [OnStep(on_step)])
        budget = None
        decode_cost = DECODE_COST
        cost = cost_model.step_cost(overlap=config.overlap)
        if config.itl_goal is not None or config.step_costs is not None:  # an engine without them has no costs, either
            decode_cost = relative_decode_cost(cost, config)
        if config.itl_goal is not None:
            costs = LearnedCosts(config, self._groups, cost)
            asked = config
            config = resolve_goal(config, costs.block_seconds)
            budget = StepBudget(config, costs, lambda: self.now)
            follow_costs(asked, budget, costs)
            self.observers.append(costs)
            self.observers.predict = costs.predicted
        self.config = config
        block_manager = build_block_manager(config, pools)
        queue = ClientQueue(config, block_manager, decode_cost=decode_cost)
        self.scheduler = Scheduler(config, block_manager, budget, queue)
        if config.policies:
            set_policies(self.scheduler, lambda: self.now)
        self._cost_model = cost_model
        self._sizes = RowSizes.from_config(config)
        self._draw_token = draw_token
        self._device_free = 0.0
        self._in_flight: deque[_Launched] = deque()
        self._requests: dict[str, _Request] = {}
        self.drafts: SimulatedDrafts | None = None

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    def num_hits(self, hashes: AnySequence[bytes]) -> int:
        """Blocks of a prompt in the prefix cache; with the queues this makes it a `ReplicaView`."""
        return num_leading_hits(hashes, self.scheduler.block_manager.entries)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def add(self, sequence: Sequence, now: float) -> None:
        """Add a request that arrives at the time `now`."""
        if not self._requests:
            self.now = max(self.now, now)
        self.now += self._cost_model.intake.seconds(sequence.num_prompt_tokens)
        self._requests[sequence.request_id] = _Request(sequence)
        self.scheduler.add(sequence)

    def step(self) -> dict[str, RequestMetrics]:
        """Launch a batch and read the oldest in flight, like `Engine.step`; returns the finished requests."""
        start = self.now
        batch = self.scheduler.schedule()
        if batch is not None:
            self._launch(batch, start)
            if self.config.overlap and len(self._in_flight) == 1:
                return {}
        if not self._in_flight:
            raise RuntimeError("unfinished requests, but no step is scheduled or in flight")
        return self._read()

    def _launch(self, batch: ScheduledBatch, start: float) -> None:
        work = StepWork.from_batch(batch, self.config.block_size, self._sizes, self._groups)
        cost_model = self._cost_model
        schedule_time = cost_model.schedule.seconds(work.num_sequences, work.num_chunks)
        scheduled = start + schedule_time
        launch_time = cost_model.launch.seconds(work.num_sequences, work.num_chunks)
        launched = self.now = scheduled + launch_time
        device_begins = max(launched, self._device_free + min(cost_model.head_start, launch_time))
        done = self._device_free = device_begins + cost_model.device.seconds(work)
        if cost_model.launch_blocks:
            self.now = done
        times = StepTimes(start, schedule_time, self.now - scheduled)
        self._in_flight.append(_Launched(batch, work.num_samples, times, done))
        for entry in batch.prefills:
            if entry.sequence.scheduled_time is None:
                entry.sequence.scheduled_time = start

    def _read(self) -> dict[str, RequestMetrics]:
        batch, num_samples, times, done = self._in_flight.popleft()
        waits = self.now
        times.read_time = max(waits, done)
        times.wait_time = times.read_time - waits
        drawn = islice(self._draw_token, num_samples) if self.drafts is None else self.drafts.draws(batch)
        advanced = self.scheduler.update(batch, [*drawn])
        update_time = self._cost_model.update.seconds(len(batch.entries), len(batch.prefills))
        self.now = now = times.delivered_time = times.read_time + update_time
        ended = {}
        for sequence in advanced:
            request = self._requests[sequence.request_id]
            while len(request.token_times) < sequence.num_output_tokens:
                request.token_times.append(now)
                if len(request.token_times) == 1:
                    times.tokens.ttfts.append(now - sequence.arrival_time)
                    times.tokens.request_ttfts.append(times.tokens.ttfts[-1])
                else:
                    times.tokens.itls[now - request.token_times[-2]] += 1
            if sequence.is_finished:
                ended[sequence.request_id] = request.metrics()
                del self._requests[sequence.request_id]
        self.observers.step_ended(self.scheduler, batch, times, now, advanced)
        if not self._requests and self._in_flight:
            self.scheduler.rollback(self._in_flight[0].batch, has_failed=False)
            self._in_flight.clear()
        return ended

    def stats(self) -> EngineStats:
        return self.observers.stats(self.scheduler)
