"""Pool of replicas: has the interface of an engine, and runs the steps in other processes.

::

    add ──▶ route ──▶ replica 0 ──▶ outputs ─┐
                ╰───▶ replica 1 ──▶ outputs ─┴─▶ step: handle the reports
                        died: its requests resume in replica 0, with their tokens so far

Invariant: an unfinished request is placed in exactly one replica that is up, or waits in `_waiting`; outputs of earlier
placements are dropped. So every token reaches its reader exactly once.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sortedcontainers import SortedList

from nanovllm.config import text
from nanovllm.errors import EngineDeadError, ForkedChildError, QueueFullError, StepError
from nanovllm.features.adapters.loading import Adapter
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.engine_stats import EngineStats, ReplicaStatus
from nanovllm.features.prompt_hashes import PromptHashes
from nanovllm.features.refusals import RANKS_OF_REPLICAS, TENSOR_PARALLEL, refuse
from nanovllm.features.updates.sleeping import refuse_call
from nanovllm.observability.step_records import StepObservers, StepRecord
from nanovllm.outputs import FinishReason, RequestOutput
from nanovllm.requests import InputProcessor
from nanovllm.sampling_params import sample_seeds
from nanovllm.sequence import NewRequest
from nanovllm.serving.replicas.messages import (
    Abort,
    Add,
    Refused,
    Report,
    ResetCache,
    SentOutput,
    SentRequest,
    check_params,
)
from nanovllm.serving.replicas.pool_adapters import PoolAdapters
from nanovllm.serving.replicas.pool_request import PoolRequest
from nanovllm.serving.replicas.pool_stats import PoolStats, goals_in_force
from nanovllm.serving.replicas.pool_updates import PoolUpdates
from nanovllm.serving.replicas.replica_queue import FleetInterface, ReplicaQueue
from nanovllm.serving.replicas.routing import Route
from nanovllm.serving.replicas.waiting import WaitingRequests, may_have_run

logger = logging.getLogger("nanovllm")

# Maximum wait of a step for messages, in seconds: bounds the delay of deadlines, restarts and Ctrl-C.
WAIT_SECONDS = 0.1
# Replicas end overdue requests; after this many seconds the front does, since a replica may be stopped or slow.
GRACE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class PoolParts:
    """Everything a ReplicaPool is built from, except its replicas.

    config: config of one replica, with the smallest limits of all.
    input_processor: makes the requests for `add`.
    expects_prefixes: True if the prefix indexes include blocks expected from requests in flight.
    """

    config: EngineConfig
    input_processor: InputProcessor
    tokenizer: Any
    hash_seed: str
    expects_prefixes: bool


def sends_block_events(config: EngineConfig) -> bool:
    """Whether routing depends on the replicas' cached prefixes."""
    is_routed = config.data_parallel_size > 1 and config.routing in (None, "prefix-aware")
    return is_routed and config.enable_prefix_caching


class ReplicaPool:
    """Several engines of one model with the interface of one. Not thread-safe, except `wake` and `tend`.

    Args:
        fleet: replicas, all of them up.
        route: chooses among the replicas that are up.
    """

    def __init__(self, fleet: FleetInterface, parts: PoolParts, route: Route) -> None:
        self.config = parts.config
        self.input_processor = parts.input_processor
        self.tokenizer = parts.tokenizer
        self.input_processor.parts.goals = partial(goals_in_force, fleet.replicas, parts.config)
        self.clock = time.monotonic
        self.observers = StepObservers()
        self.outputs: deque[RequestOutput] = deque()
        self.requests: dict[str, PoolRequest] = {}
        self.wake = fleet.wake
        self.replicas = fleet.replicas
        self.when_failed = None
        self._fleet = fleet
        self._parts = parts
        self._route = route
        self._adapters = PoolAdapters(fleet)
        self.updates = PoolUpdates(fleet, self._wait_and_advance)
        self._waiting = WaitingRequests()  # requests without a replica
        self._moved: list[PoolRequest] = []  # requests of replicas that died in this step
        self._deadlines: SortedList = SortedList()  # (deadline, request id)
        self._num_unfinished = 0  # samples
        self._numbers, self._placements, self._step_ids = itertools.count(), itertools.count(), itertools.count(1)
        self._stats = PoolStats()
        self._death: BaseException | None = None
        self._process_id = os.getpid()
        self._records: list[StepRecord] = []  # not yet passed to observers
        self._lock = threading.RLock()  # `tend` runs in another thread than the owner's steps
        self._is_closed = False

    # ------------------------------------------------------------------------------------------------- requests

    def check_queue(self, count: int) -> None:
        """Check the queue like `Engine.check_queue`, with max_num_seqs of all replicas."""
        limit = self.config.max_queue
        num_replicas = self.config.data_parallel_size
        max_running = self.config.max_num_seqs * num_replicas
        if limit is not None and self._num_unfinished + count > max_running + limit:
            raise QueueFullError(
                f"{self._num_unfinished} requests (each sample counted) are unfinished; with {count} more there would "
                f"be more than {num_replicas} x max_num_seqs ({max_running}) to run and max_queue ({limit}) to wait. "
                "Try again later, or raise max_queue."
            )

    def add(self, *requests: NewRequest) -> None:
        """Route requests, all or none; raises like `Engine.add`."""
        self.check_alive()
        if self.asleep is not None:
            refuse_call()
        self.check_queue(sum(request.params.n for request in requests))
        ids = Counter(request.request_id for request in requests)
        for request_id, count in ids.items():
            if count > 1 or request_id in self.requests:
                raise ValueError(f"a request with id {request_id!r} is running already; ids must be unique.")
        for new in requests:
            check_params(new.params)
            text("request_id", new.request_id)  # refuses lone surrogates, which cannot be sent
            text("cache_salt", new.cache_salt or "")
            text("client", new.client)
        added = [PoolRequest(self._with_seed(new, next(self._numbers))) for new in requests]
        with self._lock:
            for request in added:
                self.requests[request.new.request_id] = request
                self._num_unfinished += request.new.params.n
                if request.deadline is not None:
                    self._deadlines.add((request.deadline, request.new.request_id))
            self._place(added)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Abort a request like `Engine.abort`, without waiting for its replica."""
        with self._lock:
            request = self.requests.get(request_id)
            return None if request is None else self._end(request, "abort")

    def fail(self, failure: StepError, num_failed_steps: int) -> None:
        """Raise the failure; replicas handle failed steps themselves, see `Engine.fail`."""
        raise failure

    def _with_seed(self, new: NewRequest, number: int) -> NewRequest:
        """Set the seed that a single engine would choose, so that every replica samples the same tokens."""
        if new.params.seed is not None or new.params.embeds:
            return new
        (seed,) = sample_seeds(None, 1, engine_seed=self.config.seed, request_number=number)
        return replace(new, params=replace(new.params, seed=seed))

    def _place(self, requests: Sequence[PoolRequest]) -> None:
        """Send the admitted ones of these and the waiting requests to replicas."""
        up = self._fleet.up
        sent: dict[ReplicaQueue, list[SentRequest]] = {}
        for request in self._waiting.admit(requests, has_replica=bool(up)):
            new = request.new
            placement = next(self._placements)
            hashes = PromptHashes(
                new.prompt_token_ids,
                self.config.block_size,
                hash_seed=self._parts.hash_seed,
                cache_salt=new.cache_salt,
            )
            replica = up[self._route(hashes, up)]
            is_moved = request.placement >= 0
            resumed = request.resumed(num_preemptions=1) if is_moved else None
            replica.place(request, placement)
            if self._parts.expects_prefixes:
                replica.prefixes.expect(new.request_id, hashes)
            sent.setdefault(replica, []).append(SentRequest.from_new(new, placement, resumed))
        for replica, group in sent.items():
            self._fleet.send(replica, Add(group))

    def _end(self, request: PoolRequest, reason: FinishReason, error: str | None = None) -> RequestOutput:
        """End a request in the front, and abort it in its replica."""
        if request.replica is not None:
            replica = self.replicas[request.replica]
            self._fleet.send(replica, Abort(request.new.request_id, request.placement))
        self._waiting.discard(request)
        self._forget(request)
        return request.end(reason, self.clock(), self.input_processor, error)

    def _forget(self, request: PoolRequest) -> None:
        del self.requests[request.new.request_id]
        request.is_ended = True
        self._num_unfinished -= request.new.params.n
        if request.deadline is not None:
            self._deadlines.remove((request.deadline, request.new.request_id))
        if request.replica is not None:
            self.replicas[request.replica].remove(request)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    # ----------------------------------------------------------------------------------------------------- step

    def step(self) -> None:
        """Wait briefly for reports and handle them; bury dead replicas and restart them.

        Appends to `outputs` like `Engine.step`. Raises EngineDeadError once every replica has failed for good.
        """
        self.check_alive()
        with self._lock:
            self._fleet.wait(0.0 if self.outputs else WAIT_SECONDS)
            self._advance()
        records = self._records
        self._records = []
        for record in records:
            record = replace(record, step_id=next(self._step_ids))  # step ids of several replicas would repeat
            self.observers.notify("step_ended", record, None)

    def tend(self) -> bool:
        """Bury and restart replicas while the pool is idle; returns False once it has ended. Any thread may call it."""
        if not self._lock.acquire(blocking=False):
            return True  # the owner's thread is stepping
        try:
            if self._is_closed or self.is_dead:
                return False
            if not self.requests:
                self._advance()
        except EngineDeadError:  # the next call raises it
            return False
        finally:
            self._lock.release()
        return True

    def _wait_and_advance(self) -> None:
        self._fleet.wait(WAIT_SECONDS)
        self._advance()

    def _advance(self) -> None:
        try:
            for replica, message in self._fleet.listen():
                if isinstance(message, Report):
                    self._handle_report(replica, message)
                elif isinstance(message, Refused):
                    self._end_refused(replica, message)
                elif message is None:
                    self._bury(replica)
                else:
                    self.updates.handle(replica, message)
                    self._adapters.handle(replica, message)
            self._end_overdue()
            self._bury_stalled()
            self._fleet.restart()
            self._adapters.drop_unused()
            if self._moved or self._waiting.may_admit:
                moved = self._moved  # all deaths of this step are known here
                self._moved = []
                self._place([request for request in moved if not request.is_ended])
        except BaseException as error:  # such as a second Ctrl-C: received reports may be lost
            self._death = self._death or RuntimeError(f"a step was cut off by {error!r}")
            raise
        if self._fleet.has_failed:
            self._death = RuntimeError(f"all {len(self.replicas)} replicas died again and again")
            self.check_alive()

    def _bury_stalled(self) -> None:
        rests = self.updates.is_paused or self.asleep is not None
        for replica in self._fleet.stalled():
            self._bury(replica)
        for replica in self.replicas if rests else ():
            replica.silence = 0.0  # no step is expected of it

    def use_idle_time(self, *, captures: bool) -> bool:
        """Step once, to watch the replicas; returns True: watching never ends."""
        self.step()
        return True

    def _handle_report(self, replica: ReplicaQueue, report: Report) -> None:
        replica.stats = report.stats
        replica.prefixes.apply(report.block_events)
        for sent in report.outputs:
            self._deliver(replica, sent)
        if (tokens := report.tokens) is not None:
            rows = zip(tokens.placements, tokens.texts, tokens.token_ids, strict=True)
            for placement, text, token_id in rows:
                if (request := replica.requests.get(placement)) is not None:  # an aborted request is not there
                    self.outputs.append(request.record_token(text, token_id, tokens.time))
        self._records += report.records

    def _deliver(self, replica: ReplicaQueue, sent: SentOutput) -> None:
        request = replica.requests.get(sent.placement)
        if request is None:  # it was aborted, or its deadline ended it
            return
        output = request.record(sent)
        replica.prefixes.settle(sent.request_id)  # its prompt is cached
        if sent.finished:
            self._forget(request)
        if output is not None:
            self.outputs.append(output)

    def _end_refused(self, replica: ReplicaQueue, refused: Refused) -> None:
        if (request := replica.requests.get(refused.placement)) is not None:  # it was not aborted meanwhile
            self.outputs.append(self._end(request, "error", refused.error))

    def _end_overdue(self) -> None:
        overdue = self.clock() - GRACE_SECONDS
        while self._deadlines and self._deadlines[0][0] <= overdue:
            self.outputs.append(self._end(self.requests[self._deadlines[0][1]], "timeout"))

    def _bury(self, replica: ReplicaQueue) -> None:
        """Remove a dead replica; its requests move, except a suspect that has killed too many replicas."""
        self._fleet.drop(replica)
        self.updates.handle(replica, None)
        self._adapters.handle(replica, None)
        self._stats.keep(replica.stats)
        orphans = replica.bury(self.clock())
        ages = bool(self.config.priority_ageing_s)
        suspects = set(may_have_run(orphans, replica.max_num_seqs, ages=ages))
        for request in orphans:
            if request not in suspects or (error := request.note_death()) is None:
                self._moved.append(request)
            else:
                self.outputs.append(self._end(request, "error", error))

    # ---------------------------------------------------------------------------------------------------- state

    def reset_prefix_cache(self) -> None:
        """Reset the prefix cache of every replica, see `Engine.reset_prefix_cache`."""
        self.check_alive()
        with self._lock:
            for replica in self.replicas:
                self._fleet.send(replica, ResetCache())

    def load_adapter(self, name: str, path: Any) -> Adapter:
        """Load an adapter in every replica, or in none; other requests go on meanwhile.

        The replicas keep it while the returned object, its name or an unfinished request refers to it.

        Raises ValueError if a replica cannot load it.
        """
        self.check_alive()
        with self._lock:
            adapter = self._adapters.load(name, path, self._wait_and_advance)
        self.input_processor.parts.adapters[name] = adapter
        return adapter

    def unload_adapter(self, name: str) -> None:
        """Forget a name; requests that were queued with its adapter end with it."""
        adapters = self.input_processor.parts.adapters
        if name not in adapters:
            raise ValueError(f"no adapter is named {name!r}; loaded are: {', '.join(sorted(adapters)) or 'none'}.")
        del adapters[name]

    def change(self, call: str, *arguments: Any, **options: Any) -> None:
        """Call a method of `PoolUpdates`, for every replica; other requests go on meanwhile."""
        self.check_alive()
        if self.config.tensor_parallel_size > 1 and call in ("update_weights", "sleep", "wake"):
            refuse(call, TENSOR_PARALLEL, RANKS_OF_REPLICAS)
        with self._lock:
            getattr(self.updates, call)(*arguments, **options)

    @property
    def asleep(self) -> int | None:
        """Level of the replicas' sleep; None while they are awake."""
        return self.updates.level

    def drop_computed(self) -> None:
        """Raise ValueError: weights in another process cannot have been edited."""
        refuse("weights_changed", "data_parallel_size")

    def stats(self) -> EngineStats:
        """Sums over the replicas' last reports, with counters of dead replicas; queue lengths are exact."""
        if os.getpid() != self._process_id:
            raise ForkedChildError("ReplicaPool", self._process_id)
        self.tend()  # no step reads the report that follows an abort
        num_running = sum(replica.num_running for replica in self.replicas)
        return self._stats.total(
            [replica.stats for replica in self.replicas if replica.stats is not None],
            num_running=num_running,
            num_waiting=self._num_unfinished - num_running,
            hook_error=self.observers.error,
        )

    def num_output_tokens(self) -> int:
        return self.stats().num_output_tokens

    @property
    def statuses(self) -> list[ReplicaStatus]:
        return self._fleet.statuses

    @property
    def is_dead(self) -> bool:
        return self._death is not None

    def check_alive(self) -> None:
        """Raise EngineDeadError if every replica has failed for good, ForkedChildError in a forked child."""
        if os.getpid() != self._process_id:
            raise ForkedChildError("ReplicaPool", self._process_id)
        if self._death is not None:
            raise EngineDeadError(f"these replicas are dead ({self._death}); build new ones.") from self._death

    def close(self) -> None:
        """End all requests and processes; does nothing in a forked child."""
        if os.getpid() != self._process_id:
            return
        with self._lock:
            self._is_closed = True
            self.updates.images.clear()
            for books in (self.requests, self._waiting, self._deadlines, self.outputs):
                books.clear()
            self._fleet.close()
