"""Ranks of one tensor-parallel engine, one process and device each, and their collectives.

All ranks call the same collectives in the same order. Two are custom operators, opaque to the compiler, so that a
layer with an all-reduce compiles to one graph.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from nanovllm.device import find_kernel

# The death of a rank ends its peers' collectives within seconds; this timeout is for a rank that hangs. It must outlast
# work of a single rank: compiling, loading weights.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
_GPU_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # torch's default kills the user's process after a failed collective
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",  # nothing here needs it
}
_handles = itertools.count()
# Keys: `handle`, an argument of the operators.
_ranks: weakref.WeakValueDictionary[int, Ranks] = weakref.WeakValueDictionary()


class Ranks:
    """This process's rank and its process group; construction waits for all ranks.

    The default process group of `torch.distributed` is not touched: it is the user's.

    Args:
        rank, size: this rank's number, from 0, and the number of ranks.
        store: store for the rendezvous, and for answers of ranks to rank 0.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: dist.Store) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.store = store
        self.handle = next(_handles)
        _ranks[self.handle] = self
        self._one_shot: Any = None
        self._is_aborted = False
        self._options: dict[str, Any] = {
            "allreduce": dist.AllreduceOptions(), "allgather": AllgatherOptions(), "broadcast": dist.BroadcastOptions()
        }  # fmt: skip
        if device.type == "cpu":
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = COLLECTIVE_TIMEOUT
            self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)
            return
        torch.cuda.set_device(device)
        for options in self._options.values():
            options.asyncOp = False  # runs in the caller's stream
        with _environment(_GPU_SETTINGS):
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = COLLECTIVE_TIMEOUT
            self._group = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
            self.barrier()  # the first call makes the communicator, which graph capture does not allow
            build: Callable[..., Any] | None = find_kernel("one_shot_reduce", "build_one_shot")
            if build is not None:
                self._one_shot = build(rank, size, device, dist.PrefixStore("one_shot", store), self._reduce)

    # ------------------------------------------------------------------------------------------------ collectives

    def all_reduce(self, states: Tensor) -> Tensor:
        """The sum over all ranks, the same on each, as a new tensor."""
        fastest = None if self._one_shot is None else self._one_shot.fastest(states.numel())
        reduced: Tensor = (fastest or self._reduce)(states)
        return reduced

    def _reduce(self, states: Tensor) -> Tensor:
        reduced = states.clone(memory_format=torch.contiguous_format)
        self._wait(self._group.allreduce([reduced], self._options["allreduce"]))
        return reduced

    def all_gather(self, values: Tensor) -> Tensor:
        """Gathers [*shape] of every rank, all of one shape, to [size, *shape]."""
        gathered = values.new_empty(self.size * values.numel())
        self._wait(self._group._allgather_base(gathered, values.contiguous().view(-1), self._options["allgather"]))
        return gathered.view(self.size, *values.shape)

    def gather_columns(self, states: Tensor) -> Tensor:
        """Gathers [..., n] of every rank to [..., size * n]."""
        return self.all_gather(states).movedim(0, -2).flatten(-2)

    def broadcast(self, values: Tensor) -> None:
        """Overwrite values with rank 0's."""
        self._wait(self._group.broadcast([values], self._options["broadcast"]))

    @staticmethod
    def _wait(work: Any) -> None:
        if work is not None:
            work.wait()

    def barrier(self) -> None:
        """Block the host until every rank arrives."""
        self.least(0)

    def least(self, value: int) -> int:
        """Minimum of a number over all ranks."""
        return int(self.all_gather(torch.tensor([value], device=self.device)).min())

    def agree(self, holds: bool) -> bool:
        """Whether a condition holds on every rank."""
        return bool(self.least(int(holds)))

    def abort(self) -> None:
        """End running collectives of any thread, and all later ones; idempotent.

        On a CPU they end when a peer's process does. On a GPU the kernels end soon after; NCCL frees the communicator
        once no CUDA graph uses it, and nobody waits for that.
        """
        if self.device.type == "cuda" and not self._is_aborted:
            self._is_aborted = True
            if self._one_shot is not None:
                with suppress(RuntimeError):  # the device has failed: its kernels have ended
                    self._one_shot.abort()
            with suppress(RuntimeError):  # no new threads at interpreter exit; NCCL's memory is freed with the process
                threading.Thread(target=self._group.abort, name="nanovllm-abort", daemon=True).start()


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set environment variables temporarily; values set by the user win."""
    own = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)


@torch.library.custom_op("nanovllm::all_reduce", mutates_args=())
def all_reduce(states: Tensor, handle: int) -> Tensor:
    """`Ranks.all_reduce` as an operator."""
    return _ranks[handle].all_reduce(states)


@all_reduce.register_fake
def _(states: Tensor, handle: int) -> Tensor:
    return torch.empty_like(states, memory_format=torch.contiguous_format)


@torch.library.custom_op("nanovllm::gather_columns", mutates_args=())
def gather_columns(states: Tensor, handle: int) -> Tensor:
    """`Ranks.gather_columns` as an operator."""
    return _ranks[handle].gather_columns(states).contiguous()


@gather_columns.register_fake
def _(states: Tensor, handle: int) -> Tensor:
    return states.new_empty(*states.shape[:-1], states.shape[-1] * _ranks[handle].size)
