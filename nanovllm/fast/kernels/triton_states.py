"""Kernels for recurrent states on GPUs: one token a sequence, over states that stay in their slots.

They take the place of the functions of `transformers` that update a batch of states, as those of `cpp_states` do on a
CPU. Each program reads a part of a state, of a sequence and head, from its slot and writes it to its slot, once each.
The null block reads as 0, for sequences that begin and for padding; a CUDA graph captures the launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.fast.kernels.state_checks import check_of_heads

CHANNELS = 256  # channels of a convolution per program
TILE = 4096  # elements of a recurrent state, for one program
MAX_WIDTH = 512  # most elements of a head's key, and of a state space's row
NULL_SLOT: tl.constexpr = tl.constexpr(0)


@triton.jit
def _convolve(
    inputs, pool, weight, bias, output, reads, writes, input_row, input_channel, num_channels, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, CHANNELS: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Move the last inputs of CHANNELS channels on by one, and sum them with their weights."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHANNELS
    read, write = tl.load(reads + row), tl.load(writes + row)
    channels = first + tl.arange(0, CHANNELS)
    is_channel = channels < num_channels
    places = tl.arange(0, PADDED)
    new = tl.load(inputs + row * input_row + channels * input_channel, mask=is_channel, other=0)
    at = channels[:, None] * WIDTH + places[None, :]
    is_kept = is_channel[:, None] & (places < WIDTH - 1)[None, :] & (read != NULL_SLOT)
    states = tl.load(pool + read * num_channels * WIDTH + at + 1, mask=is_kept, other=0)
    states = tl.where((places == WIDTH - 1)[None, :], new[:, None].to(states.dtype), states)
    is_there = is_channel[:, None] & (places < WIDTH)[None, :]
    weights = tl.load(weight + at, mask=is_there, other=0).to(tl.float32)
    total = tl.sum(states.to(tl.float32) * weights, 1)
    if HAS_BIAS:
        total += tl.load(bias + channels, mask=is_channel, other=0).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.debug_barrier()  # all has been read before it is overwritten
    tl.store(pool + write * num_channels * WIDTH + at, states, mask=is_there)
    tl.store(output + row * num_channels + channels, total.to(output.dtype.element_ty), mask=is_channel)


@triton.jit
def _apply_delta_rule(
    query, key, value, decay, beta, pool, output, reads, writes, query_row, key_row, value_row, decay_row, beta_row,
    scale, HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, PADDED_KEYS: tl.constexpr,
    VALUES: tl.constexpr, TILE: tl.constexpr, BY_KEY: tl.constexpr, NORMALISES: tl.constexpr,
):  # fmt: skip
    """S' = decay S + k (beta (v - k decay S)), output q S', for TILE columns of S [key width, value width]."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    read, write = tl.load(reads + row), tl.load(writes + row)
    keys, values = tl.arange(0, PADDED_KEYS), tl.program_id(2) * TILE + tl.arange(0, TILE)
    is_key, is_value = keys < KEYS, values < VALUES
    own_query = tl.load(query + row * query_row + head // GROUP * KEYS + keys, mask=is_key, other=0).to(tl.float32)
    own_key = tl.load(key + row * key_row + head // GROUP * KEYS + keys, mask=is_key, other=0).to(tl.float32)
    own_value = tl.load(value + row * value_row + head * VALUES + values, mask=is_value, other=0).to(tl.float32)
    if NORMALISES:
        own_query = own_query / tl.sqrt(tl.sum(own_query * own_query, 0) + 1e-6)
        own_key = own_key / tl.sqrt(tl.sum(own_key * own_key, 0) + 1e-6)
    own_beta = tl.load(beta + row * beta_row + head).to(tl.float32)
    is_there = is_key[:, None] & is_value[None, :]
    SIZE: tl.constexpr = HEADS * KEYS * VALUES
    at = head * KEYS * VALUES + keys[:, None] * VALUES + values[None, :]
    states = tl.load(pool + read * SIZE + at, mask=is_there & (read != NULL_SLOT), other=0.0)
    if BY_KEY:
        logarithms = tl.load(decay + row * decay_row + head * KEYS + keys, mask=is_key, other=0).to(tl.float32)
        states = states * tl.exp(logarithms)[:, None]
    else:
        states = states * tl.exp(tl.load(decay + row * decay_row + head).to(tl.float32))
    change = (own_value - tl.sum(states * own_key[:, None], 0)) * own_beta
    states += own_key[:, None] * change[None, :]
    result = tl.sum(states * own_query[:, None], 0) * scale
    tl.debug_barrier()
    tl.store(pool + write * SIZE + at, states, mask=is_there)
    to = output + (row * HEADS + head) * VALUES + values
    tl.store(to, result.to(output.dtype.element_ty), mask=is_value)


@triton.jit
def _apply_state_space(
    inputs, steps, dt_bias, a, b, c, skip, pool, output, reads, writes, input_row, step_row, b_row, c_row, step_head,
    bias_head, a_head, skip_head, HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    STATES: tl.constexpr, PADDED_STATES: tl.constexpr, TILE: tl.constexpr, HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """S' = exp(step a) S + (step x) b, output S' c + skip x, for TILE rows of S [head width, state width]."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    read, write = tl.load(reads + row), tl.load(writes + row)
    rows, columns = tl.program_id(2) * TILE + tl.arange(0, TILE), tl.arange(0, PADDED_STATES)
    is_row, is_column = rows < WIDTH, columns < STATES
    value = tl.load(inputs + row * input_row + head * WIDTH + rows, mask=is_row, other=0).to(tl.float32)
    step = tl.load(steps + row * step_row + head * step_head).to(tl.float32)
    if HAS_BIAS:
        step += tl.load(dt_bias + head * bias_head).to(tl.float32)
    if SOFTPLUS:
        step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    own_b = tl.load(b + row * b_row + head // GROUP * STATES + columns, mask=is_column, other=0).to(tl.float32)
    own_c = tl.load(c + row * c_row + head // GROUP * STATES + columns, mask=is_column, other=0).to(tl.float32)
    is_there = is_row[:, None] & is_column[None, :]
    SIZE: tl.constexpr = HEADS * WIDTH * STATES
    at = head * WIDTH * STATES + rows[:, None] * STATES + columns[None, :]
    states = tl.load(pool + read * SIZE + at, mask=is_there & (read != NULL_SLOT), other=0.0)
    states = states * tl.exp(step * tl.load(a + head * a_head).to(tl.float32))
    states += (step * value)[:, None] * own_b[None, :]
    result = tl.sum(states * own_c[None, :], 1)
    if SKIPS:
        result += tl.load(skip + head * skip_head).to(tl.float32) * value
    tl.debug_barrier()
    tl.store(pool + write * SIZE + at, states, mask=is_there)
    to = output + (row * HEADS + head) * WIDTH + rows
    tl.store(to, result.to(output.dtype.element_ty), mask=is_row)


class TritonStateKernels:
    """Functions called like `transformers`' own, with a pool [num_slots, ...] as the state.

    For the arguments see `StateKernels` of `cpp_states`. They raise ValueError for sizes that they do not serve, before
    anything is changed.

    Attributes:
        reads, writes: [num_sequences] int64, the slots of the next calls.
        by_name: name of a function in `transformers` -> the kind of state that it updates, and our function.
        prefills: empty: a GPU's prefills run as in `transformers`.
    """

    def __init__(self) -> None:
        self.prefills: dict[str, Callable[..., Any]] = {}
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
        """Outputs [num_sequences, channels, 1] of a convolution by channel."""
        num_sequences, num_channels, length = inputs.shape
        if length != 1 or activation not in (None, "silu", "swish") or weight.shape != pool.shape[1:]:
            raise ValueError(f"a convolution of {length} tokens, {tuple(weight.shape)}, with {activation!r}")
        _check_pool(pool)
        output, width = inputs.new_empty(num_sequences, num_channels, 1), weight.shape[1]
        with torch.cuda.device_of(inputs):
            _convolve[(num_sequences, triton.cdiv(num_channels, CHANNELS))](
                inputs, pool, weight.contiguous(), bias, output, self.reads, self.writes, inputs.stride(0),
                inputs.stride(1), num_channels, WIDTH=width, PADDED=triton.next_power_of_2(width), CHANNELS=CHANNELS,
                HAS_BIAS=bias is not None, SILU=activation is not None,
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
        """Outputs [num_sequences, 1, value heads, value width] of the gated delta rule, and the pool."""
        num_sequences, length, key_heads, key_width = key.shape
        value_heads, value_width = value.shape[2:]
        if length != 1 or query.shape != key.shape or key_width > MAX_WIDTH:
            raise ValueError(f"queries {tuple(query.shape)} and keys {tuple(key.shape)}")
        _check_pool(initial_state, torch.float32)
        rows = [each.reshape(num_sequences, -1) for each in (query, key, value, g, beta)]
        rows = [each if each.stride(1) == 1 else each.contiguous() for each in rows]
        output = value.new_empty(num_sequences, 1, value_heads, value_width)
        padded = triton.next_power_of_2(key_width)
        tile = min(triton.next_power_of_2(value_width), max(16, TILE // padded))
        with torch.cuda.device_of(value):
            _apply_delta_rule[(num_sequences, value_heads, triton.cdiv(value_width, tile))](
                *rows, initial_state, output, self.reads, self.writes, *(each.stride(0) for each in rows),
                key_width**-0.5, HEADS=value_heads, GROUP=value_heads // key_heads, KEYS=key_width, PADDED_KEYS=padded,
                VALUES=value_width, TILE=tile, BY_KEY=g.dim() == 4, NORMALISES=use_qk_l2norm_in_kernel,
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
        """Outputs [num_sequences, heads, head width] of Mamba-2's state space."""
        dt_bias, z = options.get("dt_bias"), options.get("z")
        num_sequences, num_heads, width = inputs.shape
        num_groups, state_width = B.shape[1:]
        check_of_heads(dt, A, D, dt_bias)
        if state_width > MAX_WIDTH:
            raise ValueError(f"a state space with {num_heads} heads of {width} by {state_width}")
        _check_pool(pool, torch.float32)
        rows = [each.reshape(num_sequences, -1) for each in (inputs, B, C)]
        rows = [each if each.stride(1) == 1 else each.contiguous() for each in rows]
        output = inputs.new_empty(num_sequences, num_heads, width)
        padded = triton.next_power_of_2(state_width)
        tile = min(triton.next_power_of_2(width), max(16, TILE // padded))
        with torch.cuda.device_of(inputs):
            _apply_state_space[(num_sequences, num_heads, triton.cdiv(width, tile))](
                rows[0], dt, dt_bias, A, rows[1], rows[2], D, pool, output, self.reads, self.writes, rows[0].stride(0),
                dt.stride(0), rows[1].stride(0), rows[2].stride(0), dt.stride(1),
                0 if dt_bias is None else dt_bias.stride(0), A.stride(0), 0 if D is None else D.stride(0),
                HEADS=num_heads, GROUP=num_heads // num_groups, WIDTH=width, STATES=state_width, PADDED_STATES=padded,
                TILE=tile, HAS_BIAS=dt_bias is not None, SOFTPLUS=bool(options.get("dt_softplus")), SKIPS=D is not None,
            )  # fmt: skip
        return output if z is None else output * F.silu(z)


def _check_pool(pool: Tensor, dtype: torch.dtype | None = None) -> None:
    if not pool.is_contiguous() or (dtype is not None and pool.dtype != dtype):
        raise ValueError(f"states of {pool.dtype} with strides {pool.stride()}")


def load_state_kernels() -> TritonStateKernels:
    return TritonStateKernels()
