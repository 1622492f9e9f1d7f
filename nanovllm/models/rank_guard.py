"""Checks at load that sharded layers compute the whole model's outputs: one layer of each kind, in float32.

A plan covers matrix products only. A norm or statistic over a sharded width gives wrong numbers without an error.
In float32 both sides agree to 1e-6, so a larger difference is an error. Half precision would hide errors of some
percent, and a comparison of whole models would accumulate rounding.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AttentionInterface

from nanovllm.features.ranks.ranks import Ranks
from nanovllm.features.ranks.sharding import PART_OF_LAYER, plan_shards
from nanovllm.features.unsupported import unsupported
from nanovllm.model import AttributePatches, redirected_to
from nanovllm.models.experts import EXPERTS
from nanovllm.models.guard import FULL, first_difference, plain_tokens

DENSE_NAME = "nanovllm-dense"  # the library builds no mask for a name without a mask function
NUM_ROWS = 8
_OWN_NUMBER = re.compile(r"layer_?(idx|id|index|number)|idx|index")


def dense_function(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Replaces attention: causal, over this rank's heads, without other traits, which the probe checks."""
    states = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return states.transpose(1, 2), None


AttentionInterface.register(DENSE_NAME, dense_function)


class _AllReached(Exception):
    """Ends a forward pass before the last layer to be recorded runs."""


@dataclass(slots=True)
class _LayerCall:
    """A decoder layer and the arguments of one call.

    Attributes:
        blocks: names of its submodules with sharded parts and unsharded outputs.
    """

    name: str
    layer: nn.Module
    blocks: list[str]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None  # None before the call

    def moved_to(self, device: torch.device) -> list[Any]:
        """Arguments and keyword arguments, floats in float32; dictionaries, which layers write to, are not copied."""

        def move(value: Any) -> Any:
            return value.to(device, _float32_if_float(value)) if isinstance(value, Tensor) else value

        return tree_map(move, [self.args, self.kwargs], is_leaf=_is_inner_dictionary(self.kwargs))

    def outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Outputs [num_rows, width] of the blocks and the layer, from a float32 copy of the layer."""
        layer = copy.deepcopy(self.layer).float()
        found = {}

        def keep(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                states = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
                found[f"outputs of {name} ({type(module).__name__})"] = states.flatten(0, -2).cpu()

            return hook

        for block in self.blocks:
            layer.get_submodule(block).register_forward_hook(keep(f"{self.name}.{block}"))
        layer.register_forward_hook(keep(self.name))
        layer(*args, **kwargs)
        return found


class RankGuard:
    """Reference outputs of a model's layers, recorded before sharding; `check` compares the ranks with them.

    Costs on a CPU: a pass of a few tokens up to the last kind of layer (for most models the first layer), and the
    memory of one layer in float32.
    """

    def __init__(self, model: Any, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks
        self._calls = _layers_to_compare(model, ranks.size)
        self._expected: list[dict[str, Tensor]] = []
        with _dense_attention(model):
            _record_arguments(self._calls, model)
            self._calls = [call for call in self._calls if call.kwargs is not None]
            if ranks.rank == 0:  # saves the other ranks the memory
                cpu = torch.device("cpu")
                self._expected = [call.outputs(*call.moved_to(cpu)) for call in self._calls]

    def check(self) -> None:
        """Raise UnsupportedModelError, on every rank, if a sharded layer's outputs differ from the reference."""
        seen = None
        with _dense_attention(self._model):
            for index, call in enumerate(self._calls):
                args, kwargs = call.moved_to(self._ranks.device)
                for leaf in tree_leaves([args, kwargs]):  # ranks may have rounded differently: threads, half precision
                    if isinstance(leaf, Tensor) and leaf.is_floating_point():
                        self._ranks.broadcast(leaf)
                try:
                    found = call.outputs(args, kwargs)
                except Exception as error:  # any error of the model's code, on each rank alike
                    seen = seen or f"{call.name} could not run: {error}"
                    break
                if self._expected:
                    seen = seen or first_difference(found, self._expected[index], FULL)
        if not self._ranks.agree(seen is None):
            raise unsupported("other results on ranks", type(self._model).__name__, seen or "seen on another rank")


@contextmanager
def _dense_attention(model: nn.Module) -> Iterator[None]:
    patches = AttributePatches()
    device = next(model.parameters()).device
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        try:
            patches.apply(redirected_to(model, DENSE_NAME, EXPERTS))
            yield
        finally:
            patches.undo()


def _layers_to_compare(model: Any, size: int) -> list[_LayerCall]:
    """The first layer of each kind with sharded parts, without arguments yet."""
    found: dict[Any, _LayerCall] = {}
    shared: dict[str, list[str]] = {}  # the plan's names, by layer
    for shard in plan_shards(model, size):
        if match := PART_OF_LAYER.fullmatch(shard.name):
            shared.setdefault(match[1], []).append(match[2])
    for name, parts in shared.items():
        layer = model.get_submodule(name)
        found.setdefault(_kind(layer), _LayerCall(name, layer, _blocks(layer, parts)))
    return list(found.values())


def _kind(layer: nn.Module) -> str:
    """Key of a kind of layer: classes, parameter shapes and plain attributes of its modules, without weights."""
    facts: list[Any] = []
    for name, module in layer.named_modules():
        shapes = [(key, tuple(value.shape), value.dtype) for key, value in module.named_parameters(recurse=False)]
        plain = [
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, (bool, int, float, str)) and not _OWN_NUMBER.fullmatch(key)
        ]
        facts.append((name, type(module).__qualname__, shapes, plain))
    return repr(facts)


def _blocks(layer: nn.Module, parts: list[str]) -> list[str]:
    """The outermost submodules of a layer that contain sharded parts."""
    found: dict[str, None] = {}
    for part in parts:
        names = part.split(".")
        for end in range(1, len(names)):
            block = ".".join(names[:end])
            if not isinstance(layer.get_submodule(block), (nn.ModuleList, nn.ModuleDict)):  # these are never called
                found[block] = None
                break
    return list(found)


def _record_arguments(calls: list[_LayerCall], model: Any) -> None:
    """Record each layer's arguments in a pass of a few tokens; layers that text does not reach get none."""
    missing = {call.layer: call for call in calls}

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = missing.pop(layer, None)
        if call is not None:
            call.args = args
            call.kwargs = kwargs
        if not missing:
            raise _AllReached

    hooks = [call.layer.register_forward_pre_hook(record, with_kwargs=True) for call in calls]
    device = next(model.parameters()).device
    token_ids = torch.tensor([plain_tokens(model, NUM_ROWS)], device=device)
    positions = torch.arange(NUM_ROWS, device=device)[None]
    try:
        with suppress(_AllReached):
            model(input_ids=token_ids, position_ids=positions, use_cache=False, return_dict=True)
    finally:
        for hook in hooks:
            hook.remove()


def _is_inner_dictionary(outer: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and value is not outer


def _float32_if_float(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.is_floating_point() else tensor.dtype
