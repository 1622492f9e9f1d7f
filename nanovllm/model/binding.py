"""Hooks a `transformers` module to paged attention, and leaves it exactly as it was when unhooked."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from nanovllm.attention.kv_cache import KVCaches
from nanovllm.attention.operator import (
    ATTENTION_NAME,
    LAYER_CACHE,
    LAYER_ENGINE,
    STEP_HANDLE,
    STEP_SLOT_MAPPING,
    AttentionStep,
    attention_function,
    enter_step,
    leave_step,
)
from nanovllm.errors import UnsupportedModelError
from nanovllm.model.compiled_layers import compile_calls
from nanovllm.model.guard import check_rows
from nanovllm.model.merged_linears import merging
from nanovllm.model.packed_linears import free_weights, pack_linear_layers, plain_weights_hidden, with_own_weights
from nanovllm.model.patches import AttributePatches, Change
from nanovllm.model.probe import PROBE_NAME, AnyProbe, probe_function, probe_model, probing_with
from nanovllm.model.weight_watch import WeightsWatch, modules_of
from nanovllm.sampling.logprobs import StepLogprobs

if TYPE_CHECKING:
    from nanovllm.kernels.cpp import Kernels
    from nanovllm.model.fused_layers import FusedLayer

logger = logging.getLogger("nanovllm")

# No mask function is registered for these names, so the library builds no mask and never inspects positions.
AttentionInterface.register(ATTENTION_NAME, attention_function)
AttentionInterface.register(PROBE_NAME, probe_function)

_handles = itertools.count()
# Several engines may serve one module, from several threads: while one has it hooked, the others wait.
_module_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


class ModelBinding:
    """A model, its attention layers, and the means to put paged attention in force for the length of a step.

    Args:
        model: a causal language model of `transformers`, not copied and not changed outside of `installed`.
        is_live: True for a module that its owner goes on using (training): everything is undone after each step.

    Attributes:
        vocab_size: tokens that can be sampled: those with a row in the head and a row in the embedding.
    """

    def __init__(self, model: Any, *, is_live: bool) -> None:
        self.model = model
        self.is_live = is_live
        self.handle = next(_handles)
        with torch.inference_mode(False):
            # read inside the operator, on the host, whatever the owner's default device is
            self._handle_tensor = torch.tensor([self.handle], device="cpu")
        self._lock = _module_locks.setdefault(model, threading.RLock())
        self._compiled_calls: dict[nn.Module, Callable[..., Any]] = {}
        self._fused_layers: list[FusedLayer] = []
        self._patches = AttributePatches()
        self._is_installed = False
        probe = probe_model(model, self._probing)
        self.layers, self.window = probe.layers, probe.window
        self._passes_keywords = probe.passes_keywords
        self.vocab_size = check_rows(model, self._probing)
        self.caches = KVCaches(self.layers, self.device)
        self._layer_modules = self._decoder_layers()
        self.weights = WeightsWatch(model)

    def _configs(self) -> list[Any]:
        """Every config that an attention layer may read its implementation from."""
        found = (vars(module).get("config") for module in modules_of(self.model))
        configs = {id(config): config for config in found if hasattr(config, "_attn_implementation_internal")}
        return list(configs.values())

    def _decoder_layers(self) -> list[nn.Module]:
        """The module around each attention layer that is an item of a list of layers: the unit of compilation."""
        by_name = dict(self.model.named_modules())
        name_of = {id(module): name for name, module in by_name.items()}
        found = []
        for layer in self.layers:
            parts = name_of[id(layer.module)].split(".")
            for end in range(len(parts), 0, -1):
                if isinstance(by_name[".".join(parts[: end - 1])], nn.ModuleList):
                    found.append(by_name[".".join(parts[:end])])
                    break
        return found

    # ---------------------------------------------------------------------------------------------------- facts

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def has_base_model(self) -> bool:
        """Whether what computes the hidden states is a module by itself, and what makes logits of them is not in it."""
        base, head = self.model.base_model, self.model.get_output_embeddings()
        return base is not self.model and all(module is not head for module in modules_of(base))

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].dtype

    # ------------------------------------------------------------------------------------------------ in force

    def pack_weights(self, kernels: Kernels | None, max_rows: int, run_batches: Callable[[], Any]) -> None:
        """Fuse the layers, if they are of that kind, and pack what else is linear. Only for a model of our own.

        Args:
            kernels: None packs for oneDNN and fuses nothing.
            max_rows, run_batches: as of `fuse_layers`.
        """
        try:
            with plain_weights_hidden(self.model):
                probe_model(self.model, self._probing)
            unshared = with_own_weights(self.model)
        except UnsupportedModelError:  # some module reads a linear layer's weight by itself
            unshared = set()
        if kernels is not None and self._passes_keywords:
            from nanovllm.model.fused_layers import NotFusedError, fuse_layers

            try:
                self._fused_layers = fuse_layers(
                    self._layer_modules, self.layers, [(keys, values) for keys, values in self.caches.of_layers],
                    kernels, max_rows=max_rows, run_batches=run_batches,
                    on_fused=lambda fused: free_weights(fused.linears, unshared),
                )  # fmt: skip
            except NotFusedError as error:
                logger.info("layers run as they are: %s", error)
        self.uninstall()
        packed = {linear for layer in self._fused_layers for linear in layer.linears}
        pack_linear_layers(self.model, kernels, unshared=unshared, packed=packed)

    def merge_linears(self) -> None:
        """Compute linear layers that read the same input in one product. Only for a model of our own."""
        with merging(self.model, self._layer_modules):
            probe_model(self.model, self._probing)

    def weight_addresses(self) -> list[int]:
        """The address of each parameter and buffer."""
        return [
            tensor.data_ptr()
            for module in modules_of(self.model)
            for tensors in (module._parameters, module._buffers)
            for tensor in tensors.values()
            if tensor is not None
        ]

    def structure(self) -> int:
        """A hash of what an owner may set on a module besides weights: submodules, functions, flags."""
        parts: list[Any] = []
        for module in modules_of(self.model):
            parts.append(id(module))
            for name, value in vars(module).items():
                if name not in _NOT_STRUCTURE:
                    parts.append(value if isinstance(value, (bool, int, float, str, NoneType)) else id(value))
        return hash(tuple(parts))

    def has_hooks(self) -> bool:
        """Whether the owner of a live module wants to be called in its forward passes."""
        return self.is_live and any(
            module._forward_hooks or module._forward_pre_hooks for module in modules_of(self.model)
        )

    def compile_layers(self) -> None:
        """Compile the decoder layers, and on a GPU the small modules around them."""
        self._compiled_calls = compile_calls(self.model, self._layer_modules)

    @property
    def has_compiled_layers(self) -> bool:
        return bool(self._compiled_calls)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Paged attention, eval mode and compiled layers in force; for a live module, undone on leaving."""
        with self._lock:
            try:
                if not self._is_installed:
                    self.uninstall()  # what an interrupt may have left half done
                    self._install()
                with self._plain_arithmetic():
                    yield
            finally:
                if self.is_live:
                    self.uninstall()

    def _install(self) -> None:
        changes = self._quieting()
        changes += [(vars(config), "_attn_implementation_internal", ATTENTION_NAME) for config in self._configs()]
        for layer, cache in zip(self.layers, self.caches.of_layers, strict=True):
            changes.append((vars(layer.module), LAYER_CACHE, cache))
            if not self._passes_keywords:
                changes.append((vars(layer.module), LAYER_ENGINE, self.handle))
        for module, compiled in self._compiled_calls.items():
            changes.append((vars(module), "_compiled_call_impl", compiled))
        for module, fused in zip(self._layer_modules, self._fused_layers, strict=False):
            changes.append((vars(module), "_compiled_call_impl", fused))
        self._patches.apply(changes)
        self._is_installed = True

    def uninstall(self) -> None:
        """Give the module back as it was before `installed`; may be called again if it was interrupted."""
        with self._lock:
            self._is_installed = False
            self._patches.undo()

    def _quieting(self) -> list[Change]:
        """Eval mode, and none of the owner's compiled calls, which would be compiled again for our passes."""
        changes: list[Change] = []
        for module in modules_of(self.model):
            attributes = vars(module)
            if attributes["training"]:
                changes.append((attributes, "training", False))
            if attributes.get("_compiled_call_impl") is not None:
                changes.append((attributes, "_compiled_call_impl", None))
        return changes

    @contextmanager
    def _base_model_runs_once(self) -> Iterator[None]:
        """Repeated calls of the base model return its first output: more logits of the same hidden states."""
        base: Any = self.model.base_model
        given: list[Any] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if not given:
                given.append(base._call_impl(*args, **kwargs))
            return given[0]

        num_changes = len(self._patches)
        self._patches.apply([(vars(base), "_compiled_call_impl", run)])
        try:
            yield
        finally:
            self._patches.undo(down_to=num_changes)

    @contextmanager
    def _probing(self, probe: AnyProbe) -> Iterator[None]:
        """The probe in place of attention."""
        changes = [(vars(config), "_attn_implementation_internal", PROBE_NAME) for config in self._configs()]
        with self._lock:
            try:
                self._patches.apply(self._quieting() + changes)
                with self._plain_arithmetic(), probing_with(probe):
                    yield
            finally:
                self.uninstall()

    @contextmanager
    def _plain_arithmetic(self) -> Iterator[None]:
        """No gradients, and the module's own dtype, whatever the caller's context says."""
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            yield

    def forward(self, token_ids: Tensor, positions: Tensor, sample_rows: Tensor, **kwargs: Any) -> Tensor:
        """Logits [num_samples, vocab_size] of the sampled rows of one flat batch.

        Args:
            token_ids, positions: [1, num_rows] int64.
            sample_rows: [num_samples] int64.

        Raises RuntimeError if the owner of a live module has made its vocabulary smaller.
        """
        output = self.model(
            input_ids=token_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=sample_rows,
            return_dict=True,
            **kwargs,
        )
        logits: Tensor = output.logits[0]
        num_logits = logits.shape[1]
        if num_logits == self.vocab_size:
            return logits
        if num_logits < self.vocab_size:
            raise RuntimeError(
                f"{type(self.model).__name__} gives logits of {num_logits} tokens, and {self.vocab_size} when this "
                "engine was built. Build a new engine."
            )
        return logits[:, : self.vocab_size].contiguous()  # a token without an embedding could not go on

    def forward_step(
        self,
        step: AttentionStep,
        token_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        sample_rows: Tensor,
        report: StepLogprobs | None = None,
    ) -> Tensor:
        """`forward` over the paged caches, with everything in force that this needs.

        Args:
            step: what every attention layer shares.
            token_ids, positions: [num_rows] int64.
            slot_mapping: [num_rows] int64, the cache slot that takes each row's K and V.
            report: gets the logits of its rows of prompts, piece by piece.
        """
        tensors = self._handle_tensor, slot_mapping
        extra = dict(zip((STEP_HANDLE, STEP_SLOT_MAPPING), tensors, strict=True)) if self._passes_keywords else {}
        if not extra and self._compiled_calls:
            torch._dynamo.maybe_mark_dynamic(slot_mapping, 0)
        enter_step(self.handle, step, None if extra else tensors)
        try:
            with self.installed():
                inputs = token_ids[None], positions[None]
                if report is None or report.prompt is None:
                    return self.forward(*inputs, sample_rows, **extra)
                with self._base_model_runs_once():
                    for rows in report.prompt_rows_in_pieces(self.device):
                        report.add_prompt(self.forward(*inputs, rows, **extra))
                    # Last, since a packed head writes all its logits to the same memory.
                    return self.forward(*inputs, sample_rows, **extra)
        except BaseException:
            self.uninstall()  # once more: an interrupt may have cut short the first time
            raise
        finally:
            leave_step(self.handle)

    def release_caches(self) -> None:
        self.uninstall()
        self.caches.release()

    def close(self) -> None:
        self.release_caches()
        self._compiled_calls = {}
        self._fused_layers = []


# What training sets and takes back, and what a step itself does.
_NOT_STRUCTURE = {"training", "_compiled_call_impl", LAYER_CACHE, LAYER_ENGINE}
