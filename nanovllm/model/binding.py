"""Hooks a `transformers` module to paged attention, and restores it exactly when unhooked."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from nanovllm.attention.kv_cache import KVCaches
from nanovllm.attention.operator import (
    ATTENTION_NAME,
    STEP_HANDLE,
    STEP_SLOT_MAPPING,
    AttentionStep,
    attention_function,
    step_in_force,
)
from nanovllm.core.errors import NotFusedError
from nanovllm.model.experts import pack_experts
from nanovllm.model.fast import packed_linears
from nanovllm.model.fast.compiled_layers import compile_calls, decoder_layers
from nanovllm.model.fast.dense_layers import uncompiled_calls
from nanovllm.model.fast.layer_equations import RECORDING_NAME
from nanovllm.model.fast.merged_linears import merging
from nanovllm.model.fast.rotary_attention import RotaryAttention, fuse_rotary
from nanovllm.model.fast.stacked_layers import StackedLayers, stacked_layers
from nanovllm.model.forward import ForwardPasses
from nanovllm.model.guard import RowBatches, check_rows
from nanovllm.model.module_watch import ModuleWatch, modules_of, tensors_of
from nanovllm.model.patches import AttributePatches, Change, layer_changes, redirected_to
from nanovllm.model.pinned_rope import PinnedRope
from nanovllm.model.probe import PROBE_NAME, AnyProbe, StateProbe, mixers_of, probe_model, probing_with
from nanovllm.process.device import find_kernel
from nanovllm.sampling.logprobs import StepLogprobs

if TYPE_CHECKING:
    from nanovllm.kernels.cpp import Kernels
    from nanovllm.kernels.huge_pages import HugePages
    from nanovllm.model.fast.fused_layers import FusedLayer
    from nanovllm.model.ranks import Ranks
    from nanovllm.model.sharding import ShardedHead

logger = logging.getLogger("nanovllm")

# The name has no mask function, so the library builds no mask and never inspects positions.
AttentionInterface.register(ATTENTION_NAME, attention_function)

_handles = itertools.count()
# Several engines may share a module, in several threads: while one has it hooked, the others wait.
_module_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


class ModelBinding:
    """A model and its attention layers; `installed` hooks them to paged attention for one step.

    Args:
        model: a causal language model of `transformers`, not copied, and unchanged outside of `installed`.
        is_live: the owner continues to use the module (training): all changes are undone after each step.
        ranks: the ranks of a sharded model.
        head: the sharded head, if the head is sharded too.

    Attributes:
        layers: attention layers, in the order of the forward pass.
        mixers: layers with recurrent states; None for a model without any.
        vocab_size: number of tokens that can be sampled: with a row in the head and a row in the embedding.
        has_base_model: whether a submodule computes the hidden states, with the head outside of it.
        min_rows: of a step; 2 with compiled layers, since a single row would be specialised.
        rope: batch-dependent rotary embeddings; `pin_rope` fixes them for a max_model_len, before any step.
        watch: detects changes of a live module; None if it is not live.
        memory: for packed weights, set until the engine is built.
    """

    def __init__(
        self, model: Any, *, is_live: bool, ranks: Ranks | None = None, head: ShardedHead | None = None
    ) -> None:
        self.model, self.is_live, self.ranks = model, is_live, ranks
        self.memory: HugePages | None = None
        self.head_shards: ShardedHead | None = None  # set if logits cover only this rank's tokens
        self.device: torch.device = next(model.parameters()).device
        self.min_rows, self.handle = 1, next(_handles)
        with torch.inference_mode(False):
            self._handle_tensor = torch.tensor([self.handle], device="cpu")  # the operator reads it on the host
        self._lock = _module_locks.setdefault(model, threading.RLock())
        self._compiled_calls: dict[nn.Module, Callable[..., Any]] = {}
        self.stacked: StackedLayers | None = None  # the layers in one launch
        self._fused_layers: list[FusedLayer] = []
        self._rotary: list[Change] = []
        self._patches, self._is_installed = AttributePatches(), False
        with self._lock:  # another engine's step patches the module
            self.rope = PinnedRope(model)
        self.mixers = mixers_of(model)
        probe = probe_model(model, self._probing, RowBatches.for_model)
        self.layers, self._passes_keywords = probe.layers, probe.passes_keywords
        check = partial(check_rows, model, self._probing, probe)
        self._unshared: set[nn.Linear]  # layers with plain weights that may be freed
        hides = packed_linears.with_weights_hidden if not is_live and self.device.type == "cpu" else None
        self.vocab_size, self._unshared = hides(model, check) if hides else (check(), set())
        self._passes = ForwardPasses(model, self._patches, self.vocab_size)
        with self._probing(StateProbe()):
            self.has_base_model = self._passes.has_base_model(self.device)
        if ranks is not None and head is not None:
            self._split_logits(ranks, head)
        self.dtype = self.layers[0].dtype if self.layers else model.dtype
        self.caches = KVCaches(self.layers, self.device, self.mixers.shapes if self.mixers else ())
        self.layer_modules = decoder_layers(model, [layer.module for layer in self.layers])
        self.watch = ModuleWatch(model, self._lock) if is_live else None

    def _split_logits(self, ranks: Ranks, head: ShardedHead) -> None:
        """Let the model return only this rank's logits, if they equal the slice of the whole ones (elementwise)."""
        split = ForwardPasses(self.model, self._patches, head.width)
        with self._probing(StateProbe()):
            if split.computes_parts(self._passes, head, ranks, self.device):
                self._passes, self.head_shards = split, head

    # ------------------------------------------------------------------------------------------------ speed-ups

    def pack_weights(self, kernels: Kernels | None, max_rows: int, *run_batches: Callable[[], Any]) -> None:
        """Fuse decoder layers where possible, and pack the other linear layers. Not for a live module.

        Args:
            kernels: None packs for oneDNN and fuses nothing.
            max_rows, run_batches: as in `fuse_layers` and `ForwardPasses.find_faster`.
        """
        if kernels is not None and self._passes_keywords and self.ranks is None:  # a fused layer has no all-reduce
            from nanovllm.model.fast.fused_layers import fuse_layers

            try:
                self._install(RECORDING_NAME)
                self._fused_layers = fuse_layers(
                    self.layer_modules, self.layers, [(keys, values) for keys, values in self.caches.of_layers],
                    kernels, max_rows=max_rows, run_batches=run_batches[0],
                    on_fused=lambda fused: packed_linears.free_weights(fused.linears, self._unshared),
                    memory=self.memory,
                )  # fmt: skip
            except NotFusedError as error:
                logger.info("layers run as they are: %s", error)
        self.uninstall()
        packed = {linear for layer in self._fused_layers for linear in layer.linears}
        packed_linears.pack_linear_layers(
            self.model, kernels, unshared=self._unshared, packed=packed, memory=self.memory
        )
        if kernels is not None:
            pack_experts(self.model, kernels)
        self._passes.find_faster(self._fused_layers, run_batches[1])

    def merge_linears(self) -> None:
        """Merge linear layers that read the same input into one product. Not for a live module."""
        with merging(self.model, self.layer_modules):
            probe_model(self.model, self._probing)

    def fuse_rotary(self) -> None:
        """Let one kernel compute norms of q and k, rotary embedding and KV write; after `merge_linears`."""
        if (rotate := find_kernel("rotary", "rotate_and_store")) is None:
            return
        fused: dict[nn.Module, RotaryAttention] = {}
        try:
            fused = fuse_rotary(self.layers, rotate, self._probing, partial(self._passes.logits, sample_rows=0))
        except NotFusedError as error:
            logger.info("attention modules run as they are: %s", error)
        if self.ranks is not None and not self.ranks.agree(bool(fused)):
            return
        for children in [parent._modules for parent in self.model.modules()]:
            self._rotary += [(children, name, fused[child]) for name, child in children.items() if child in fused]

    def weight_addresses(self) -> list[int]:
        """The address of each parameter and buffer."""
        return [tensor.data_ptr() for tensor in tensors_of(modules_of(self.model))]

    def has_hooks(self) -> bool:
        """Whether a live module has forward hooks of its owner."""
        return self.is_live and any(m._forward_hooks or m._forward_pre_hooks for m in modules_of(self.model))

    def compile_layers(self) -> None:
        """Compile the decoder layers, and on a GPU the small modules around them, at their first calls."""
        logger.warning("compiling the layers of %s: some seconds", type(self.model).__name__)
        if not self.is_live:  # quantised weights are an engine's own
            packed_linears.warn_of_dequantising(self.model)
        layers = self.mixers.without(self.layer_modules) if self.mixers else self.layer_modules
        self._compiled_calls, self.min_rows = compile_calls(self.model, layers), 2

    @property
    def may_stack_layers(self) -> bool:
        is_alone = self.ranks is None and not self.mixers  # a stack has no all-reduce, and attention alone
        return self._passes_keywords and not self.is_live and is_alone

    def use_kernel_layers(self, *run_steps: Callable[[], Any]) -> bool:
        """Run layers by our kernels instead of compiled, if `run_steps` show the same results; whether they do."""
        if not self._rotary or not self.may_stack_layers:
            return False
        find = partial(uncompiled_calls, self.model, self.layer_modules, self.layers, self._rotary)
        if (calls := self._compared("layers are compiled", find, *run_steps)) is not None:
            self._compiled_calls = calls
        return calls is not None

    def stack_layers(self, block_size: int, run_decodes: Callable[[], Any]) -> None:
        """Run all layers in one launch in steps of few decodes, if `run_decodes` shows the same results."""
        if self.may_stack_layers:
            find = partial(stacked_layers, self.layer_modules, self.layers, self.caches.of_layers, block_size)
            self.stacked = self._compared("steps of few decodes run layer by layer", find, run_decodes)
        if self.stacked is not None:
            self._compiled_calls = self.stacked.layered_calls | self.stacked.calls()

    def _compared(self, otherwise: str, find: Callable[..., Any], *run_batches: Callable[[], Any]) -> Any:
        """Layers from `find`, which runs the batches with `comparing_calls`; None if they compute something else."""
        before = self._compiled_calls
        self.uninstall()  # restores the modules for their inspection

        def compare(form: Any, number: int = 0) -> None:
            self._compiled_calls = form.comparing_calls()
            self._install(RECORDING_NAME)  # stays installed for the batches
            with form.equations.watching():
                run_batches[number]()

        try:
            return find(before, compare=compare)
        except NotFusedError as error:
            logger.info("%s: %s", otherwise, error)
        finally:
            self.uninstall()
            self._compiled_calls = before

    def unstack_layers(self) -> None:
        """Run layer by layer from now on: a stack reads weights by their old addresses."""
        if self.stacked is not None:
            self.uninstall()
            self._compiled_calls, self.stacked = self.stacked.layered_calls, None

    # ---------------------------------------------------------------------------------------------------- steps

    def pin_rope(self, max_model_len: int) -> None:
        """See `PinnedRope.pin`."""
        with self._lock:
            self.rope.pin(max_model_len)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install paged attention, eval mode and compiled layers; undone on exit for a live module."""
        with self._lock, torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            try:
                if not self._is_installed:
                    self._install()
                yield
            finally:
                if self.is_live:
                    self.uninstall()

    def _install(self, attention_name: str = ATTENTION_NAME) -> None:
        self._patches.undo()  # leftovers of an interrupt
        changes = redirected_to(self.model, attention_name) + self.rope.changes
        handle = None if self._passes_keywords else self.handle
        changes += layer_changes(self.layers, self.caches.of_layers, self.caches.kinds, handle) + self._rotary
        calls = *self._compiled_calls.items(), *zip(self.layer_modules, self._fused_layers, strict=False)
        changes += [(vars(module), "_compiled_call_impl", call) for module, call in calls]
        if self.mixers:
            changes += self.mixers.step_changes(self.caches.of_records)
        self._patches.apply(changes)
        self._is_installed = True

    def uninstall(self) -> None:
        """Restore the module to its state before `installed`; may be called again after an interrupt."""
        with self._lock:
            self._is_installed = False
            self._patches.undo()

    @contextmanager
    def _probing(self, probe: AnyProbe) -> Iterator[None]:
        """Replace attention by the probe."""
        with self._lock, torch.no_grad(), torch.autocast(self.device.type, enabled=False), probing_with(probe):
            self.uninstall()  # a model that is not live stays hooked between steps
            try:
                self._patches.apply(redirected_to(self.model, PROBE_NAME) + self.rope.changes)
                if self.mixers is not None:
                    self._patches.apply(self.mixers.probing_changes())
                yield
            finally:
                self.uninstall()

    def forward_step(
        self,
        step: AttentionStep,
        token_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        sample_rows: Tensor,
        report: StepLogprobs | None = None,
    ) -> Tensor:
        """Logits [num_samples, vocab_size] of the sampled rows of one flat batch, over the paged caches.

        Args:
            step: state shared by all attention layers.
            token_ids, positions: [num_rows] int64.
            slot_mapping: [num_rows] int64, the cache slot of each row's K and V.
            sample_rows: [num_samples] int64.
            report: receives logits of prompt rows, piece by piece, and hidden states of embedded rows.
        """
        inputs, direct = (token_ids[None], positions[None], sample_rows), self._passes.direct
        with self._in_step(step, slot_mapping) as extra:
            if report is not None and report.reads_rows:
                return self._passes.reported(report, *inputs, **extra)
            compute = direct if direct is not None and direct.is_ready else self._passes.logits
            return compute(*inputs, **extra)

    @contextmanager
    def _in_step(self, step: AttentionStep, slot_mapping: Tensor) -> Iterator[dict[str, Tensor]]:
        """Set up one step; yields keyword arguments that the model passes on to attention."""
        tensors = self._handle_tensor, slot_mapping
        extra = dict(zip((STEP_HANDLE, STEP_SLOT_MAPPING), tensors, strict=True)) if self._passes_keywords else {}
        if not extra and self._compiled_calls:
            torch._dynamo.maybe_mark_dynamic(slot_mapping, slot_mapping.dim() - 1)
        with step_in_force(self.handle, step, None if extra else tensors):
            try:
                with self.installed():
                    yield extra
            except BaseException:
                self.uninstall()  # again: an interrupt may have cut the first one short
                raise

    def hidden_step(self, step: AttentionStep, token_ids: Tensor, positions: Tensor, slot_mapping: Tensor) -> Tensor:
        """Hidden states [num_rows, hidden_size] over the paged caches; arguments as in `forward_step`."""
        with self._in_step(step, slot_mapping) as extra:
            return self._passes.hidden_states(token_ids[None], positions[None], **extra)

    def head(self, hidden_states: Tensor) -> Tensor:
        """Logits [num_samples, vocab_size] of hidden states [num_samples, hidden_size]."""
        with self.installed():
            return self._passes.head(hidden_states)

    def splits_head(self) -> bool:
        """Whether hidden states and head can be computed separately; see `ForwardPasses.splits_head`."""
        with self._probing(StateProbe()):
            splits = self.has_base_model and self._passes.splits_head(self.device)
            return splits if self.ranks is None else self.ranks.agree(splits)

    def release_caches(self) -> None:
        self.uninstall()
        self.caches.release()

    def close(self) -> None:
        self.release_caches()
        self._compiled_calls, self.stacked = {}, None
        self._fused_layers, self._rotary, self._passes.direct = [], [], None
