"""Shards a model among ranks by transformers' plan: slices parameters, and hooks all-reduces to the sliced modules.

Nothing else of a module changes. Attention modules derive their heads from the shapes of q, k and v, so they run with
fewer heads, and the KV cache holds only those::

    column-wise   weight [out / size, in]     a rank has some heads, or some of the MLP's channels
    row-wise      weight [out, in / size]     a rank has a part of each sum; an all-reduce follows
    head          weight [vocab / size, in]   a rank has the logits of some tokens

The embedding is not sharded: a step reads few of its rows, and an unsharded lookup needs no all-reduce.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.errors import UnsupportedModelError
from nanovllm.features.ranks.ranks import Ranks, all_reduce, gather_columns
from nanovllm.features.states.state_layers import recurrent_modules
from nanovllm.features.unsupported import unsupported
from nanovllm.model import ModelBinding
from nanovllm.probe import PassProbe

logger = logging.getLogger("nanovllm")

_ALIASES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
_REPLICATED = {"replicated_with_grad_allreduce", "replicate", "embedding_rowwise"}
_OF_LINEARS = {"colwise", "rowwise", "colwise_gather_output", "rowwise_split_input"}
_OF_EXPERTS = {"packed_colwise", "rowwise", "moe_tp_experts"}
_OF_HEADS = {"colwise_gather_output", "rowwise_split_input"}
_PARTS = "rank_parts"  # attribute of a module: name of its parameter -> WeightPart
_OF_KEYS_AND_VALUES = ("k_proj", "v_proj")
PART_OF_LAYER = re.compile(r"(.*?\.\d+)\.(.*)")  # path of a layer in a ModuleList, and of a module or parameter in it


@dataclass(frozen=True, slots=True)
class Shard:
    """One module or parameter of the plan: its name, sharding style, and the module (a parameter's owner)."""

    name: str
    style: str
    module: nn.Module


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A rank's part of a weight.

    shape: shape of the whole weight.
    cut: function that takes the part from the whole weight.
    names: names in the state dict that the whole weight has, such as those of tied embeddings.
    """

    shape: tuple[int, ...]
    cut: Callable[[Tensor], Tensor]
    names: tuple[str, ...] = ()


class ShardedHead:
    """Language model head with `width` tokens per rank; the last rank's rows may be padded.

    Attributes:
        is_split: the model returns this rank's logits [n, width]; else the head gathers them to [n, num_tokens].
    """

    def __init__(self, linear: nn.Linear, ranks: Ranks) -> None:
        self.num_tokens = linear.out_features
        self.width = -(-self.num_tokens // ranks.size)
        self.is_split = False
        self._ranks = ranks
        _slice_columns(linear, ranks, self.width)
        linear.register_forward_hook(self._gather)

    def _gather(self, module: nn.Module, inputs: Any, logits: Tensor) -> Tensor:
        return logits if self.is_split else self.whole(logits)

    def whole(self, logits: Tensor) -> Tensor:
        """Gathers every rank's logits [..., width] to [..., num_tokens]."""
        return gather_columns(logits, self._ranks.handle)[..., : self.num_tokens]


def split_logits(binding: ModelBinding, ranks: Ranks, head: ShardedHead) -> None:
    """Let a model return only this rank's logits, if they equal the slice of the whole ones (elementwise)."""
    split = binding.passes.with_logits_of(head.width)
    positions = torch.arange(4, device=binding.device)[None]
    with binding.probing(PassProbe()):
        expected = binding.passes.logits(positions, positions, positions[0]).clone()
        head.is_split = True
        parts = None
        try:
            parts = split.logits(positions, positions, positions[0])
        except Exception as error:  # whatever a model's own code raises
            logger.info("%s computes its logits whole: %s", type(binding.model).__name__, error)
        head.is_split = (
            ranks.agree(parts is not None)
            and parts is not None
            and ranks.agree(torch.equal(head.whole(parts)[:, : expected.shape[1]], expected))
        )
    if head.is_split:
        binding.passes = split
        binding.head_shards = head


def shard_model(model: Any, ranks: Ranks) -> ShardedHead | None:
    """Slice every parameter of the plan to this rank's part; returns the head if it is sharded.

    The model's `rank_parts` maps names of its state dict to `WeightPart`s afterwards.

    Raises UnsupportedModelError as `plan_shards`.
    """
    head: ShardedHead | None = None
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    names_of = {name: tuple(tied) for tied in names.values() for name in tied}
    config = model.config.get_text_config(decoder=True)
    with torch.no_grad():
        for shard in plan_shards(model, ranks.size):
            if shard.module is model.get_output_embeddings() and shard.style == "colwise_gather_output":
                assert isinstance(shard.module, nn.Linear)
                head = ShardedHead(shard.module, ranks)
            elif isinstance(shard.module, nn.Linear):
                _shard_linear(shard, ranks, config)
            else:
                _shard_experts(shard, ranks)
    model.rank_parts = {
        (full := f"{prefix}.{name}"): replace(part, names=names_of[full])
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, part in vars(module).get(_PARTS, {}).items()
    }
    return head


def plan_shards(model: Any, size: int) -> list[Shard]:
    """The plan's shards, one per module or parameter of `model`, which may be on the meta device.

    Raises UnsupportedModelError, naming the cause, for a model with recurrent states or without a plan, an
    unimplemented style, and sizes not divisible by the number of ranks.
    """
    name = type(model).__name__
    plan = getattr(model, "_tp_plan", None) or {}
    if recurrent_modules(model):
        raise unsupported("states on ranks", name)
    if not any(_ALIASES.get(style, style) in _OF_LINEARS for style in plan.values()) or not _has_layers(plan):
        raise unsupported("no plan", name)
    if getattr(model.config, "quantization_config", None) is not None:
        raise UnsupportedModelError(f"{name} is quantised, which tensor_parallel_size > 1 does not serve. Set it to 1.")
    head = model.get_output_embeddings()
    shards = [shard for pattern, style in plan.items() for shard in _matches(model, pattern, style)]
    for shard in shards:
        is_checked = PART_OF_LAYER.fullmatch(shard.name) or (shard.module is head and shard.style in _OF_HEADS)
        if not is_checked or not _is_understood(shard):  # `RankGuard` compares layers; a head is only gathered
            seen = f"{shard.name} sharded as {shard.style!r}, of {type(shard.module).__name__}"
            raise unsupported("part of the plan", name, seen)
    possible = _possible_sizes(model, shards)
    if size not in possible:
        config = model.config.get_text_config(decoder=True)
        raise UnsupportedModelError(
            f"tensor_parallel_size is {size}, but {name} has {config.num_attention_heads} attention heads, "
            f"{_num_kv_heads(config)} key and value heads and layers that do not divide among so many ranks. It can "
            f"be {', '.join(map(str, possible))}."
        )
    return shards


def _has_layers(plan: dict[str, str]) -> bool:
    return any("*" in pattern for pattern in plan)


def _matches(model: nn.Module, pattern: str, style: str) -> list[Shard]:
    style = _ALIASES.get(style, style)
    if style in _REPLICATED:
        return []
    expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    found = [Shard(name, style, module) for name, module in model.named_modules() if expression.fullmatch(name)]
    for name, _ in model.named_parameters():
        if expression.fullmatch(name):
            found.append(Shard(name, style, model.get_submodule(name.rpartition(".")[0])))
    return found


def _is_understood(shard: Shard) -> bool:
    if isinstance(shard.module, nn.Linear):
        return type(shard.module) is nn.Linear and shard.style in _OF_LINEARS
    parameter = _own_parameter(shard)
    if parameter is None:
        return shard.style == "moe_tp_experts"
    is_transposed = getattr(shard.module, "is_transposed", False)
    return shard.style in _OF_EXPERTS and parameter.dim() == 3 and not is_transposed


def _own_parameter(shard: Shard) -> nn.Parameter | None:
    """The parameter, if the plan names a parameter."""
    return shard.module._parameters.get(shard.name.rpartition(".")[2])


# ---------------------------------------------------------------------------------------------------------- sizes


def _num_kv_heads(config: Any) -> int:
    return getattr(config, "num_key_value_heads", None) or int(config.num_attention_heads)


def _possible_sizes(model: Any, shards: list[Shard]) -> list[int]:
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    sizes = (size for size in range(1, heads + 1) if heads % size == 0)
    return [size for size in sizes if all(_divides(shard, size, config) for shard in shards)]


def _divides(shard: Shard, size: int, config: Any) -> bool:
    parameter = _own_parameter(shard)
    if isinstance(shard.module, nn.Linear):
        if shard.style == "colwise_gather_output":  # padding makes it divisible
            return True
        if shard.style != "colwise":
            return shard.module.in_features % size == 0
        if _holds_keys_or_values(shard):
            num_heads = _num_kv_heads(config)
            return num_heads % size == 0 or size % num_heads == 0
        return shard.module.out_features % size == 0
    if parameter is None:
        return True
    return int(parameter.shape[-2] // 2 if shard.style == "packed_colwise" else parameter.shape[-1]) % size == 0


def _holds_keys_or_values(shard: Shard) -> bool:
    return shard.name.endswith(_OF_KEYS_AND_VALUES)


# --------------------------------------------------------------------------------------------------------- slices


def _shard_linear(shard: Shard, ranks: Ranks, config: Any) -> None:
    linear: Any = shard.module
    handle = ranks.handle
    if shard.style == "colwise":
        num_heads = _num_kv_heads(config) if _holds_keys_or_values(shard) else ranks.size
        if num_heads % ranks.size:  # fewer heads than ranks: several ranks hold the same head
            width = linear.out_features // num_heads
            _keep_columns(linear, ranks.rank * num_heads // ranks.size * width, width)
        else:
            _slice_columns(linear, ranks, linear.out_features // ranks.size)
    elif shard.style == "colwise_gather_output":
        num_outputs = linear.out_features
        _slice_columns(linear, ranks, -(-num_outputs // ranks.size))
        linear.register_forward_hook(lambda _, inputs, states: gather_columns(states, handle)[..., :num_outputs])
    else:
        width = linear.in_features // ranks.size
        start = ranks.rank * width
        _keep(linear, "weight", partial(torch.narrow, dim=1, start=start, length=width))
        linear.in_features = width
        if linear.bias is not None and ranks.rank > 0:  # the all-reduce adds the bias once
            _keep(linear, "bias", torch.zeros_like)
        if shard.style == "rowwise_split_input":
            linear.register_forward_pre_hook(lambda _, inputs: (inputs[0][..., start : start + width],))
        linear.register_forward_hook(lambda _, inputs, states: all_reduce(states, handle))


def _slice_columns(linear: Any, ranks: Ranks, width: int) -> None:
    """Keep this rank's `width` outputs, padded with zeros after the last one."""
    _keep_columns(linear, ranks.rank * width, width)


def _keep_columns(linear: Any, start: int, width: int) -> None:
    for name in ("weight", "bias"):
        if getattr(linear, name) is not None:
            _keep(linear, name, partial(_rows_of, start=start, width=width))
    linear.out_features = width


def _rows_of(values: Tensor, *, start: int, width: int) -> Tensor:
    kept = values[start : start + width]
    padding = values.new_zeros(width - len(kept), *values.shape[1:])
    return torch.cat([kept, padding])


def _shard_experts(shard: Shard, ranks: Ranks) -> None:
    parameter = _own_parameter(shard)
    handle = ranks.handle
    if parameter is None:
        shard.module.register_forward_hook(lambda _, inputs, states: all_reduce(states, handle))
        return
    is_packed = shard.style == "packed_colwise"
    width = (parameter.shape[1] // 2 if is_packed else parameter.shape[2]) // ranks.size
    cut = _gate_and_up_of if is_packed else partial(torch.narrow, dim=2)
    _keep(shard.module, shard.name.rpartition(".")[2], partial(cut, start=ranks.rank * width, length=width))


def _gate_and_up_of(values: Tensor, *, start: int, length: int) -> Tensor:
    """A part of gate and a part of up, of values [num_experts, gate and up, in]."""
    half = values.shape[1] // 2
    return torch.cat([values[:, at : at + length] for at in (start, half + start)], dim=1)


def _keep(module: nn.Module, name: str, cut: Callable[[Tensor], Tensor]) -> None:
    """Replace a parameter by a copied part of it, so that the whole weight can be freed."""
    whole = module._parameters[name]
    assert whole is not None
    module._parameters[name] = nn.Parameter(cut(whole.detach()).clone(), requires_grad=False)
    vars(module).setdefault(_PARTS, {})[name] = WeightPart(tuple(whole.shape), cut)
