"""Recurrent layers ("mixers": linear attention, state spaces, convolutions) over a pool of states.

A mixer reads and writes its states (the last inputs of a convolution, a recurrent matrix) through the cache of
`transformers`. In a step our call takes the place of its `forward`: the module's own forward runs once for all decodes
and once for each chunk, over a cache that holds the states of their slots::

    flat rows   | a  b  c | d  d  d  d | e  e |
    calls       [3, 1, H]   [1, 4, H]    [1, 2, H]      states gathered from read slots, scattered to write slots
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from nanovllm.core.batch_layout import BatchLayout
from nanovllm.core.config import EngineConfig
from nanovllm.core.device_limits import BLOCK_SIZES, DEVICE_DEFAULTS
from nanovllm.model.patches import Change
from nanovllm.model.unsupported import unsupported
from nanovllm.process.device import to_device

logger = logging.getLogger("nanovllm")

# A forward's argument with the cache, by release of `transformers`.
_CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")

StateName = tuple[str, int]  # "conv_states" or "recurrent_states" of the library's cache layer, and a number there


@dataclass(slots=True, eq=False)
class StateLayer:
    """One mixer with its states.

    chunk: rows that its prefill computes at a time; results round alike if chunks of prompts start on multiples.
    states: shape of one sequence's state, and dtype; empty before the probe.
    goes_on: whether its prefill takes states into account; else a prompt's later chunks are computed row by row.
    """

    module: nn.Module
    chunk: int
    arguments: list[str]  # of its forward
    cache_argument: str
    states: dict[StateName, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    goes_on: bool = True

    @classmethod
    def from_module(cls, module: nn.Module) -> StateLayer | None:
        """None for a forward that takes no cache."""
        forward: Any = inspect.unwrap(type(module).forward)
        parameters = inspect.signature(forward).parameters.values()
        arguments = [each.name for each in parameters if each.name != "self" and each.kind is not each.VAR_KEYWORD]
        cache_argument = next((name for name in _CACHE_ARGUMENTS if name in arguments), None)
        return None if cache_argument is None else cls(module, _chunk_of(module, forward), arguments, cache_argument)

    @property
    def num_bytes(self) -> int:
        """Bytes of one sequence's states."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.states.values())

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, without the cache and without keyword arguments for other modules."""
        given = dict(zip(self.arguments, args, strict=False))
        given |= {name: value for name, value in kwargs.items() if name in self.arguments}
        given.pop(self.cache_argument, None)
        return given


def _chunk_of(module: nn.Module, forward: Any) -> int:
    """The module's chunk_size (Mamba-2), or the default of the function that it calls (the delta rule)."""
    if isinstance(own := getattr(module, "chunk_size", None), int):
        return own
    called = (forward.__globals__.get(name) for name in forward.__code__.co_names)
    sizes = [inspect.signature(each).parameters.get("chunk_size") for each in called if inspect.isfunction(each)]
    return max((size.default for size in sizes if size is not None and isinstance(size.default, int)), default=1)


class StatePart(NamedTuple):
    """Rows of a step that one call of a mixer computes.

    rows: of the flat batch; a sequence each if `is_batch`, else the chunk of one sequence.
    reads, writes: [num_sequences] int64 slots; reads is None for a sequence that begins.
    """

    rows: slice | Tensor
    is_batch: bool
    reads: Tensor | None
    writes: Tensor | None

    def take(self, values: Tensor) -> Tensor:
        """Rows of [1, num_rows, ...] as [num_sequences, length, ...]."""
        return values[0, self.rows].unsqueeze(1) if self.is_batch else values[:, self.rows]

    def by_row(self) -> list[StatePart]:
        """A part for each row of a chunk."""
        if not isinstance(self.rows, slice) or self.is_batch:
            return [self]
        return [self._replace(rows=slice(row, row + 1)) for row in range(self.rows.start, self.rows.stop)]

    def put(self, result: Tensor, output: Tensor) -> None:
        if self.is_batch:
            output[0, self.rows] = result[:, 0]
        else:
            output[:, self.rows] = result


_EACH_ROW = StatePart(slice(None), True, None, None)
_TWO_ROWS = StatePart(slice(2), False, None, None)


def parts_of(layout: BatchLayout, device: torch.device) -> list[StatePart]:
    """The parts of a step, of the layout of the group of states."""
    entries, num_decodes, bounds = layout.entries, layout.num_decodes, layout.row_starts.tolist()
    assert layout.state_reads is not None and layout.state_writes is not None
    reads, writes = to_device(np.stack([layout.state_reads, layout.state_writes]), device)
    begins = [entry.start == 0 for entry in entries]
    parts = []
    if not any(begins[:num_decodes]):
        if num_decodes:
            parts.append(StatePart(slice(0, num_decodes), True, reads[:num_decodes], writes[:num_decodes]))
    elif going_on := [index for index in range(num_decodes) if not begins[index]]:
        rows = torch.tensor(going_on, device=device)
        parts.append(StatePart(rows, True, reads[rows], writes[rows]))
    for index in range(len(entries)):
        if index >= num_decodes or begins[index]:
            own, rows_of = slice(index, index + 1), slice(bounds[index], bounds[index + 1])
            parts.append(StatePart(rows_of, False, None if begins[index] else reads[own], writes[own]))
    return parts


class _States(LinearAttentionLayer):
    """The library's layer of a cache, with states that are assigned instead of copied."""

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states

    def hold(self, name: StateName, state: Tensor) -> None:
        kind, index = name
        getattr(self, kind)[index] = state
        getattr(self, f"is_{kind}_initialized")[index] = self.has_previous_state[index] = True
        if kind == "conv_states":
            self.conv_kernel_size[index] = state.shape[-1]

    def held(self) -> Iterator[tuple[StateName, Tensor]]:
        for kind in ("conv_states", "recurrent_states"):
            for index, state in getattr(self, kind).items():
                if state is not None:
                    yield (kind, index), state


class Mixers:
    """The mixers of a model; false if its forward pass has none.

    Args:
        recurrent: from `recurrent_modules`.

    Attributes:
        found: modules with states; the forward pass may leave out some of them.
        layers: those of the forward pass, in its order, once a probe has run.
    """

    def __init__(self, model: Any, recurrent: Sequence[nn.Module]) -> None:
        config = model.config.get_text_config(decoder=True)
        self._name = type(model).__name__
        self._num_layers = getattr(config, "num_hidden_layers", 1)
        self._num_states = getattr(config, "number_of_conv_states", 1)
        self.found = [layer for module in recurrent if (layer := StateLayer.from_module(module)) is not None]
        self.layers: list[StateLayer] = []
        self._parts: list[StatePart] = []

    def __bool__(self) -> bool:
        return bool(self.layers)

    @property
    def chunk(self) -> int:
        """Number of rows; all mixers round alike at its multiples."""
        return math.lcm(*(layer.chunk for layer in self.layers))

    @property
    def num_bytes(self) -> int:
        """Bytes of one sequence's states in all layers."""
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

    @property
    def shapes(self) -> list[list[tuple[tuple[int, ...], torch.dtype]]]:
        """Shape and dtype of each layer's states."""
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
        states = self._new_states()
        result = self._call(layer, forward, layer.named(args, kwargs), _EACH_ROW, states, None)
        if is_first:
            layer.states = {name: (tuple(state.shape[1:]), state.dtype) for name, state in states.held()}
            layer.goes_on = self._goes_on(layer, forward, layer.named(args, kwargs))
        self._call(layer, forward, layer.named(args, kwargs), _EACH_ROW, states, None)  # now as decodes
        return result

    def _goes_on(self, layer: StateLayer, forward: Callable[..., Any], given: dict[str, Any]) -> bool:
        """Whether each state has an effect on a prefill of two rows; that of Mamba-1 begins with none."""
        device = given[layer.arguments[0]].device

        def run(changed: StateName | None) -> Tensor:
            states = self._new_states()
            for name, (shape, dtype) in layer.states.items():
                states.hold(name, torch.full((1, *shape), float(name == changed), dtype=dtype, device=device))
            output = self._call(layer, forward, given, _TWO_ROWS, states, None)
            return torch.cat([part[:, :2].flatten() for part in (output if isinstance(output, tuple) else (output,))])

        without = run(None)
        return not any(torch.equal(run(name), without) for name in layer.states)

    # ------------------------------------------------------------------------------------------------------ steps

    def begin_step(self, layout: BatchLayout, device: torch.device) -> None:
        """Args: layout: of the group of states."""
        self._parts = parts_of(layout, device)

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
        for part in self._parts:
            states = self._new_states()
            if part.reads is not None:
                for name, slots in zip(layer.states, pool, strict=True):
                    states.hold(name, slots.index_select(0, part.reads))
            for rows in [part] if layer.goes_on or part.reads is None else part.by_row():
                output = self._call(layer, forward, given, rows, states, output)
            found = dict(states.held())
            assert part.writes is not None
            for name, slots in zip(layer.states, pool, strict=True):
                slots.index_copy_(0, part.writes, found[name].to(slots.dtype))
        return output

    def _new_states(self) -> _States:
        return _States(number_of_states=self._num_states)

    def _call(
        self,
        layer: StateLayer,
        forward: Callable[..., Any],
        given: dict[str, Any],
        part: StatePart,
        states: _States,
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
        if output is None:  # padding rows stay 0
            made = tuple(each.new_zeros(1, num_rows, *each.shape[2:]) for each in results)
            output = made if isinstance(result, tuple) else made[0]
        for each, whole in zip(results, output if isinstance(output, tuple) else (output,), strict=True):
            part.put(each, whole)
        return output
