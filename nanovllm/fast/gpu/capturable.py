"""Finds the parts of a forward pass that CUDA graphs can capture: its experts, copies, head, hooks and addresses."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanovllm.attention import AttentionStep
from nanovllm.fast.attention.no_attention import NoAttention
from nanovllm.features.costs.buckets import MIN_ROWS
from nanovllm.features.live_modules.module_watch import tensors_of
from nanovllm.features.states.mixers import Mixers
from nanovllm.model import ModelBinding, modules_of
from nanovllm.models import experts
from nanovllm.probe import PassProbe

logger = logging.getLogger("nanovllm")

# Operators with a result size that the host has to read.
_SIZED_BY_VALUES = {"nonzero", "masked_select", "unique_dim", "_unique2", "bincount"}


class HostTransfers(TorchDispatchMode):
    """Finds operators that wait for the device or move data to or from it; `found` describes the first."""

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2].partition(".")[0]
        places = {leaf.device.type for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)}
        if name in ("_to_copy", "copy_") and len(places) > 1:
            self._note(f"copies a tensor between {' and '.join(sorted(places))} ({name})")
        elif places - {"cpu"} and (name == "_local_scalar_dense" or name in _SIZED_BY_VALUES):
            self._note(f"reads what the device computed on the host ({name})")
        return result

    def _note(self, what: str) -> None:
        self.found = self.found or what


def why_not_captured(binding: ModelBinding, block_size: int) -> str | None:
    """Why a CUDA graph cannot capture a step of the model, in words; None if one can. Runs a pass of a few rows."""
    reason = experts.why_not_captured(binding.model)
    if reason is not None:
        return reason
    binding.caches.allocate(2 * block_size)
    try:
        rows = torch.zeros(MIN_ROWS, dtype=torch.int64, device=binding.device)
        step = AttentionStep(NoAttention(), MIN_ROWS)
        if isinstance(binding.mixers, Mixers):
            binding.mixers.set_decodes(rows, rows)
        binding.forward_step(step, rows, rows, rows, rows)  # the first call also creates buffers
        with HostTransfers() as transfers:
            binding.forward_step(step, rows, rows, rows, rows)
    finally:
        binding.release_caches()
    if transfers.found is None:
        return None
    return f"the forward pass of {type(binding.model).__name__} {transfers.found}"


def weight_addresses(binding: ModelBinding) -> list[int]:
    """The address of each parameter and buffer."""
    return [tensor.data_ptr() for tensor in tensors_of(modules_of(binding.model))]


def runs_whole(binding: ModelBinding) -> bool:
    """Whether the coming step cannot be one that was captured: a live module has hooks, or rows are given."""
    if binding.passes.given is not None and binding.passes.given.is_whole:
        return True
    return binding.is_live and any(m._forward_hooks or m._forward_pre_hooks for m in modules_of(binding.model))


def splits_head(binding: ModelBinding) -> bool:
    """Whether hidden states and head, run separately, give the same logits; tried on a few tokens, on all ranks."""
    with binding.probing(PassProbe()):
        splits = binding.passes.has_base_model and _computes_parts(binding)
        return splits if binding.ranks is None else bool(binding.ranks.agree(splits))


def _computes_parts(binding: ModelBinding) -> bool:
    passes = binding.passes
    positions = torch.arange(4, device=binding.device)[None]
    try:
        whole = passes.logits(positions, positions, positions[0]).clone()
        return torch.equal(whole, passes.head(passes.hidden_states(positions, positions).clone()))
    except Exception as error:  # whatever a model's own code raises
        logger.info("%s computes its head with its layers alone: %s", type(binding.model).__name__, error)
        return False
