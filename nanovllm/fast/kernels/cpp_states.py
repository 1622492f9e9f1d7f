"""Kernels for recurrent states on CPUs (`csrc/states/`): tokens of sequences, over states that stay in their slots.

A module of `transformers` updates a batch of states that it is given. Its functions for one token get the whole pool
here instead, and the kernel reads and writes each sequence's slots, so nothing is gathered, copied or scattered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_int, c_int64, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.errors import KernelBuildError
from nanovllm.fast.kernels.cpp import SOURCES, built_library, compiled_targets, open_library
from nanovllm.fast.kernels.state_checks import check_of_heads, first_wrong

logger = logging.getLogger("nanovllm")

MAX_TAPS = 8  # most taps of a convolution over chunks
MAX_WIDTH = 512  # most elements of a head's key, and of a state space's row
_TYPES = (torch.float32, torch.bfloat16)
_POOL = [c_void_p] * 3  # state pool, slots to read, slots to write
_ROWS = [*_POOL, c_void_p]  # the same, then the first row of each sequence
# Argument types of the functions, which the sources describe.
_SIGNATURES = {
    "delta_rule": [c_void_p] * 3 + [c_int] + [c_void_p] * 3 + _ROWS + [c_void_p] * 2 + [c_int] * 2,
    "state_space": [c_void_p] * 3 + [c_int] + [c_void_p] * 4 + _ROWS + [c_void_p] * 2 + [c_int],
    "convolution": [c_void_p, c_int, c_int64] + _POOL + [c_void_p] * 4 + [c_int] * 2,
    "convolution_chunks": [c_void_p, c_int, c_int64] + _ROWS + [c_void_p] * 4 + [c_int] * 2,
}


class StateKernels:
    """Functions of the compiled library, called like `transformers`' own, with a pool [num_slots, ...] as the state.

    They raise ValueError for types and layouts that they do not serve, before anything is changed.

    Attributes:
        reads, writes: [num_sequences] int64, the slots of the next calls.
        by_name: name of a function in `transformers` -> the kind of state that it updates, and our function.
        prefills: the same of its functions for prefills, to be called within `over_chunks`.
    """

    def __init__(self, library: Path) -> None:
        self._functions = open_library(library, _SIGNATURES)
        self.reads = self.writes = torch.zeros(0, dtype=torch.int64, device="cpu")
        self._starts: Tensor | None = None  # first row of each sequence, and their end; None for one row each
        self.by_name: dict[str, tuple[str, Callable[..., Any]]] = {
            "causal_conv1d_update": ("conv_states", self.convolution),
            "torch_recurrent_gated_delta_rule": ("recurrent_states", self.delta_rule),
            "recurrent_kimi_delta_attention": ("recurrent_states", self.delta_rule),
            "mamba2_selective_state_update": ("recurrent_states", self.state_space),
        }
        self.prefills: dict[str, Callable[..., Any]] = {
            "torch_chunk_gated_delta_rule": self.delta_rule,
            "chunk_kimi_delta_attention": self.delta_rule,
            "mamba2_chunk_scan": self.state_space_chunks,
        }

    @contextmanager
    def over_chunks(self, reads: Tensor, writes: Tensor, starts: Tensor) -> Iterator[None]:
        """Calls get rows [1, num_rows, ...] of sequences one after another; a state read from the null block is 0.

        Args:
            reads, writes: [num_sequences] int64, slots.
            starts: [num_sequences + 1] int64, the first row of each, and their end.
        """
        before = self.reads, self.writes
        self.reads = reads
        self.writes = writes
        self._starts = starts
        try:
            yield
        finally:
            self.reads, self.writes = before
            self._starts = None

    def convolution(
        self, inputs: Tensor, pool: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
    ) -> Tensor:
        """Outputs [num_sequences, channels, 1] of a convolution by channel.

        Args:
            inputs: [num_sequences, channels, 1], float32 or bfloat16, as all others.
            pool: [num_slots, channels, width], the last inputs.
            weight, bias: [channels, width] and [channels].
            activation: "silu" or None.
        """
        rows = self._rows(inputs.transpose(1, 2))
        types = {tensor.dtype for tensor in (rows, pool, weight, bias) if tensor is not None}
        if self._starts is not None and weight.shape[1] > MAX_TAPS:
            raise ValueError(f"a convolution of {weight.shape[1]} inputs")
        if len(types) > 1 or activation not in (None, "silu", "swish") or weight.shape != pool.shape[1:]:
            raise ValueError(f"a convolution of {types}, {tuple(weight.shape)}, with activation {activation!r}")
        weight = weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        output = rows.new_empty(inputs.shape[0], inputs.shape[2], inputs.shape[1])
        starts: list[int | None] = [] if self._starts is None else [self._starts_at]
        function = self._functions.convolution_chunks if starts else self._functions.convolution
        function(
            rows.data_ptr(), _is_bfloat16(rows), rows.stride(0), *self._slots(pool, rows.dtype), *starts,
            weight.data_ptr(), None if bias is None else bias.data_ptr(), output.data_ptr(),
            _numbers(len(self.reads), *pool.shape[1:]), activation is not None, torch.get_num_threads(),
        )  # fmt: skip
        return output.transpose(1, 2)

    def delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor,
        output_final_state: bool = True,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Outputs [num_sequences, 1, value heads, value width] of the gated delta rule, and the pool.

        Args:
            query, key: [num_sequences, 1, key heads, key width].
            value: [num_sequences, 1, value heads, value width].
            g: logarithm of the decay, of a head or of each row of its state.
            beta: [num_sequences, 1, value heads].
            initial_state: the pool, [num_slots, value heads, key width, value width] float32.
        """
        key_heads, key_width, value_heads, value_width = *key.shape[2:], *value.shape[2:]
        rows = [self._rows(tensor) for tensor in (query, key, value)]
        if query.shape != key.shape or len({each.dtype for each in rows}) > 1 or key_width > MAX_WIDTH:
            raise ValueError(f"queries {tuple(query.shape)} and keys {tuple(key.shape)} of {rows[0].dtype}")
        decay = g.float().exp().contiguous()
        beta = beta.float().contiguous()
        sizes = key_heads, value_heads, key_width, value_width, decay.numel() // beta.numel()
        output = rows[0].new_empty(*key.shape[:2], value_heads, value_width)
        self._functions.delta_rule(
            *(each.data_ptr() for each in rows), _is_bfloat16(rows[0]), _numbers(*(each.stride(0) for each in rows)),
            decay.data_ptr(), beta.data_ptr(), *self._slots(initial_state, torch.float32), self._starts_at,
            output.data_ptr(), _numbers(len(self.reads), *sizes), use_qk_l2norm_in_kernel, torch.get_num_threads(),
        )  # fmt: skip
        return output, initial_state

    def state_space(
        self,
        pool: Tensor,
        inputs: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Outputs [num_sequences, heads, head width] of Mamba-2's state space.

        Args:
            pool: [num_slots, heads, head width, state width] float32.
            inputs: [num_sequences, heads, head width].
            dt, A, D: a value for each head, expanded over its state.
            B, C: [num_sequences, groups, state width].
            options: `dt_bias`, as dt; `dt_softplus`; `z`, a gate of the outputs, as `inputs`.
        """
        dt_bias = options.get("dt_bias")
        z = options.get("z")
        check_of_heads(dt, A, D, dt_bias)
        step = _steps(dt[..., 0], None if dt_bias is None else dt_bias[..., 0], options.get("dt_softplus", False))
        of_heads = step[:, None], A[..., 0, 0], None if D is None else D[..., 0]
        output = self._state_space(pool, inputs[:, None], B[:, None], C[:, None], *of_heads)[:, 0]
        return output if z is None else output * F.silu(z)

    def state_space_chunks(
        self, inputs: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, initial_states: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Outputs [1, num_rows, heads, head width] of Mamba-2's state space, and the pool.

        Args:
            inputs: [1, num_rows, heads, head width].
            dt: [1, num_rows, heads]; A: [heads].
            B, C: [1, num_rows, groups, state width].
            initial_states: the pool, as of `state_space`.
            options: `dt_bias` and `D`, [heads]; `dt_softplus`; `dt_limit`, the least and the largest step.
        """
        step = _steps(dt, options.get("dt_bias"), options.get("dt_softplus", False))
        step = step.clamp(*options.get("dt_limit", (0.0, float("inf"))))
        return self._state_space(initial_states, inputs, B, C, step, A, options.get("D")), initial_states

    def _state_space(
        self, pool: Tensor, inputs: Tensor, B: Tensor, C: Tensor, step: Tensor, A: Tensor, skip: Tensor | None
    ) -> Tensor:
        """Outputs as `inputs`, [..., heads, head width] with two dimensions of rows; step: [..., heads]."""
        num_heads, width, num_groups, state_width = *inputs.shape[2:], *B.shape[2:]
        rows = [self._rows(each) for each in (inputs, B, C)]
        if state_width > MAX_WIDTH or len({each.dtype for each in rows}) > 1:
            raise ValueError(f"a state space of {rows[0].dtype} with {num_heads} heads of {width} by {state_width}")
        step = step.float().contiguous()
        decay = torch.exp(step * A.float())
        skip = None if skip is None else skip.float().contiguous()
        output = rows[0].new_empty(inputs.shape)
        self._functions.state_space(
            *(each.data_ptr() for each in rows), _is_bfloat16(rows[0]), _numbers(*(each.stride(0) for each in rows)),
            decay.data_ptr(), step.data_ptr(), None if skip is None else skip.data_ptr(),
            *self._slots(pool, torch.float32), self._starts_at, output.data_ptr(),
            _numbers(len(self.reads), num_heads, num_groups, width, state_width), torch.get_num_threads(),
        )  # fmt: skip
        return output

    @property
    def _starts_at(self) -> int | None:
        return None if self._starts is None else self._starts.data_ptr()

    def _rows(self, tensor: Tensor) -> Tensor:
        """[num_sequences, 1, ...], or [1, num_rows, ...] of chunks, as [num_rows, width], rows contiguous."""
        if tensor.shape[self._starts is None] != 1 or tensor.dtype not in _TYPES:
            raise ValueError(f"{tensor.shape[1]} tokens a sequence in {tensor.dtype}")
        rows = tensor.reshape(tensor.shape[0] * tensor.shape[1], -1)
        return rows if rows.stride(1) == 1 else rows.contiguous()

    def _slots(self, pool: Tensor, dtype: torch.dtype) -> tuple[int, int, int]:
        """Addresses of a pool and of the slots to read and to write."""
        if not pool.is_contiguous() or pool.dtype != dtype:
            raise ValueError(f"states of {pool.dtype}, not of {dtype}")
        return pool.data_ptr(), self.reads.data_ptr(), self.writes.data_ptr()


def _steps(dt: Tensor, bias: Tensor | None, is_softplus: bool) -> Tensor:
    step = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(step) if is_softplus else step


def _is_bfloat16(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bfloat16


def _numbers(*numbers: int) -> Any:
    return (c_int64 * len(numbers))(*numbers)


def load_state_kernels() -> StateKernels:
    """Kernels for the best processor class that passes the start check, cached on disk.

    Raises KernelBuildError if no class compiles or passes, and ProcessorClassError.
    """
    build = partial(built_library, "states", [], SOURCES / "states", headers=[SOURCES / "lanes.h"])
    for target, library in compiled_targets(build):
        kernels = StateKernels(library)
        wrong = first_wrong(kernels)
        if wrong is None:
            return kernels
        logger.warning("the C++ kernels for %s are not used, since they are wrong here: %s", target.name, wrong)
    raise KernelBuildError(f"they are wrong on this processor: {wrong}")
