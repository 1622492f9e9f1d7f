"""Kernels for recurrent states on CPUs (`csrc/states/`): one token a sequence, over states that stay in their slots.

A module of `transformers` updates a batch of states that it is given. Its functions for one token get the whole pool
here instead, and the kernel reads and writes each sequence's slots, so nothing is gathered, copied or scattered.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from ctypes import c_int, c_int64, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.core.errors import KernelBuildError
from nanovllm.kernels.cpp import SOURCES, built_library, compiled_targets

logger = logging.getLogger("nanovllm")

MAX_WIDTH = 512  # of a head's keys, and of a state space's row
_TYPES = (torch.float32, torch.bfloat16)
_POOL = [c_void_p] * 3  # with slots to read and to write
# Argument types of the functions, which the sources describe.
_SIGNATURES = {
    "delta_rule": [c_void_p] * 3 + [c_int] + [c_void_p] * 3 + _POOL + [c_void_p] * 2 + [c_int] * 2,
    "state_space": [c_void_p] * 3 + [c_int] + [c_void_p] * 4 + _POOL + [c_void_p] * 2 + [c_int],
    "convolution": [c_void_p, c_int, c_int64] + _POOL + [c_void_p] * 4 + [c_int] * 2,
}


class StateKernels:
    """Functions of the compiled library, called as those of `transformers`, with a pool [num_slots, ...] as the state.

    They raise ValueError for types and layouts that they do not serve, before anything is changed.

    Attributes:
        reads, writes: [num_sequences] int64, the slots of the next calls.
        by_name: name of a function in `transformers` -> the kind of state that it updates, and our function.
    """

    def __init__(self, library: Path) -> None:
        functions = ctypes.CDLL(str(library))
        for name, arguments in _SIGNATURES.items():
            function = getattr(functions, name)
            function.argtypes, function.restype = arguments, None
        self._functions: Any = functions
        self.reads = self.writes = torch.zeros(0, dtype=torch.int64, device="cpu")
        self.by_name: dict[str, tuple[str, Callable[..., Any]]] = {
            "causal_conv1d_update": ("conv_states", self.convolution),
            "torch_recurrent_gated_delta_rule": ("recurrent_states", self.delta_rule),
            "recurrent_kimi_delta_attention": ("recurrent_states", self.delta_rule),
            "mamba2_selective_state_update": ("recurrent_states", self.state_space),
        }

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
        num_sequences, num_channels, length = inputs.shape
        rows = _rows(inputs.transpose(1, 2), num_sequences, length)
        types = {tensor.dtype for tensor in (rows, pool, weight, bias) if tensor is not None}
        if len(types) > 1 or activation not in (None, "silu", "swish") or weight.shape != pool.shape[1:]:
            raise ValueError(f"a convolution of {types}, {tuple(weight.shape)}, with activation {activation!r}")
        weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
        output = rows.new_empty(num_sequences, num_channels, 1)
        self._functions.convolution(
            rows.data_ptr(), _is_bfloat16(rows), rows.stride(0), *self._slots(pool, rows.dtype), weight.data_ptr(),
            None if bias is None else bias.data_ptr(), output.data_ptr(),
            _numbers(num_sequences, *pool.shape[1:]), activation is not None, torch.get_num_threads(),
        )  # fmt: skip
        return output

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
        num_sequences, length, key_heads, key_width = key.shape
        value_heads, value_width = value.shape[2:]
        rows = [_rows(tensor, num_sequences, length) for tensor in (query, key, value)]
        if query.shape != key.shape or len({each.dtype for each in rows}) > 1 or key_width > MAX_WIDTH:
            raise ValueError(f"queries {tuple(query.shape)} and keys {tuple(key.shape)} of {rows[0].dtype}")
        decay, beta = g.float().exp().contiguous(), beta.float().contiguous()
        sizes = num_sequences, key_heads, value_heads, key_width, value_width, decay.numel() // beta.numel()
        output = rows[0].new_empty(num_sequences, 1, value_heads, value_width)
        self._functions.delta_rule(
            *(each.data_ptr() for each in rows), _is_bfloat16(rows[0]), _numbers(*(each.stride(0) for each in rows)),
            decay.data_ptr(), beta.data_ptr(), *self._slots(initial_state, torch.float32), output.data_ptr(),
            _numbers(*sizes), use_qk_l2norm_in_kernel, torch.get_num_threads(),
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
        dt_bias, z = options.get("dt_bias"), options.get("z")
        num_sequences, num_heads, width = inputs.shape
        num_groups, state_width = B.shape[1:]
        expanded = [(dt, 1), (A, 2), *((each, 1) for each in (D, dt_bias) if each is not None)]
        is_of_heads = all(each.stride()[-count:] == (0,) * count for each, count in expanded)
        rows = [_rows(each, num_sequences, 1) for each in (inputs, B, C)]
        if not is_of_heads or state_width > MAX_WIDTH or len({each.dtype for each in rows}) > 1:
            raise ValueError(f"a state space of {rows[0].dtype} with {num_heads} heads of {width} by {state_width}")
        step = dt[..., 0] if dt_bias is None else dt[..., 0] + dt_bias[..., 0].to(dt.dtype)
        step = (F.softplus(step) if options.get("dt_softplus") else step).float().contiguous()
        decay = torch.exp(step * A[..., 0, 0].float())
        skip = None if D is None else D[..., 0].float().contiguous()
        output = rows[0].new_empty(num_sequences, num_heads, width)
        self._functions.state_space(
            *(each.data_ptr() for each in rows), _is_bfloat16(rows[0]), _numbers(*(each.stride(0) for each in rows)),
            decay.data_ptr(), step.data_ptr(), None if skip is None else skip.data_ptr(),
            *self._slots(pool, torch.float32), output.data_ptr(),
            _numbers(num_sequences, num_heads, num_groups, width, state_width), torch.get_num_threads(),
        )  # fmt: skip
        return output if z is None else output * F.silu(z)

    def _slots(self, pool: Tensor, dtype: torch.dtype) -> tuple[int, int, int]:
        """Addresses of a pool and of the slots to read and to write."""
        if not pool.is_contiguous() or pool.dtype != dtype:
            raise ValueError(f"states of {pool.dtype}, not of {dtype}")
        return pool.data_ptr(), self.reads.data_ptr(), self.writes.data_ptr()


def _rows(tensor: Tensor, num_sequences: int, length: int) -> Tensor:
    """[num_sequences, 1, ...] as [num_sequences, width], rows contiguous."""
    if length != 1 or tensor.dtype not in _TYPES:
        raise ValueError(f"{length} tokens a sequence in {tensor.dtype}")
    rows = tensor.reshape(num_sequences, -1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


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


# ------------------------------------------------------------------------------------------------------- start check


def first_wrong(kernels: StateKernels) -> str | None:
    """Text that names the first kernel that differs from torch on small rows; None if all are right."""
    generator = torch.Generator("cpu").manual_seed(0)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 8e-3)):

        def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)

        kernels.reads, kernels.writes = (torch.tensor(slots, device="cpu") for slots in ([1, 2, 4], [1, 3, 5]))
        for check in (_convolutions, _delta_rules, _state_spaces):
            for name, found, expected in check(kernels, random):
                distance = (found.double() - expected).norm() / expected.norm()
                if not bool(distance <= tolerance):  # NaN is wrong too
                    return f"{name} in {dtype} differ by {distance.item():.1e} of their size"
    return None


Check = Iterator[tuple[str, Tensor, Tensor]]


def _convolutions(kernels: StateKernels, random: Callable[..., Tensor]) -> Check:
    for channels, width in ((300, 4), (24, 3), (17, 2)):
        pool, inputs, weight, bias = (
            random(*s) for s in ((6, channels, width), (3, channels, 1), (channels, width), (channels,))
        )
        states = torch.cat([pool[kernels.reads], inputs], -1)[..., 1:]
        expected = (states.double() * weight.double()).sum(-1, keepdim=True) + bias.double()[:, None]
        found = kernels.convolution(inputs, pool, weight, bias, "silu")
        yield "convolutions", found, F.silu(expected)
        yield "states of convolutions", pool[kernels.writes], states.double()


def _delta_rules(kernels: StateKernels, random: Callable[..., Tensor]) -> Check:
    for width, value_width, decay_width in ((16, 80, 1), (40, 24, 40)):
        query, key, value = random(3, 1, 2, width), random(3, 1, 2, width), random(3, 1, 4, value_width)
        pool, beta = random(6, 4, width, value_width, dtype=torch.float32), random(3, 1, 4).sigmoid()
        logarithm = -random(3, 1, 4, decay_width, dtype=torch.float32).abs()
        g = logarithm[..., 0] if decay_width == 1 else logarithm
        own_query, own_key = (F.normalize(rows[:, 0].double(), dim=-1).repeat_interleave(2, 1) for rows in (query, key))
        states = pool[kernels.reads].double() * logarithm[:, 0].double().exp()[..., None]
        change = (value[:, 0].double() - torch.einsum("nhkv,nhk->nhv", states, own_key)) * beta[:, 0].double()[
            ..., None
        ]
        states += own_key[..., None] * change[:, :, None]
        expected = torch.einsum("nhkv,nhk->nhv", states, own_query)[:, None] * width**-0.5
        found, _ = kernels.delta_rule(query, key, value, g, beta, pool, use_qk_l2norm_in_kernel=True)
        yield "delta rules", found, expected
        yield "states of delta rules", pool[kernels.writes], states


def _state_spaces(kernels: StateKernels, random: Callable[..., Tensor]) -> Check:
    for width, state_width in ((8, 32), (5, 24)):
        inputs, b, c = random(3, 4, width), random(3, 2, state_width), random(3, 2, state_width)
        pool, skip = random(6, 4, width, state_width, dtype=torch.float32), random(4)
        dt, decay = random(3, 4), -random(4, dtype=torch.float32).exp()
        step = F.softplus(dt.double())[..., None, None]
        own_b, own_c = (rows.double().repeat_interleave(2, 1)[:, :, None] for rows in (b, c))
        states = pool[kernels.reads].double() * (step * decay.double()[:, None, None]).exp()
        states += step * own_b * inputs.double()[..., None]
        expected = (states * own_c).sum(-1) + skip.double()[:, None] * inputs.double()
        of_heads = dt[..., None].expand(-1, -1, width), decay[:, None, None].expand(-1, width, state_width)
        found = kernels.state_space(pool, inputs, *of_heads, b, c, D=skip[:, None].expand(-1, width), dt_softplus=True)
        yield "state spaces", found, expected
        yield "states of state spaces", pool[kernels.writes], states
