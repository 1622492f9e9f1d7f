"""An all-reduce of few rows in one kernel: each GPU reads its peers' memory and adds for itself.

A program is a channel: it sums one piece of the states, and waits for the same program of every peer alone. Pieces lie
at fixed places and use two halves of the buffer in turn, so that no second wait is needed: a peer that has signalled
the next use of a channel is done with the last one. The number of a use is counted on the device, so the kernel can be
captured and replayed.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

logger = logging.getLogger("nanovllm")

_BLOCK = 2048  # values of a channel
_CHANNELS = 1024  # all of them run at once, as waiting asks for
_WORD_BYTES = 4  # of a value at most
_HALF_BYTES = _CHANNELS * _BLOCK * _WORD_BYTES
_FLAGS_AT = 2 * _HALF_BYTES  # behind the halves: [channels, ranks] int32, written by the peers
_MOST_BYTES_READ = 4 * 2**20  # from all peers together; NCCL is as fast from there on


@triton.jit
def sum_over_ranks(
    states, output, buffers, uses, is_aborted, num_values, half_bytes, flags_at,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, WORD_BYTES: tl.constexpr,
):  # fmt: skip
    """Write the sum over all ranks of a channel's states.

    Args:
        buffers: [SIZE] int64, addresses of every rank's buffer.
        uses: [channels] int32, of each channel so far.
        is_aborted: [1] int32, set by the host when a peer is gone.
    """
    channel = tl.program_id(0)
    dtype = states.dtype.element_ty
    lanes = channel * BLOCK + tl.arange(0, BLOCK)
    is_used = lanes < num_values
    use = tl.load(uses + channel) + 1
    start = (use & 1).to(tl.int64) * half_bytes + channel * (BLOCK * WORD_BYTES)
    places = tl.arange(0, BLOCK)
    own = (tl.load(buffers + RANK) + start).to(tl.pointer_type(dtype))
    tl.store(own + places, tl.load(states + lanes, mask=is_used, other=0.0), mask=is_used)
    tl.debug_barrier()  # every thread's values are there before one thread says so
    for peer in tl.static_range(SIZE):
        flags = (tl.load(buffers + peer) + flags_at).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + channel * SIZE + RANK, use, sem="release", scope="sys")
    own_flags = (tl.load(buffers + RANK) + flags_at).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(SIZE):
        seen = tl.atomic_add(own_flags + channel * SIZE + peer, 0, sem="acquire", scope="sys")
        while (seen != use) & (tl.load(is_aborted, volatile=True) == 0):
            seen = tl.atomic_add(own_flags + channel * SIZE + peer, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(SIZE):  # in the same order on every rank: all have the same sum
        values = (tl.load(buffers + peer) + start).to(tl.pointer_type(dtype))
        total += tl.load(values + places, mask=is_used, other=0.0, volatile=True).to(tl.float32)
    tl.store(output + lanes, total.to(dtype), mask=is_used)
    tl.store(uses + channel, use)


class OneShotReduce:
    """All-reduces of one rank through memory that every peer has mapped."""

    def __init__(self, rank: int, size: int, device: torch.device, store: Any) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        group = f"nanovllm-{os.getpid()}-{id(self)}" if rank == 0 else ""
        if rank == 0:
            store.set("group", group)
        group = store.get("group").decode()
        _SymmetricMemory.set_group_info(group, rank, size, store)
        num_bytes = _FLAGS_AT + _CHANNELS * size * 4
        self._memory = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device, group)
        self._memory.zero_()
        torch.cuda.synchronize(device)
        self._handle = _SymmetricMemory.rendezvous(self._memory, group)
        addresses = list(self._handle.buffer_ptrs)
        self._buffers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._uses = torch.zeros(_CHANNELS, dtype=torch.int32, device=device)
        self._is_aborted = torch.zeros(1, dtype=torch.int32, device=device)
        self._abort_stream = torch.cuda.Stream(device)
        self._rank, self._size = rank, size

    def suits(self, states: Tensor) -> bool:
        """Whether it is the faster way for these states, by their number."""
        num_bytes = states.numel() * states.element_size()
        return num_bytes * (self._size - 1) <= _MOST_BYTES_READ and states.numel() <= _CHANNELS * _BLOCK

    def __call__(self, states: Tensor) -> Tensor:
        """The sum over all ranks, as a new tensor."""
        states = states.contiguous()
        output = torch.empty_like(states)
        num_values = math.prod(states.shape)
        if num_values:
            sum_over_ranks[(-(-num_values // _BLOCK),)](
                states, output, self._buffers, self._uses, self._is_aborted, num_values, _HALF_BYTES, _FLAGS_AT,
                RANK=self._rank, SIZE=self._size, BLOCK=_BLOCK, WORD_BYTES=_WORD_BYTES, num_warps=8,
            )  # fmt: skip
        return output

    def abort(self) -> None:
        """Let no kernel wait any more."""
        with torch.cuda.stream(self._abort_stream):
            self._is_aborted.fill_(1)


def build_one_shot(
    rank: int, size: int, device: torch.device, store: Any, agree: Callable[[bool], bool]
) -> OneShotReduce | None:
    """The all-reduce of few rows, once it was seen to add up; None where these GPUs cannot read each other's memory.

    Args:
        store: of all ranks.
        agree: whether something holds on all of them.
    """
    built, failure = None, None
    try:
        built = OneShotReduce(rank, size, device, store)
    except (RuntimeError, ImportError, AttributeError, TypeError) as error:
        failure = error
    if not agree(built is not None) or built is None:
        logger.warning("all-reduces of few rows are NCCL's: GPUs do not share memory (%s)", failure)
        return None
    adds_up = True
    for number in (1, 5, _BLOCK + 3, 2 * _BLOCK):  # each half, and more than one channel
        values = torch.arange(number, device=device, dtype=torch.float32)
        expected = values * size + sum(range(size))
        adds_up &= bool(torch.equal(built(values + rank), expected))
    if agree(adds_up):
        return built
    logger.warning("all-reduces of few rows are NCCL's: a trial of reading peers' memory gave other sums")
    return None
