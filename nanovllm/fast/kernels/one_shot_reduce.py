"""All-reduces in one kernel through memory shared by all GPUs; the fastest method per size is measured.

Two kernels, each faster than NCCL up to some size::

    push    each rank writes its values into every peer's memory, each with a sequence number that marks its arrival
    pull    each rank writes its values into its own memory, signals its peers, and reads theirs

A program is a channel: it sums one piece of the states, and waits only for the same program on each peer. Pieces have
fixed addresses in two halves of the buffer, used in turn, so that one wait is enough: a peer that has signalled the
next use of a channel has finished the last one. Uses are counted on the device, so the kernels can be captured and
replayed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.fast.kernels.peer_memory import PeerMemory

logger = logging.getLogger("nanovllm")

Reduce = Callable[[Tensor], Tensor]

# The pull kernel's sizes.
_BLOCK = 2048  # values of a channel
_CHANNELS = 512  # all run concurrently, which waiting requires
_WORD_BYTES = 4  # largest value
_HALF_BYTES = _CHANNELS * _BLOCK * _WORD_BYTES
_FLAGS_AT = 2 * _HALF_BYTES  # offset after both halves: [channels, ranks] int32, written by the peers
# The push kernel's sizes.
_PUSH_BLOCK = 512
_PUSH_CHANNELS = 128
_PUSH_VALUES = _PUSH_BLOCK * _PUSH_CHANNELS
_PUSH_BYTES = 8  # bytes of a value: sequence number, float32

_TRIAL_SECONDS = 20.0  # timeout of the first trial, most of it compilation
_TIMED_VALUES = tuple(2**power for power in range(11, 21))  # sizes at which the methods are timed
_CALLS = 20  # all-reduces in a timed CUDA graph


@triton.jit
def push_sum(
    states, output, buffers, uses, is_aborted, num_values, start, half_bytes, rank_bytes,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum over all ranks of a channel's states.

    Args:
        buffers: [SIZE] int64, addresses of every rank's buffer, with two halves of [SIZE, values] words from `start`.
        uses: [channels] int32, number of uses of each channel so far.
        is_aborted: [1] int32, set by the host when a peer has died.
    """
    channel = tl.program_id(0)
    lanes = channel * BLOCK + tl.arange(0, BLOCK)
    is_used = lanes < num_values
    use = tl.load(uses + channel) + 1
    own = tl.load(states + lanes, mask=is_used, other=0.0).to(tl.float32)
    number = use.to(tl.int64) << 32
    words = number | (own.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    half = start + (use & 1).to(tl.int64) * half_bytes
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            there = (tl.load(buffers + peer) + half + RANK * rank_bytes).to(tl.pointer_type(tl.int64))
            tl.store(tl.multiple_of(there, 16) + lanes, words, mask=is_used)
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(SIZE):  # the same order on every rank, so that all have the same sum
        if peer == RANK:
            total += own
        else:
            here = (tl.load(buffers + RANK) + half + peer * rank_bytes).to(tl.pointer_type(tl.int64))
            here = tl.multiple_of(here, 16) + lanes
            words = tl.load(here, mask=is_used, other=0, volatile=True)
            missing = tl.max((is_used & ((words >> 32) != use)).to(tl.int32), 0)
            while (missing != 0) & (tl.load(is_aborted, volatile=True) == 0):
                words = tl.load(here, mask=is_used, other=0, volatile=True)
                missing = tl.max((is_used & ((words >> 32) != use)).to(tl.int32), 0)
            total += words.to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(output + lanes, total.to(output.dtype.element_ty), mask=is_used)
    tl.store(uses + channel, use)


@triton.jit
def pull_sum(
    states, output, buffers, uses, is_aborted, num_values, half_bytes, flags_at,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, WORD_BYTES: tl.constexpr,
):  # fmt: skip
    """Write the sum over all ranks of a channel's states; arguments as for `push_sum`."""
    channel = tl.program_id(0)
    dtype = states.dtype.element_ty
    lanes = channel * BLOCK + tl.arange(0, BLOCK)
    is_used = lanes < num_values
    use = tl.load(uses + channel) + 1
    start = (use & 1).to(tl.int64) * half_bytes + channel * (BLOCK * WORD_BYTES)
    places = tl.arange(0, BLOCK)
    own = tl.multiple_of((tl.load(buffers + RANK) + start).to(tl.pointer_type(dtype)), 16)
    tl.store(own + places, tl.load(states + lanes, mask=is_used, other=0.0), mask=is_used)
    tl.debug_barrier()  # all threads have written before one signals
    for peer in tl.static_range(SIZE):
        flags = (tl.load(buffers + peer) + flags_at).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + channel * SIZE + RANK, use, sem="release", scope="sys")
    own_flags = (tl.load(buffers + RANK) + flags_at).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(SIZE):
        seen = tl.atomic_add(own_flags + channel * SIZE + peer, 0, sem="acquire", scope="sys")
        # A peer that has read this rank's values may have counted its next use already.
        while (seen - use < 0) & (tl.load(is_aborted, volatile=True) == 0):
            seen = tl.atomic_add(own_flags + channel * SIZE + peer, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(SIZE):  # the same order on every rank, so that all have the same sum
        there = tl.multiple_of((tl.load(buffers + peer) + start).to(tl.pointer_type(dtype)), 16)
        # Bypasses the L1 cache, which is not coherent with peers' writes.
        total += tl.load(there + places, mask=is_used, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(output + lanes, total.to(dtype), mask=is_used)
    tl.store(uses + channel, use)


class OneShotReduce:
    """All-reduces of one rank through memory mapped by every peer.

    Args:
        store: key-value store that all ranks share, used by this object alone.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: Any) -> None:
        torch.cuda.synchronize(device)  # creates the context
        self._push_start = _FLAGS_AT + _CHANNELS * size * 4
        self._rank_bytes = _PUSH_VALUES * _PUSH_BYTES
        num_bytes = self._push_start + 2 * size * self._rank_bytes
        self._buffers = torch.tensor(PeerMemory(rank, size, num_bytes, store).addresses, device=device)
        self._uses = torch.zeros(_CHANNELS, dtype=torch.int32, device=device)
        self._push_uses = torch.zeros(_PUSH_CHANNELS, dtype=torch.int32, device=device)
        self._is_aborted = torch.zeros(1, dtype=torch.int32, device=device)
        self._abort_stream = torch.cuda.Stream(device)
        self._one = torch.ones(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self._rank, self._size = rank, size
        self._fastest: list[Reduce | None] = []  # method for each of `_TIMED_VALUES`; None: NCCL
        self.choice: dict[int, str] = {}  # number of values -> name of the method

    def fastest(self, num_values: int) -> Reduce | None:
        """The fastest all-reduce for this many values; None means NCCL."""
        index = max(0, (num_values - 1).bit_length() - _TIMED_VALUES[0].bit_length() + 1)
        return self._fastest[index] if index < len(self._fastest) else None

    def pull(self, states: Tensor) -> Tensor:
        """The sum over all ranks, as a new tensor; at most `_CHANNELS` * `_BLOCK` values."""
        states = states.contiguous()
        output, num_values = torch.empty_like(states), states.numel()
        if num_values:
            pull_sum[(-(-num_values // _BLOCK),)](
                states, output, self._buffers, self._uses, self._is_aborted, num_values, _HALF_BYTES, _FLAGS_AT,
                RANK=self._rank, SIZE=self._size, BLOCK=_BLOCK, WORD_BYTES=_WORD_BYTES, num_warps=8,
            )  # fmt: skip
        return output

    def push(self, states: Tensor) -> Tensor:
        """The sum over all ranks, as a new tensor; at most `_PUSH_VALUES` values."""
        states = states.contiguous()
        output, num_values = torch.empty_like(states), states.numel()
        if num_values:
            push_sum[(-(-num_values // _PUSH_BLOCK),)](
                states, output, self._buffers, self._push_uses, self._is_aborted, num_values, self._push_start,
                self._size * self._rank_bytes, self._rank_bytes,
                RANK=self._rank, SIZE=self._size, BLOCK=_PUSH_BLOCK, num_warps=4,
            )  # fmt: skip
        return output

    def adds_up(self, device: torch.device) -> bool:
        """Whether both kernels sum correctly; False after `_TRIAL_SECONDS` without a peer's values."""
        is_right = torch.ones((), dtype=torch.bool, device=device)
        total = self._size * (self._size - 1) // 2
        for number in (1, 5, _PUSH_BLOCK + 3, _BLOCK + 3, 2 * _BLOCK):  # each half, and more than one channel
            values = torch.arange(number, device=device, dtype=torch.float32)
            for reduce in (self.push, self.pull):
                is_right &= (reduce(values + self._rank) == values * self._size + total).all()
        done = torch.cuda.Event()
        done.record()
        end = time.monotonic() + _TRIAL_SECONDS
        while not done.query():
            if time.monotonic() > end:
                self.abort()
                return False
            time.sleep(0.001)
        return bool(is_right)

    def choose(self, device: torch.device, reduce: Reduce) -> None:
        """Time every method in a CUDA graph, and choose the fastest for each size, the same on all ranks."""
        most_values = _CHANNELS * _BLOCK
        methods = ((most_values, None), (_PUSH_VALUES, self.push), (most_values, self.pull))
        times = torch.full((len(_TIMED_VALUES), len(methods)), torch.inf, device=device)
        for row, num_values in enumerate(_TIMED_VALUES):
            states = torch.zeros(num_values, dtype=torch.bfloat16, device=device)
            for column, (most, method) in enumerate(methods):
                if num_values <= most:
                    times[row, column] = _milliseconds(partial(method or reduce, states), device)
        fastest = reduce(times).argmin(dim=1).tolist()
        self._fastest = [methods[column][1] for column in fastest]
        names = ("nccl", "push", "pull")
        self.choice = {most: names[column] for most, column in zip(_TIMED_VALUES, fastest, strict=True)}

    def abort(self) -> None:
        """End the waits of all kernels."""
        # A copy, since the waiting kernels could block another kernel (module loading, occupancy).
        with torch.cuda.stream(self._abort_stream):
            self._is_aborted.copy_(self._one, non_blocking=True)


def _milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds for `_CALLS` calls in a CUDA graph; the best of four."""
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    times = []
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize(device)
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(_CALLS):
            run()
        graph.capture_end()
        for _ in range(4):  # the first one synchronises the ranks
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return min(times)


def build_one_shot(rank: int, size: int, device: torch.device, store: Any, reduce: Reduce) -> OneShotReduce | None:
    """One-kernel all-reduces that passed a trial; None if GPUs cannot share memory or the trial fails.

    Args:
        store: key-value store that all ranks share.
        reduce: NCCL's all-reduce.
    """

    def agree(holds: bool) -> bool:
        return int(reduce(torch.tensor([int(holds)], device=device))) == size

    built, failure = None, None
    try:
        built = OneShotReduce(rank, size, device, store)
    except (RuntimeError, OSError) as error:
        failure = error
    if not agree(built is not None) or built is None:
        logger.warning("all-reduces are NCCL's: GPUs do not share memory (%s)", failure or "a peer's error")
        return None
    if not agree(built.adds_up(device)):
        logger.warning("all-reduces are NCCL's: a trial of writing to peers' memory gave other sums, or none")
        return None
    built.choose(device, reduce)
    logger.info("all-reduces by number of values: %s", built.choice)
    return built
