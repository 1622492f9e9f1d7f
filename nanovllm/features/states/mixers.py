"""Recurrent layers ("mixers": linear attention, state spaces, convolutions) over a pool of states.

A mixer reads and writes its states (the last inputs of a convolution, a recurrent matrix) through the cache of
`transformers`. In a step our call takes the place of its `forward`: the module's own forward runs once for all decodes
and once for all chunks, over a cache that holds the states of their slots::

    flat rows   | a  b  c | d  d  d  d  e  e |
    calls       [3, 1, H]   [1, 6, H]

Functions that know where each chunk begins take the place of the module's (`state_chunks`); a module without such
functions runs once for each chunk, and its states are views of the slot. States of decodes are gathered from the read
slots and scattered to the write slots, unless kernels read and write them there (`state_kernels`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from nanovllm.batch import NULL_BLOCK
from nanovllm.config import BLOCK_SIZES, DEVICE_DEFAULTS
from nanovllm.device import to_device
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.states.state_chunks import Chunk, StepChunks
from nanovllm.features.states.state_layers import CacheStates, StateLayer, StateName
from nanovllm.features.unsupported import unsupported
from nanovllm.kv_cache import StateShapes
from nanovllm.layout import BatchLayout
from nanovllm.model import Change, StateLayers

if TYPE_CHECKING:
    from nanovllm.fast.kernels.cpp_states import StateKernels
    from nanovllm.fast.kernels.triton_states import TritonStateKernels

logger = logging.getLogger("nanovllm")


class StatePart(NamedTuple):
    """Rows of a step that one call of a mixer computes.

    rows: rows of the flat batch: one a sequence if `is_batch`, else the chunk of one sequence.
    reads, writes: slots, [num_sequences] int64, or the one slot of a chunk; reads is None for a sequence that begins.
    may_begin: True if sequences may begin, with 0 as the null block's state: a graph serves steps of any sequences.
    """

    rows: slice | Tensor
    is_batch: bool
    reads: Any
    writes: Any
    may_begin: bool = False

    def take(self, values: Tensor) -> Tensor:
        """Rows of [1, num_rows, ...] as [num_sequences, length, ...]."""
        return values[0, self.rows].unsqueeze(1) if self.is_batch else values[:, self.rows]

    def by_row(self) -> list[StatePart]:
        """A part for each row of a chunk."""
        if not isinstance(self.rows, slice) or self.is_batch:
            return [self]
        return [self._replace(rows=slice(row, row + 1)) for row in range(self.rows.start, self.rows.stop)]

    def states(self, slots: Tensor) -> Tensor:
        """A copy of the states that a batch reads, of a pool [num_slots, ...]."""
        states = slots[self.reads]
        if self.may_begin:
            begins = self.reads.eq(NULL_BLOCK)
            states.masked_fill_(begins.view(-1, *[1] * (states.dim() - 1)), 0)
        return states

    def put(self, result: Tensor, output: Tensor) -> None:
        if self.is_batch:
            output[0, self.rows] = result[:, 0]
        else:
            output[:, self.rows] = result


_EACH_ROW = StatePart(slice(None), True, None, slice(0))
_TWO_ROWS = StatePart(slice(2), False, None, slice(0))


def parts_of(layout: BatchLayout, device: torch.device, num_padding: int = 0) -> list[StatePart]:
    """The parts of a step, of the layout of the group of states.

    Args:
        num_padding: rows between decodes and chunks.
    """
    entries, num_decodes, bounds = layout.entries, layout.num_decodes, layout.row_starts.tolist()
    assert layout.state_reads is not None and layout.state_writes is not None
    slots = np.stack([layout.state_reads, layout.state_writes])
    reads, writes = to_device(slots, device)
    begins = [entry.start == 0 for entry in entries]
    parts = []
    may_begin = device.type != "cpu"  # its kernels read zeros from the null block
    if may_begin:
        begins[:num_decodes] = [False] * num_decodes
    if not any(begins[:num_decodes]):
        if num_decodes:
            slots_of = reads[:num_decodes], writes[:num_decodes]
            parts.append(StatePart(slice(0, num_decodes), True, *slots_of, may_begin))
    elif going_on := [index for index in range(num_decodes) if not begins[index]]:
        rows = torch.tensor(going_on, device=device)
        parts.append(StatePart(rows, True, reads[rows], writes[rows]))
    for index in range(len(entries)):
        if index >= num_decodes or begins[index]:
            read, write = (slice(slot, slot + 1) for slot in slots[:, index].tolist())
            shift = num_padding if index >= num_decodes else 0
            rows_of = slice(bounds[index] + shift, bounds[index + 1] + shift)
            parts.append(StatePart(rows_of, False, None if begins[index] else read, write))
    return parts


class Mixers(StateLayers):
    """The mixers of a model; false if its forward pass has none.

    Args:
        recurrent: modules with states, from `recurrent_modules`.

    Attributes:
        found: modules with states; the forward pass may leave out some of them.
        layers: those of the forward pass, in its order, once a probe has run.
        kernels: kernels for decodes of layers that have a `kernel_forward`; see `state_kernels`.
    """

    def __init__(self, model: Any, recurrent: Sequence[nn.Module]) -> None:
        config = model.config.get_text_config(decoder=True)
        self._name, self.device = type(model).__name__, next(model.parameters()).device
        self._num_layers = getattr(config, "num_hidden_layers", 1)
        self._num_states = getattr(config, "number_of_conv_states", 1)
        self.found = [layer for module in recurrent if (layer := StateLayer.from_module(module)) is not None]
        self.layers: list[StateLayer] = []
        self._parts: list[StatePart] = []
        self._chunks: StepChunks | None = None  # the chunks of this step
        self.kernels: StateKernels | TritonStateKernels | None = None

    def __bool__(self) -> bool:
        return bool(self.layers)

    @property
    def chunk(self) -> int:
        """Number of rows; all mixers round alike at its multiples."""
        return math.lcm(*(layer.chunk for layer in self.layers))

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)

    def fitted(self, config: EngineConfig, device_type: str) -> EngineConfig:
        """Set the block size to a multiple of the rows that the mixers compute at a time.

        States are kept at ends of blocks; from there a prompt goes on with the same chunks, and the same rounding.
        Raises ValueError for one that the user set otherwise.
        """
        slow = sorted({type(layer.module).__name__ for layer in self.layers if not layer.goes_on})
        if slow:
            logger.warning(
                "recurrent layers of %s take no state into a prefill: prompts beyond a step's max_num_batched_tokens "
                "go on token by token. Set it to at least the longest prompt.", ", ".join(slow),
            )  # fmt: skip
        chunk = self.chunk
        fitting = [size for size in BLOCK_SIZES if size % chunk == 0]
        if chunk == 1 or (config.block_size is None and not fitting):
            return config
        if config.block_size is None:
            usual = DEVICE_DEFAULTS[device_type].block_size
            size = next((size for size in fitting if size >= usual), fitting[-1])
            logger.info("block_size is %d, for recurrent layers that compute %d tokens at a time", size, chunk)
            return replace(config, block_size=size)
        if fitting and config.block_size not in fitting:
            raise ValueError(
                f"block_size is {config.block_size}, but recurrent layers of {self._name} compute {chunk} tokens at a "
                f"time, and their states are kept at ends of blocks. Set it to {' or '.join(map(str, fitting))}, or "
                "leave it out."
            )
        return config

    def without(self, layers: Sequence[nn.Module]) -> list[nn.Module]:
        """The decoder layers that hold no mixer."""
        mixers = {layer.module for layer in self.layers}
        return [layer for layer in layers if mixers.isdisjoint(layer.modules())]

    @property
    def shapes(self) -> StateShapes:
        return [list(layer.states.values()) for layer in self.layers]

    # ----------------------------------------------------------------------------------------------------- probes

    def probing_changes(self) -> list[Change]:
        """Mixers that compute each row as a sequence, so that a probe sees rows which do not mix."""
        return [
            (vars(layer.module), "forward", partial(self._run_apart, layer, layer.module.forward, not layer.states))
            for layer in self.found
        ]

    def _run_apart(
        self, layer: StateLayer, forward: Callable[..., Any], is_first: bool, *args: Any, **kwargs: Any
    ) -> Any:
        if is_first:
            if layer in self.layers:
                name = type(layer.module).__name__
                raise unsupported("repeated layers", f"a layer with a recurrent state ({name})")
            self.layers.append(layer)
        states = CacheStates(self._num_states)
        result = self._call(layer, forward, layer.named(args, kwargs), _EACH_ROW, states, None)
        if is_first:
            layer.states = {name: (tuple(state.shape[1:]), state.dtype) for name, state in states.held()}
            layer.example = layer.named(args, kwargs)
            layer.goes_on = self._goes_on(layer, forward, layer.example)
        self._call(layer, forward, layer.named(args, kwargs), _EACH_ROW, states, None)  # now as decodes
        return result

    def _goes_on(self, layer: StateLayer, forward: Callable[..., Any], given: dict[str, Any]) -> bool:
        """Whether each state has an effect on a prefill of two rows; Mamba-1 begins with none."""
        device = given[layer.arguments[0]].device

        def run(changed: StateName | None) -> Tensor:
            states = CacheStates(self._num_states)
            for name, (shape, dtype) in layer.states.items():
                states.hold(name, torch.full((1, *shape), float(name == changed), dtype=dtype, device=device))
            output = self._call(layer, forward, given, _TWO_ROWS, states, None)
            return torch.cat([part[:, :2].flatten() for part in (output if isinstance(output, tuple) else (output,))])

        without = run(None)
        return not any(torch.equal(run(name), without) for name in layer.states)

    # ------------------------------------------------------------------------------------------------------ steps

    def begin_step(self, layout: BatchLayout, device: torch.device, num_padding: int = 0) -> None:
        """Sets the parts of a step; the arguments are those of `parts_of`."""
        if self.layers:
            self.set_parts(parts_of(layout, device, num_padding))

    def set_decodes(self, reads: Tensor, writes: Tensor) -> None:
        """The next step has decodes alone, with these slots [num_rows] int64, the null block for padding."""
        self.set_parts([StatePart(slice(0, len(reads)), True, reads, writes, may_begin=True)])

    def set_parts(self, parts: list[StatePart]) -> None:
        """The parts of the next step."""
        self._parts = parts
        chunks = [
            Chunk(part.rows, None if part.reads is None else part.reads.start, part.writes.start)
            for part in parts
            if isinstance(part.rows, slice) and not part.is_batch
        ]
        self._chunks = StepChunks(chunks, self.device) if chunks else None
        decodes = next((part for part in parts if part.is_batch), None)
        if self.kernels is not None and decodes is not None:
            self.kernels.reads, self.kernels.writes = decodes.reads, decodes.writes

    def step_changes(self, pools: list[list[Tensor]]) -> list[Change]:
        """Mixers over pools of states: of each layer [num_slots, ...] of each state."""
        return [
            (vars(layer.module), "forward", partial(self._run, layer, pool, layer.module.forward))
            for layer, pool in zip(self.layers, pools, strict=True)
        ]

    def _run(
        self, layer: StateLayer, pool: list[Tensor], forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        given, output = layer.named(args, kwargs), None
        # Not where the owner has set a forward.
        is_own = getattr(forward, "__func__", None) is type(layer.module).forward
        by_kernel = layer.kernel_forward if is_own else None
        together = self._chunks if is_own and layer.chunks is not None else None
        if together is not None:
            output = self.compute_chunks(layer, pool, given, together)
        for part in self._parts:
            if part.is_batch and by_kernel is not None:
                output = self.compute(layer, pool, by_kernel, given, part, output, in_place=layer.in_place)
            elif part.is_batch or together is None:
                output = self.compute(layer, pool, forward, given, part, output)
        return output

    def compute_chunks(self, layer: StateLayer, pool: list[Tensor], given: dict[str, Any], chunks: StepChunks) -> Any:
        """Run the chunks of a step in one call; returns the output of all rows, 0 in those of decodes."""
        assert layer.chunks is not None and layer.chunk_forward is not None
        states = layer.chunks.begin(chunks, dict(zip(layer.states, pool, strict=True)))
        return self._call(layer, layer.chunk_forward, given, chunks, states, None)

    def compute(
        self,
        layer: StateLayer,
        pool: list[Tensor],
        forward: Callable[..., Any],
        given: dict[str, Any],
        part: StatePart,
        output: Any,
        in_place: Collection[StateName] = (),
    ) -> Any:
        """Run one part with the states of its slots, and write the new ones; returns the output of all rows.

        Args:
            in_place: states that `forward` gets as a whole pool.
        """
        begins, states = part.reads is None, CacheStates(self._num_states, are_slots=not part.is_batch)
        for name, slots in zip(layer.states, pool, strict=True) if not begins else ():
            if name in in_place:
                state = slots
            elif part.is_batch:
                state = part.states(slots)
            else:
                state = slots[part.writes]  # a view: the module computes in place
                if part.reads != part.writes:
                    state.copy_(slots[part.reads])
            states.hold(name, state)
        for rows in [part] if layer.goes_on or begins else part.by_row():
            output = self._call(layer, forward, given, rows, states, output)
        if begins or part.is_batch:
            found = dict(states.held())
            for name, slots in zip(layer.states, pool, strict=True):
                if name not in in_place:
                    slots[part.writes] = found[name].to(slots.dtype)
        return output

    def _call(
        self,
        layer: StateLayer,
        forward: Callable[..., Any],
        given: dict[str, Any],
        part: StatePart | StepChunks,
        states: LinearAttentionLayer,
        output: Any,
    ) -> Any:
        """Run the module's own forward for one part; returns the output of all rows, made unless given."""
        num_rows = given[layer.arguments[0]].shape[1]
        own = {
            name: part.take(value) if isinstance(value, Tensor) and value.shape[:2] == (1, num_rows) else value
            for name, value in given.items()
        }
        result = forward(**own, **{layer.cache_argument: Cache(layers=[states] * self._num_layers)})
        results = result if isinstance(result, tuple) else (result,)
        if part.is_batch and len(results[0]) == num_rows:  # nothing but decodes
            turned = tuple(each.transpose(0, 1) for each in results)
            return turned if isinstance(result, tuple) else turned[0]
        if output is None:  # padding rows stay 0
            made = tuple(each.new_zeros(1, num_rows, *each.shape[2:]) for each in results)
            output = made if isinstance(result, tuple) else made[0]
        for each, whole in zip(results, output if isinstance(output, tuple) else (output,), strict=True):
            part.put(each, whole)
        return output
