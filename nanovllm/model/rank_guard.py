"""Checks at load that ranks together compute what the whole model does, one layer of each kind, in float32.

A plan says which products are shared, not what a model does between them: a norm or a statistic over a width of which a
rank has a part gives other numbers, and no error. Products of float32 round alike to 1e-6, so whatever differs by more
is wrong. Half precision would hide errors of some percent, and a trial of the whole model would add up roundings.
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

from nanovllm.model.guard import FULL, first_difference, plain_tokens
from nanovllm.model.patches import AttributePatches
from nanovllm.model.ranks import Ranks
from nanovllm.model.redirections import redirected_to
from nanovllm.model.sharding import PART_OF_LAYER, plan_shards
from nanovllm.model.unsupported import unsupported

DENSE_NAME = "nanovllm-dense"  # without a mask function of that name, the library builds no mask
NUM_ROWS = 8
_OWN_NUMBER = re.compile(r"layer_?(idx|id|index|number)|idx|index")


def dense_function(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Replaces attention: causal, over the heads that this rank has. Traits of layers are the probe's business."""
    states = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return states.transpose(1, 2), None


AttentionInterface.register(DENSE_NAME, dense_function)


class _AllReached(Exception):
    """Ends a forward pass in front of the last layer that is looked at."""


@dataclass(slots=True)
class _Sample:
    """A decoder layer with what it was called with.

    Attributes:
        blocks: names of its modules whose outputs are whole on every rank, though parts of them are shared.
    """

    name: str
    layer: nn.Module
    blocks: list[str]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None  # None until it is called

    def moved_to(self, device: torch.device) -> list[Any]:
        """Arguments and keyword arguments, floats in float32. Dictionaries, which layers write to, are the same."""

        def move(value: Any) -> Any:
            return value.to(device, _float32_if_float(value)) if isinstance(value, Tensor) else value

        return tree_map(move, [self.args, self.kwargs], is_leaf=_is_inner_dictionary(self.kwargs))

    def outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Outputs [num_rows, width] of the blocks and of the layer, computed by a copy in float32."""
        layer, found = copy.deepcopy(self.layer).float(), {}

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
    """What layers of a model compute whole, made before it is sharded; `check` compares the ranks with it.

    On a CPU it costs a pass of a few tokens through the layers up to the last kind (of most models: the first layer),
    and the memory of one layer in float32.
    """

    def __init__(self, model: Any, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        self._samples = _samples(model, ranks.size)
        self._expected: list[dict[str, Tensor]] = []
        with _dense_attention(model):
            _fill(self._samples, model)
            self._samples = [sample for sample in self._samples if sample.kwargs is not None]
            if ranks.rank == 0:  # the others need not have the memory
                cpu = torch.device("cpu")
                self._expected = [sample.outputs(*sample.moved_to(cpu)) for sample in self._samples]

    def check(self) -> None:
        """Raise UnsupportedModelError, on every rank, for a layer whose parts give other outputs than the whole."""
        seen = None
        with _dense_attention(self._model):
            for index, sample in enumerate(self._samples):
                args, kwargs = sample.moved_to(self._ranks.device)
                for leaf in tree_leaves([args, kwargs]):  # computed in half precision, by another number of threads
                    if isinstance(leaf, Tensor) and leaf.is_floating_point():
                        self._ranks.broadcast(leaf)
                try:
                    found = sample.outputs(args, kwargs)
                except Exception as error:  # whatever a model's own code raises, on each rank alike
                    seen = seen or f"{sample.name} could not run: {error}"
                    break
                if self._expected:
                    seen = seen or first_difference(found, self._expected[index], FULL)
        if not self._ranks.agree(seen is None):
            raise unsupported("other results on ranks", type(self._model).__name__, seen or "seen on another rank")


@contextmanager
def _dense_attention(model: nn.Module) -> Iterator[None]:
    patches, device = AttributePatches(), next(model.parameters()).device
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        try:
            patches.apply(redirected_to(model, DENSE_NAME))
            yield
        finally:
            patches.undo()


def _samples(model: Any, size: int) -> list[_Sample]:
    """The first layer of each kind with something shared in it, not called yet."""
    found: dict[Any, _Sample] = {}
    shared: dict[str, list[str]] = {}  # what the plan names, by layer
    for shard in plan_shards(model, size):
        if match := PART_OF_LAYER.fullmatch(shard.name):
            shared.setdefault(match[1], []).append(match[2])
    for name, parts in shared.items():
        layer = model.get_submodule(name)
        found.setdefault(_kind(layer), _Sample(name, layer, _blocks(layer, parts)))
    return list(found.values())


def _kind(layer: nn.Module) -> str:
    """What tells layers apart, whatever their weights: classes, shapes, and numbers and words among attributes."""
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
    """The outermost modules within a layer around what is shared."""
    found: dict[str, None] = {}
    for part in parts:
        names = part.split(".")
        for end in range(1, len(names)):
            block = ".".join(names[:end])
            if not isinstance(layer.get_submodule(block), (nn.ModuleList, nn.ModuleDict)):  # which are never called
                found[block] = None
                break
    return list(found)


def _fill(samples: list[_Sample], model: Any) -> None:
    """Take the arguments of each layer in a pass of a few tokens; layers that text does not reach have none."""
    missing = {sample.layer: sample for sample in samples}

    def take(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sample = missing.pop(layer, None)
        if sample is not None:
            sample.args, sample.kwargs = args, kwargs
        if not missing:
            raise _AllReached

    hooks = [sample.layer.register_forward_pre_hook(take, with_kwargs=True) for sample in samples]
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
