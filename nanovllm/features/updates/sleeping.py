"""Gives an engine's KV memory back while nobody needs it, at level 2 the weights' on a GPU too, and takes it again.

All tensors stay. A CPU's pages are given back in place, so that addresses stay, too. A GPU's storages have no bytes in
the meantime and may get others: graphs and stacks, which hold addresses, are dropped and made anew.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from nanovllm.device import DEVICE_LOCK, give_memory_back
from nanovllm.engine import Engine
from nanovllm.features.updates.pausing import choose_step
from nanovllm.model import AttributePatches

logger = logging.getLogger("nanovllm")

WAIT_SECONDS = 0.1  # time between two looks of a call that waits for `wake`


class AsleepError(RuntimeError):
    """A request came while the engine sleeps."""


@dataclass(slots=True)
class Sleep:
    """Memory that a rank of a sleeping engine has given back.

    runners: the rank's runner, and the first one's draft model's.
    refused: patches that refuse calls.
    caches: storages of K, V and states without bytes, with their sizes.
    weights: storages without bytes, with their content on the host.
    """

    runners: list[Any]
    refused: AttributePatches = field(default_factory=AttributePatches)
    caches: list[tuple[Any, int]] = field(default_factory=list)
    weights: list[tuple[Any, Tensor]] = field(default_factory=list)


def sleep(engine: Any, level: int = 1) -> None:
    """See `Sleeping.sleep`."""
    if not isinstance(engine, Engine):
        engine.change("sleep", level)
        return
    check_level(level)
    runner = engine.model_runner
    if level == 2 and _keeps_addresses(runner.device):
        logger.warning("sleep(level=2) is level 1 on a CPU: the weights are in host memory already")
        level = 1
    if level == 2 and runner.binding.is_live:
        raise ValueError("sleep(level=2) leaves the weights of a loaded module to its owner. Use level=1.")
    if asleep_of(engine) is None:
        with engine._changing():
            _fall_asleep(engine)
    if level == 2:
        on_all_ranks(runner, _move_weights)
    logger.info("the engine sleeps at level %d", level)


def wake(engine: Any) -> None:
    """See `Sleeping.wake`."""
    if not isinstance(engine, Engine):
        engine.change("wake")
        return
    if (asleep := asleep_of(engine)) is None:
        return
    bring_weights(engine)
    try:
        on_all_ranks(engine.model_runner, _take_caches)
    except torch.OutOfMemoryError:
        on_all_ranks(engine.model_runner, _leave_caches)
        raise
    on_all_ranks(engine.model_runner, _wake)
    asleep.refused.undo()
    del vars(engine)["asleep"]
    logger.info("the engine is awake")


def check_level(level: int) -> None:
    if level not in (1, 2):
        raise ValueError(f"level is {level!r}; it must be 1, for the KV memory, or 2, for the weights too.")


def on_all_ranks(runner: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call function(runner, *arguments) with the runner of each rank; returns the first one's result."""
    together = getattr(runner, "together", None)
    return function(runner, *arguments) if together is None else together(function, *arguments)


def _take_caches(runner: Any) -> None:
    _take_bytes(runner.asleep.caches)


def _leave_caches(runner: Any) -> None:
    for storage, _ in runner.asleep.caches:
        storage.resize_(0)
    give_memory_back(runner.device)


def _wake(runner: Any) -> None:
    """Prepare the model for steps, with the memory that it has again."""
    asleep = runner.asleep
    for storage, _ in asleep.caches:  # zeros, as at start
        _bytes_of(storage).zero_()
    for each in asleep.runners:
        each.binding.caches.memory.begin([caches for _, caches in each.binding.caches._together])
        if (renew := getattr(each.paths, "memory_moved", None)) is not None:
            renew(each)
    del runner.asleep


def asleep_of(engine: Any) -> Any:
    """The `Sleep` of an engine, or the level of a pool; None while it is awake."""
    return getattr(engine, "asleep", None)


def bring_weights(engine: Any) -> None:
    """Bring weights back that level 2 has moved; the engine sleeps on at level 1. No-op for other engines."""
    if asleep_of(engine) is not None:
        on_all_ranks(engine.model_runner, _bring_weights)


def _bring_weights(runner: Any) -> None:
    asleep = runner.asleep
    _take_bytes([(storage, len(content)) for storage, content in asleep.weights])
    for storage, content in asleep.weights:
        _bytes_of(storage).copy_(content)
    asleep.weights = []


def _fall_asleep(engine: Any) -> None:
    """Undo steps, forget all KV and give its memory back."""
    engine._drop_in_flight(has_failed=False)
    engine.scheduler.preempt_all()
    manager = engine.block_manager
    (manager.reset_prefix_cache if engine.tiers is None else manager.forget_blocks)()
    drafter = getattr(engine.scheduler.proposer, "drafter", None)
    runners = [engine.model_runner]
    if (end_all := getattr(drafter, "end_all", None)) is not None:
        runners.append(end_all())
    engine.asleep = engine.model_runner.asleep = asleep = Sleep(runners)
    refused = {"add": refuse_call, "step": refuse_call, "use_idle_time": lambda *, captures: False}
    asleep.refused.apply((vars(engine), name, call) for name, call in refused.items())
    on_all_ranks(engine.model_runner, _free_all_caches)


def _free_all_caches(runner: Any) -> None:
    """Give the memory of a rank's caches back."""
    runner.asleep = asleep = getattr(runner, "asleep", None) or Sleep([runner])
    for each in asleep.runners:
        _free_caches(each, asleep)
    give_memory_back(runner.device)


def _free_caches(runner: Any, asleep: Sleep) -> None:
    if runner.device.type == "cuda":
        runner.follow_last_stream()
        with DEVICE_LOCK:
            torch.cuda.synchronize(runner.device)
    runner.executor.model_changed(in_place=False)
    caches = runner.binding.caches
    caches.memory.begin(())  # idle threads touch no page any more
    states = [state for of_layer in caches.of_records for state in of_layer]
    for storage in _storages([*(of_group for _, of_group in caches._together), *states]):
        if _keeps_addresses(runner.device):
            _give_pages_back(storage)
        else:
            asleep.caches.append((storage, storage.nbytes()))
            storage.resize_(0)


def _keeps_addresses(device: torch.device) -> bool:
    """Whether memory can be given back in place."""
    return device.type == "cpu"


def _give_pages_back(storage: Any) -> None:
    """Give the whole pages of a storage back; they are zero when they are next read."""
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def _move_weights(runner: Any) -> None:
    """Move parameters and buffers of a rank to the host, all or none, if they are not there."""
    asleep = runner.asleep
    if asleep.weights:
        return
    for each in asleep.runners:
        each.binding.uninstall()
    models = [each.binding.model for each in asleep.runners]
    storages = _storages(part for model in models for part in (*model.parameters(), *model.buffers()))
    resizable = [storage for storage in storages if storage.resizable()]
    asleep.weights = [(storage, _bytes_of(storage).to("cpu", copy=True)) for storage in resizable]
    for storage, _ in asleep.weights:
        storage.resize_(0)
    give_memory_back(runner.device)


def _storages(tensors: Iterable[Tensor]) -> list[Any]:
    """The storages of these tensors, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return [*{storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values()]


def _bytes_of(storage: Any) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _take_bytes(storages: Iterable[tuple[Any, int]]) -> None:
    """Give storages so many bytes, all or none; raises torch.OutOfMemoryError if others have the memory."""
    taken = []
    try:
        for storage, num_bytes in storages:
            taken.append(storage)
            storage.resize_(num_bytes)
    except BaseException:
        for storage in taken:
            storage.resize_(0)
        raise


def refuse_call(*_: Any) -> NoReturn:
    raise AsleepError("this engine is asleep and has no KV memory; call wake() before requests.")


class Sleeping:
    """Mixin of `LLM`."""

    _owner: int | None  # thread that holds the lock, as in `LLM`

    def sleep(self: Any, level: int = 1) -> None:
        """Give memory back until `wake`: of the KV cache, and at level 2 of weights on a GPU, which the host keeps.

        Running requests stay and compute their KV again after `wake`; threads that wait for them wait on. New requests
        raise RuntimeError, and so does a stream that the thread of this call reads. Prefixes are forgotten, those in
        host memory and files excepted. `update_weights` works and brings the weights back.

        Raises ValueError for another level, level 2 with a loaded module on a GPU, and with both data_parallel_size and
        tensor_parallel_size above 1.
        """
        with self._interrupts(), self._turn() as engine:
            self._sleeper = threading.get_ident()
            self._woken = threading.Condition(self._lock)
            sleep(engine, level)
            choose_step(self, engine)

    def wake(self: Any) -> None:
        """Take the memory again and go on; no-op if awake. CUDA graphs are captured while idle, and by need.

        Raises torch.OutOfMemoryError, and sleeps on, if others have the memory.
        """
        with self._interrupts(), self._turn() as engine:
            wake(engine)
            choose_step(self, engine)
            if hasattr(self, "_woken"):
                self._woken.notify_all()

    @property
    def is_asleep(self: Any) -> bool:
        """Whether `sleep` has given memory back that `wake` has not taken again."""
        return asleep_of(self._open_engine()) is not None

    def _step_or_wait(self: Any, engine: Any, interrupts: Any) -> None:
        """A step of a sleeping engine: it is refused to the thread that sent it to sleep, and others wait."""
        if asleep_of(engine) is None or engine.outputs:
            type(self)._step(self, engine, interrupts)
            return
        if self._sleeper == threading.get_ident():
            refuse_call()
        self._owner = None
        try:
            self._woken.wait(WAIT_SECONDS)
        finally:
            self._owner = threading.get_ident()
