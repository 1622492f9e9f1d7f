"""Chooses how an engine's steps are computed, for the composition root, and imports no more than that."""

from __future__ import annotations

from typing import Any

from nanovllm.fast.attention.backends import AttentionChoice
from nanovllm.fast.fast_draws import sampler_parts
from nanovllm.model import ModelBinding
from nanovllm.model_runner import StepPaths


class LivePaths(StepPaths):
    """Steps by the model's own modules, as for a live module; only draws are faster."""

    def sampler_parts(self, choice: AttentionChoice) -> dict[str, Any]:
        return sampler_parts(build_stage=self.build_stage)


def choose_paths(choice: AttentionChoice, binding: ModelBinding) -> StepPaths:
    """The paths of a model and its backend; plain `StepPaths` where no other would differ."""
    if choice.uses_graphs:
        from nanovllm.fast.graph_paths import GraphPaths

        return GraphPaths(has_mixers=bool(binding.mixers))
    if binding.is_live and not (choice.compiles or choice.kernels or binding.mixers):
        return LivePaths()
    from nanovllm.fast.paths import FastPaths

    return FastPaths()
