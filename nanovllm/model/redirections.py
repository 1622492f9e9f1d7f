"""Attributes patched on all modules and configs of a model while an engine or a probe runs its forward pass."""

from __future__ import annotations

from typing import Any

from torch import nn

from nanovllm.model.experts import redirected_experts
from nanovllm.model.module_watch import modules_of
from nanovllm.model.patches import Change


def redirected_to(model: nn.Module, attention_name: str) -> list[Change]:
    """Changes that select an attention implementation, our experts, eval mode and uncompiled calls.

    The owner's compiled calls would be recompiled for our passes.
    """
    changes: list[Change] = []
    configs: dict[int, Any] = {}
    for module in modules_of(model):
        attributes = vars(module)
        if attributes["training"]:
            changes.append((attributes, "training", False))
        if attributes.get("_compiled_call_impl") is not None:
            changes.append((attributes, "_compiled_call_impl", None))
        config = attributes.get("config")
        if hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
    changes += [(vars(config), "_attn_implementation_internal", attention_name) for config in configs.values()]
    return changes + redirected_experts(configs.values())
