"""A recurrent layer ("mixer") of a model, and the cache through which it reads and writes its states."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

from nanovllm.model import modules_of

if TYPE_CHECKING:
    from nanovllm.features.states.state_chunks import ChunkFunctions

# Types of layers in configs, besides those with attention alone, and whether such a layer attends too.
LAYER_TYPES = {
    "hybrid": True, "hybrid_sliding": True,
    "linear_attention": False, "conv": False, "mamba": False, "moe": False, "mlp": False,
}  # fmt: skip
_STATE_METHODS = {"update_conv_state", "update_recurrent_state"}  # methods of a cache

# A forward's argument with the cache, by release of `transformers`.
_CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")

StateName = tuple[str, int]  # "conv_states" or "recurrent_states" of the library's cache layer, and a number there


def recurrent_modules(model: nn.Module) -> list[nn.Module]:
    """Modules with states in a cache: their forward calls a method of a cache for states."""
    found = []
    for module in modules_of(model):
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and not _STATE_METHODS.isdisjoint(code.co_names):
            found.append(module)
    return found


@dataclass(slots=True, eq=False)
class StateLayer:
    """One mixer with its states.

    chunk: rows that its prefill computes at a time; results round alike if chunks of prompts start on multiples.
    states: shape of one sequence's state, and dtype; empty before the probe.
    example: arguments of a call by name, from the probe.
    goes_on: True if its prefill reads states; without that a prompt's later chunks are computed row by row.
    """

    module: nn.Module
    chunk: int
    arguments: list[str]  # names of its forward's arguments
    cache_argument: str
    states: dict[StateName, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    example: dict[str, Any] = field(default_factory=dict)
    goes_on: bool = True
    kernel_forward: Callable[..., Any] | None = None  # its forward for decodes, with kernels for its functions
    in_place: frozenset[StateName] = frozenset()  # states that these kernels update in their slots
    chunks: ChunkFunctions | None = None  # functions that compute several chunks in one call
    chunk_forward: Callable[..., Any] | None = None  # its forward with these

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

    @property
    def functions(self) -> dict[str, Any]:
        """The globals that its forward names."""
        forward: Any = inspect.unwrap(type(self.module).forward)
        return {name: forward.__globals__[name] for name in forward.__code__.co_names if name in forward.__globals__}

    def with_functions(
        self, by_name: Mapping[str, tuple[str, Callable[..., Any]]]
    ) -> tuple[Callable[..., Any], frozenset[StateName]]:
        """Its forward with other functions in the place of globals, and the states that these update.

        Args:
            by_name: name of a global -> kind of state, function.

        The forward's code is shared, with other globals, so other modules of the class keep theirs.
        """
        forward: Any = inspect.unwrap(type(self.module).forward)
        used = {name: each for name, each in by_name.items() if name in forward.__code__.co_names}
        own = forward.__globals__ | {name: function for name, (_, function) in used.items()}
        copied = FunctionType(forward.__code__, own, forward.__name__, forward.__defaults__, forward.__closure__)
        copied.__kwdefaults__ = forward.__kwdefaults__
        kinds = {kind for kind, _ in used.values()}
        return MethodType(copied, self.module), frozenset(name for name in self.states if name[0] in kinds)

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


class CacheStates(LinearAttentionLayer):
    """The library's layer of a cache, with recurrent states that are assigned instead of copied.

    Args:
        are_slots: the states that it holds are slots of a pool: new ones are copied there.
    """

    def __init__(self, num_states: int, *, are_slots: bool = False) -> None:
        super().__init__(number_of_states=num_states)
        self._are_slots = are_slots

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        held = self.recurrent_states[state_idx]
        if self._are_slots and held is not None:
            return held.copy_(recurrent_states)
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
