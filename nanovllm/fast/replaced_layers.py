"""Replaces the calls of a model's layers by faster ones, each compared with the modules before it is used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nanovllm.device import find_kernel
from nanovllm.errors import NotFusedError
from nanovllm.fast.layers.compiled_layers import compile_calls
from nanovllm.fast.layers.decoder_block import model_parts
from nanovllm.fast.layers.dense_layers import uncompiled_calls
from nanovllm.fast.layers.direct_pass import DirectPass, Trial
from nanovllm.fast.layers.layer_equations import RECORDING_NAME
from nanovllm.fast.layers.merged_linears import merging
from nanovllm.fast.layers.rotary_attention import RotaryAttention, fuse_rotary
from nanovllm.fast.layers.stacked_layers import may_stack_layers, stacked_layers
from nanovllm.features.states.mixers import Mixers
from nanovllm.model import ModelBinding
from nanovllm.models import packed_linears
from nanovllm.models.experts import pack_experts
from nanovllm.probe import PassProbe

if TYPE_CHECKING:
    from nanovllm.fast.kernels.cpp import Kernels

logger = logging.getLogger("nanovllm")


class FastLayers:
    """The faster calls of one binding; none of them is for a live module, except compiled layers."""

    def __init__(self, binding: ModelBinding) -> None:
        self._binding = binding

    def pack_weights(self, kernels: Kernels | None, max_rows: int, *run_batches: Callable[[], Any]) -> None:
        """Fuse decoder layers where possible, and pack the other linear layers. Not for a live module.

        Args:
            kernels: None packs for oneDNN and fuses nothing.
            max_rows: most rows of a step that fused layers serve, as in `fuse_layers`.
            run_batches: runners of the batches by which layers, and then whole passes, are compared.
        """
        binding = self._binding
        memory = None if kernels is None else packed_linears.memory_for_packing(binding.model)
        follows_model = binding.ranks is None and getattr(binding.passes, "head_layer", None) is None
        if kernels is not None and binding.passes_keywords and follows_model:
            from nanovllm.fast.layers.fused_layers import fuse_layers

            try:
                binding.install(RECORDING_NAME)
                binding.fused_layers = fuse_layers(
                    binding.layer_modules, binding.layers,
                    [(keys, values) for keys, values in binding.caches.of_layers], kernels,
                    max_rows=max_rows, run_batches=run_batches[0],
                    on_fused=lambda fused: packed_linears.free_weights(fused.linears, binding.unshared),
                    memory=memory,
                )  # fmt: skip
            except NotFusedError as error:
                logger.info("layers run as they are: %s", error)
        binding.uninstall()
        packed = {linear for layer in binding.fused_layers for linear in layer.linears}
        if kernels is not None:
            pack_experts(binding.model, kernels)
        packed_linears.pack_linear_layers(
            binding.model, kernels, unshared=binding.unshared, packed=packed, memory=memory
        )
        self._find_direct_pass(run_batches[1])

    def _find_direct_pass(self, run_batches: Callable[[], Any]) -> None:
        """Use a direct pass for engine steps, or else a stack of layers, if trials give the same bits."""
        model = self._binding.model
        passes = self._binding.passes
        layers = self._binding.fused_layers
        stack = layers[0].stack if layers else None
        if stack is None:
            return
        parts = model_parts(model)
        direct = None if parts is None else DirectPass(parts, stack)
        passes.direct = trial = Trial(passes.logits, stack, direct)
        try:
            run_batches()
        finally:
            passes.direct = None
            stack.is_on, passes.direct = trial.outcome()
        if passes.direct is None:
            how = "all layers in one call" if stack.is_on else "one layer after another"
            logger.info("steps run through the forward pass of %s, %s", type(model).__name__, how)

    def merge_linears(self) -> None:
        """Merge linear layers that read the same input into one product. Not for a live module."""
        binding = self._binding
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=binding.device)
        with merging(binding.model, binding.layer_modules), binding.probing(PassProbe()):
            binding.passes.logits(tokens, tokens, 0)

    def fuse_rotary(self) -> None:
        """Let one kernel compute norms of q and k, rotary embedding and KV write; after `merge_linears`."""
        binding = self._binding
        if (rotate := find_kernel("rotary", "rotate_and_store")) is None:
            return
        fused: dict[nn.Module, RotaryAttention] = {}
        try:
            fused = fuse_rotary(binding.layers, rotate, binding.probing, partial(binding.passes.logits, sample_rows=0))
        except NotFusedError as error:
            logger.info("attention modules run as they are: %s", error)
        if binding.ranks is not None and not binding.ranks.agree(bool(fused)):
            return
        for children in [parent._modules for parent in binding.model.modules()]:
            binding.rotary_changes += [
                (children, name, fused[child]) for name, child in children.items() if child in fused
            ]

    def compile_layers(self) -> None:
        """Compile the decoder layers, and on a GPU the small modules around them, at their first calls."""
        binding = self._binding
        logger.warning("compiling the layers of %s: some seconds", type(binding.model).__name__)
        if not binding.is_live:  # a live module has no quantised weights
            packed_linears.warn_of_dequantising(binding.model)
        mixers = binding.mixers
        layers = binding.layer_modules
        if isinstance(mixers, Mixers):
            layers = mixers.without(layers)
        binding.calls = compile_calls(binding.model, layers)
        binding.min_rows = 2

    def use_kernel_layers(self, *run_steps: Callable[[], Any]) -> bool:
        """Run layers by our kernels instead of compiled, if `run_steps` show the same results; whether they do."""
        binding = self._binding
        if not binding.rotary_changes or not may_stack_layers(binding):
            return False
        layers = binding.layer_modules, binding.layers, binding.rotary_changes
        find = partial(uncompiled_calls, binding.model, *layers)
        if (calls := self._compared("layers are compiled", find, *run_steps)) is not None:
            binding.calls = calls
        return calls is not None

    def stack_layers(self, block_size: int, run_decodes: Callable[[], Any]) -> None:
        """Run all layers in one launch in steps of few decodes, if `run_decodes` shows the same results."""
        binding = self._binding
        if may_stack_layers(binding):
            layers = binding.layer_modules, binding.layers, binding.caches.of_layers
            find = partial(stacked_layers, *layers, block_size)
            binding.stacked = self._compared("steps of few decodes run layer by layer", find, run_decodes)
        if binding.stacked is not None:
            binding.calls = binding.stacked.layered_calls | binding.stacked.calls()

    def _compared(self, otherwise: str, find: Callable[..., Any], *run_batches: Callable[[], Any]) -> Any:
        """Layers from `find`, which runs the batches with `comparing_calls`; None if they compute something else."""
        binding = self._binding
        before = binding.calls
        binding.uninstall()  # restores the modules for their inspection

        def compare(form: Any, number: int = 0) -> None:
            binding.calls = form.comparing_calls()
            binding.install(RECORDING_NAME)  # stays installed for the batches
            with form.equations.watching():
                run_batches[number]()

        try:
            return find(before, compare=compare)
        except NotFusedError as error:
            logger.info("%s: %s", otherwise, error)
        finally:
            binding.uninstall()
            binding.calls = before
