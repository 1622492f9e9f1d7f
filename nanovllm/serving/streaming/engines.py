"""Interface of engines for `LLM` and `AsyncLLM`: an `Engine` in this process, or a `ReplicaPool`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from nanovllm.errors import DeviceError, StepError
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.engine_stats import EngineStats, ReplicaStatus
from nanovllm.outputs import RequestOutput
from nanovllm.requests import InputProcessor
from nanovllm.sequence import NewRequest


class EngineInterface(Protocol):
    """Interface of an engine; `Engine` documents the methods and their errors."""

    config: EngineConfig
    input_processor: InputProcessor
    tokenizer: Any
    observers: Any  # see `EngineObservers`
    clock: Callable[[], float]
    outputs: deque[RequestOutput]

    @property
    def wake(self) -> Callable[[], None] | None:
        """Function that ends a step's wait for messages, callable from any thread; None if steps never wait."""

    @property
    def when_failed(self) -> Callable[[Callable[[DeviceError], None]], None] | None:
        """Function that registers a callback for failures between steps, called in any thread; None if unsupported."""

    @property
    def statuses(self) -> Sequence[ReplicaStatus]: ...

    @property
    def requests(self) -> Mapping[str, Any]: ...

    @property
    def has_unfinished(self) -> bool: ...

    @property
    def is_dead(self) -> bool: ...

    def check_queue(self, count: int) -> None: ...

    def add(self, *requests: NewRequest) -> None: ...

    def abort(self, request_id: str) -> RequestOutput | None: ...

    def step(self) -> None: ...

    def fail(self, failure: StepError, num_failed_steps: int) -> None: ...

    def use_idle_time(self, *, captures: bool) -> bool: ...

    def drop_computed(self) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def stats(self) -> EngineStats: ...

    def num_output_tokens(self) -> int: ...

    def check_alive(self) -> None: ...

    def close(self) -> None: ...
