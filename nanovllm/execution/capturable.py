"""Obstacles to capturing a model's forward pass in a CUDA graph: its experts, or copies from and to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanovllm.attention.operator import AttentionStep, NoAttention
from nanovllm.execution.buckets import MIN_ROWS
from nanovllm.model import experts
from nanovllm.model.binding import ModelBinding
from nanovllm.model.mixers import Mixers

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
