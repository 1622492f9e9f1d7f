"""Replica with a prefix index built from block events, as in the front of several engine processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as AnySequence

from nanovllm.batch import ScheduledBatch
from nanovllm.features.costs.cost_model import CostModel
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.groups.cache_pools import CachePools
from nanovllm.features.kv_events.block_events import BlockEvent, BlockEvents
from nanovllm.features.prompt_hashes import PromptHashes
from nanovllm.observability.step_records import Observer, StepHook, StepRecord
from nanovllm.sequence import Sequence
from nanovllm.serving.replicas.prefix_index import PrefixIndex, encode
from nanovllm.tools.simulate.replica import ONE_POOL, Replica


class IndexedReplica(Replica):
    """Replica with a stale prefix index: block events and first tokens reach it `delay` steps late."""

    def __init__(
        self,
        config: EngineConfig,
        cost_model: CostModel,
        draw_token: Iterator[int],
        *,
        on_step: StepHook | None = None,
        pools: CachePools = ONE_POOL,
        delay: int = 0,
    ) -> None:
        super().__init__(config, cost_model, draw_token, on_step=on_step, pools=pools)
        self._index = PrefixIndex()
        late = _Late(self._index, delay)
        BlockEvents.follow(self.scheduler.block_manager, self.observers, late.add_events)
        self.observers.append(late)

    def num_hits(self, hashes: AnySequence[bytes]) -> int:
        return self._index.num_hits(hashes)

    def add(self, sequence: Sequence, now: float) -> None:
        hashes = PromptHashes(
            sequence.token_ids, self.config.block_size, cache_salt=sequence.cache_salt, known=sequence.block_hashes
        )
        if self.config.enable_prefix_caching:
            self._index.expect(sequence.request_id, hashes)
        super().add(sequence, now)


class _Late(Observer):
    """Events of the last steps, on their way to the index."""

    def __init__(self, index: PrefixIndex, delay: int) -> None:
        self._index = index
        self._delay = delay
        self._events: list[BlockEvent] = []  # events since the last step
        self._reports: deque[tuple[bytes, list[str]]] = deque()  # events and sampled request ids of each step

    def add_events(self, events: list[BlockEvent]) -> None:
        self._events += events

    def step_ended(self, record: StepRecord, batch: ScheduledBatch) -> None:
        self._reports.append((encode(self._events), [sequence.request_id for sequence in batch.sampling]))
        self._events = []
        while len(self._reports) > self._delay:
            events, request_ids = self._reports.popleft()
            self._index.apply(events)
            for request_id in request_ids:
                self._index.settle(request_id)
