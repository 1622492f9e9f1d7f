"""Chunks of several sequences in one call of a recurrent layer, by functions that replace its own.

The layer's projections and norms run once over the rows of all chunks. Its functions that mix rows get them here, with
the states of the chunks' slots. On a CPU a C++ kernel takes the rows as they are. Else the library's own function gets
a batch: sequences with equally many of the tokens that it computes at a time, padded by rows that change no state::

    flat rows   | a a a a a a a | b b b | c c c c |
    in chunks of 4      [2, 8]: a a a a a a a .        [2, 4]: b b b .
                                                               c c c c
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from nanovllm.device import to_device

CALL_SIZES = 8  # short chunks in a call of a step of few rows
_IN_POOL = torch.empty(0)  # stands for states that are in their slots already; Kimi's layers convert it


class Chunk(NamedTuple):
    """Rows of one sequence, and its slots; None to read where it begins."""

    rows: slice
    read: int | None
    write: int

    @property
    def length(self) -> int:
        return self.rows.stop - self.rows.start


class Slots(NamedTuple):
    """Slots of some chunks, [num_chunks] int64.

    begins: [num_chunks], whether a chunk begins its sequence; None if none does.
    """

    reads: Tensor
    writes: Tensor
    begins: Tensor | None

    @classmethod
    def of_chunks(cls, chunks: Sequence[Chunk], device: torch.device) -> Slots:
        reads = [chunk.read or 0 for chunk in chunks]
        writes = [chunk.write for chunk in chunks]
        begins = [chunk.read is None for chunk in chunks]
        found = [to_device(np.array(values), device) for values in (reads, writes, begins)]
        return cls(found[0], found[1], found[2] if any(begins) else None)

    def read(self, pool: Tensor) -> Tensor:
        """States before the chunks, [num_chunks, ...]; 0 where a sequence begins."""
        states = pool[self.reads]
        if self.begins is not None:
            states[self.begins] = 0
        return states

    def write(self, pool: Tensor, states: Tensor) -> None:
        pool[self.writes] = states.to(pool.dtype)


class Group(NamedTuple):
    """Chunks that one call of the library's function computes.

    places: [num_chunks, length], the row of each among the rows of all chunks; padding repeats a row.
    is_padding: [num_chunks, length]; None if there is none.
    """

    slots: Slots
    places: Tensor
    is_padding: Tensor | None


class StepChunks:
    """The chunks of a step, as one part of it."""

    is_batch = False

    def __init__(self, chunks: Sequence[Chunk], device: torch.device) -> None:
        self.chunks = chunks
        self._device = device
        self.lengths = [chunk.length for chunk in chunks]
        self.starts = list(itertools.accumulate(self.lengths, initial=0))
        self.num_rows = self.starts[-1]
        first = chunks[0].rows.start
        end = chunks[-1].rows.stop
        self._neighbours = slice(first, end) if end - first == self.num_rows else None
        self._groups: dict[int, tuple[list[Group], Tensor]] = {}
        self.slots = Slots.of_chunks(chunks, device)
        self.first_rows = to_device(np.array(self.starts), device)

    def take(self, values: Tensor) -> Tensor:
        """The chunks' rows of [1, num_rows, ...]."""
        if self._neighbours is not None:
            return values[:, self._neighbours]
        return torch.cat([values[:, chunk.rows] for chunk in self.chunks], 1)

    def put(self, result: Tensor, output: Tensor) -> None:
        for chunk, start in zip(self.chunks, self.starts, strict=False):
            output[:, chunk.rows] = result[:, start : start + chunk.length]

    def groups(self, size: int) -> tuple[list[Group], Tensor]:
        """Chunks by number of times that `size` rows are computed, and where the results of all groups have each row.

        The latter is [num_rows], for results of the groups one after another, padding included.
        """
        if size not in self._groups:
            by_count: dict[int, list[int]] = {}
            for index, chunk in enumerate(self.chunks):
                by_count.setdefault(-(-chunk.length // size), []).append(index)
            most = max(self.num_rows, CALL_SIZES * size)  # places, so that padding takes no more memory than one chunk
            parts = [
                (count, members[first : first + num_members])
                for count, members in by_count.items()
                for num_members in [max(1, most // (count * size))]
                for first in range(0, len(members), num_members)
            ]
            groups = []
            found = np.zeros(self.num_rows, np.int64)
            num_places = 0
            for count, members in parts:
                starts, lengths = (np.array(values)[members, None] for values in (self.starts, self.lengths))
                numbers = np.arange(count * size)[None]
                places = starts + np.minimum(numbers, lengths - 1)
                is_padding = numbers >= lengths
                found[places[~is_padding]] = num_places + np.flatnonzero(~is_padding)
                num_places += places.size
                slots = Slots.of_chunks([self.chunks[index] for index in members], self._device)
                padding = to_device(is_padding, self._device) if is_padding.any() else None
                groups.append(Group(slots, to_device(places, self._device), padding))
            self._groups[size] = groups, to_device(found, self._device)
        return self._groups[size]


class ChunkFunctions:
    """A layer's functions for prefills, over the chunks of a step and the pool of its states.

    Args:
        functions: functions of the layer's module, by name.
        size: rows that the layer computes at a time.
        kernels: `StateKernels` that replace the library's own functions; None for none.

    Attributes:
        kernels: the argument.
        by_name: functions that replace those of the module, each with the kind of state that it updates.
    """

    def __init__(self, functions: dict[str, Callable[..., Any]], size: int, kernels: Any) -> None:
        self._own = functions
        self._size = size
        self.kernels = kernels
        self._pool: dict[tuple[str, int], Tensor] = {}
        self._number = 0  # index of the convolution's state
        self.chunks: StepChunks
        ours: dict[str, tuple[str, Callable[..., Any]]] = {
            "causal_conv1d_fn": ("conv_states", self._convolution),
            "torch_chunk_gated_delta_rule": ("recurrent_states", self._delta_rule("torch_chunk_gated_delta_rule")),
            "chunk_kimi_delta_attention": ("recurrent_states", self._delta_rule("chunk_kimi_delta_attention")),
            "mamba2_chunk_scan": ("recurrent_states", self._state_space),
        }
        for name, function in {} if kernels is None else kernels.prefills.items():
            ours[name] = "recurrent_states", partial(self._by_kernel, function)
        self.by_name = {name: function for name, function in ours.items() if name in functions}

    def begin(self, chunks: StepChunks, pool: dict[tuple[str, int], Tensor]) -> LinearAttentionLayer:
        """Set the chunks and the states of the next call; returns the layer of its cache."""
        self.chunks = chunks
        self._pool = pool
        return _NoStates(self, 1 + max(number for _, number in pool))

    def convolves(self, number: int) -> None:
        """The next convolution has the state with this number."""
        self._number = number

    def _convolution(self, inputs: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Args: inputs: [1, channels, num_rows]."""
        pool = self._pool["conv_states", self._number]
        chunks = self.chunks
        if self.kernels is not None:
            with self.kernels.over_chunks(chunks.slots.reads, chunks.slots.writes, chunks.first_rows):
                output: Tensor = self.kernels.convolution(inputs, pool, weight, *args, **kwargs)
            return output
        width = pool.shape[-1]
        states = chunks.slots.read(pool).to(inputs.dtype)
        pieces = inputs[0].split(chunks.lengths, 1)
        extended = [torch.cat(pair, 1) for pair in zip(states.unbind(0), pieces, strict=True)]
        chunks.slots.write(pool, torch.stack([piece[:, -width:] for piece in extended]))
        found = self._own["causal_conv1d_fn"](torch.cat(extended, 1)[None], weight, *args, **kwargs)
        lengths = [length for own in chunks.lengths for length in (width, own)]
        return torch.cat(found.split(lengths, 2)[1::2], 2)

    def _by_kernel(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        pool = self._pool["recurrent_states", 0]
        slots = self.chunks.slots
        with self.kernels.over_chunks(slots.reads, slots.writes, self.chunks.first_rows):
            output: Tensor = function(*args, **(kwargs | {"initial_state": pool, "initial_states": pool}))[0]
        return output, _IN_POOL

    def _delta_rule(self, name: str) -> Callable[..., tuple[Tensor, Tensor]]:
        def compute(
            query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            """Args: query, key, value, g, beta: [1, num_rows, heads, ...]."""

            def run(parts: list[Tensor], states: Tensor) -> tuple[Tensor, Tensor]:
                decay, rate = parts[3:]
                options = kwargs | {"initial_state": states, "output_final_state": True}
                result: tuple[Tensor, Tensor] = self._own[name](*parts[:3], g=decay, beta=rate, **options)
                return result

            # Rows without decay and rate change no state.
            return self._in_groups([query, key, value, g, beta], (3, 4), run), _IN_POOL

        return compute

    def _state_space(
        self, inputs: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Args: inputs, dt, B, C: [1, num_rows, ...]."""
        bias = kwargs.pop("dt_bias", None)
        limits = kwargs.pop("dt_limit", (0.0, float("inf")))
        step = dt if bias is None else dt + bias.to(dt.dtype)
        step = F.softplus(step) if kwargs.pop("dt_softplus", False) else step
        step = torch.clamp(step, *limits)
        options = kwargs | {"return_final_states": True}

        def run(parts: list[Tensor], states: Tensor) -> tuple[Tensor, Tensor]:
            own_inputs, own_step, own_b, own_c = parts
            result: tuple[Tensor, Tensor] = self._own["mamba2_chunk_scan"](
                own_inputs, own_step, A, own_b, own_c, **(options | {"initial_states": states})
            )
            return result

        return self._in_groups([inputs, step, B, C], (1,), run), _IN_POOL  # a step of 0 changes no state

    def _in_groups(
        self,
        values: list[Tensor],
        cleared: Sequence[int],
        run: Callable[[list[Tensor], Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Outputs [1, num_rows, ...] of `run` for each group; writes the states that it returns.

        Args:
            values: [1, num_rows, ...]; `run` gets [num_members, length, ...] of each.
            cleared: indices of the values that are 0 in padding.
        """
        pool = self._pool["recurrent_states", 0]
        results = []
        groups, places_of_rows = self.chunks.groups(self._size)
        for slots, places, is_padding in groups:
            parts = [value[0][places] for value in values]
            for index in cleared if is_padding is not None else ():
                parts[index][is_padding] = 0
            result, states = run(parts, slots.read(pool))
            slots.write(pool, states)
            results.append(result.flatten(0, 1))
        return (results[0] if len(results) == 1 else torch.cat(results))[places_of_rows][None]


class _NoStates(LinearAttentionLayer):
    """The layer of a cache without states: the functions above have them."""

    def __init__(self, functions: ChunkFunctions, num_states: int) -> None:
        super().__init__(number_of_states=num_states)
        self._functions = functions

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        self._functions.convolves(state_idx)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor | None, state_idx: int = 0, **_: Any) -> Tensor | None:
        return recurrent_states
