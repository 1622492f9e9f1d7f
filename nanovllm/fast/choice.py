"""Chooses how an engine's steps are computed, for the composition root, and imports no more than that."""

from __future__ import annotations

from functools import partial

from nanovllm.attention.backends import AttentionChoice
from nanovllm.model.binding import ModelBinding
from nanovllm.model_runner import StepPaths
from nanovllm.sampling.request_options import build_sampler
from nanovllm.sampling.sampler import Sampler


def choose_paths(choice: AttentionChoice, binding: ModelBinding) -> StepPaths:
    """The paths of a model and its backend, with a sampler of every option."""
    paths = _choose_paths(choice, binding)
    paths.build_sampler = partial(_build_sampler, choice, binding)
    return paths


def _choose_paths(choice: AttentionChoice, binding: ModelBinding) -> StepPaths:
    """One step by another, as the model is, where no other path would differ."""
    if choice.uses_graphs:
        from nanovllm.fast.graph_paths import GraphPaths

        return GraphPaths(has_mixers=bool(binding.mixers))
    if binding.is_live and not (choice.compiles or choice.kernels or binding.mixers):
        return StepPaths()
    from nanovllm.fast.paths import FastPaths

    return FastPaths()


def _build_sampler(choice: AttentionChoice, binding: ModelBinding) -> Sampler:
    """A sampler with the kernels of the device."""
    build, row_kernels = build_sampler, None
    if choice.kernels:
        from nanovllm.sampling.row_kernels import load_row_kernels

        row_kernels = load_row_kernels()
    if binding.ranks is not None:
        from nanovllm.execution.rank_sampler import RankSampler

        build = partial(build_sampler, partial(RankSampler, binding))
    return build(compiles=choice.uses_graphs, row_kernels=row_kernels)
