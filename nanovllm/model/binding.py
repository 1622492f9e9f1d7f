"""Hooks a `transformers` module to paged attention, and restores it exactly when unhooked."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
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
from nanovllm.core.errors import UnsupportedModelError
from nanovllm.model.fast import packed_linears
from nanovllm.model.forward import ForwardPasses
from nanovllm.model.guard import RowBatches, check_rows
from nanovllm.model.headless import is_headless
from nanovllm.model.module_watch import ModuleWatch, modules_of, tensors_of
from nanovllm.model.patches import AttributePatches, Change, layer_changes, redirected_to
from nanovllm.model.pinned_rope import PinnedRope
from nanovllm.model.probe import PROBE_NAME, AnyProbe, StateProbe, mixers_of, probe_model, probing_with
from nanovllm.sampling.sampler import StepReport

if TYPE_CHECKING:
    from nanovllm.kernels.huge_pages import HugePages
    from nanovllm.model.fast.fused_layers import FusedLayer
    from nanovllm.model.fast.stacked_layers import StackedLayers
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
        self._lock = _module_locks.setdefault(model.base_model, threading.RLock())
        self.calls: dict[nn.Module, Callable[..., Any]] = {}
        self.stacked: StackedLayers | None = None  # the layers in one launch
        self.fused_layers: list[FusedLayer] = []
        self.rotary_changes: list[Change] = []
        self._patches, self._is_installed = AttributePatches(), False
        with self._lock:  # another engine's step patches the module
            self.rope = PinnedRope(model)
        self.mixers = mixers_of(model)
        probe = probe_model(model, self.probing, RowBatches.for_model)
        self.layers, self.passes_keywords = probe.layers, probe.passes_keywords
        check = partial(check_rows, model, self.probing, probe)
        self.unshared: set[nn.Linear]  # layers with plain weights that may be freed
        hides = packed_linears.with_weights_hidden if not is_live and self.device.type == "cpu" else None
        self.vocab_size, self.unshared = hides(model, check) if hides else (check(), set())
        self.passes = ForwardPasses(model, self._patches, self.vocab_size)
        with self.probing(StateProbe()):
            self.has_base_model = self.passes.has_base_model(self.device)
        if is_headless(model) and not self.has_base_model:
            name = type(model.base_model).__name__
            raise UnsupportedModelError(f"{name} has no head, and {type(model).__name__} does not call it for states.")
        if ranks is not None and head is not None:
            self._split_logits(ranks, head)
        self.dtype = self.layers[0].dtype if self.layers else model.dtype
        self.caches = KVCaches(self.layers, self.device, self.mixers.shapes if self.mixers else ())
        self.layer_modules = decoder_layers(model, [layer.module for layer in self.layers])
        self.watch = ModuleWatch(model, self._lock) if is_live else None

    def _split_logits(self, ranks: Ranks, head: ShardedHead) -> None:
        """Let the model return only this rank's logits, if they equal the slice of the whole ones (elementwise)."""
        split = ForwardPasses(self.model, self._patches, head.width)
        with self.probing(StateProbe()):
            if split.computes_parts(self.passes, head, ranks, self.device):
                self.passes, self.head_shards = split, head

    # ------------------------------------------------------------------------------------------------ faster calls

    def weight_addresses(self) -> list[int]:
        """The address of each parameter and buffer."""
        return [tensor.data_ptr() for tensor in tensors_of(modules_of(self.model))]

    def has_hooks(self) -> bool:
        """Whether a live module has forward hooks of its owner."""
        return self.is_live and any(m._forward_hooks or m._forward_pre_hooks for m in modules_of(self.model))

    @property
    def may_stack_layers(self) -> bool:
        is_alone = self.ranks is None and not self.mixers  # a stack has no all-reduce, and attention alone
        return self.passes_keywords and not self.is_live and is_alone

    def unstack_layers(self) -> None:
        """Run layer by layer from now on: a stack reads weights by their old addresses."""
        if self.stacked is not None:
            self.uninstall()
            self.calls, self.stacked = self.stacked.layered_calls, None

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
                    self.install()
                yield
            finally:
                if self.is_live:
                    self.uninstall()

    def install(self, attention_name: str = ATTENTION_NAME) -> None:
        self._patches.undo()  # leftovers of an interrupt
        changes = redirected_to(self.model, attention_name) + self.rope.changes
        handle = None if self.passes_keywords else self.handle
        changes += layer_changes(self.layers, self.caches.of_layers, self.caches.kinds, handle) + self.rotary_changes
        calls = *self.calls.items(), *zip(self.layer_modules, self.fused_layers, strict=False)
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
    def probing(self, probe: AnyProbe) -> Iterator[None]:
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
        report: StepReport | None = None,
    ) -> Tensor:
        """Logits [num_samples, vocab_size] of the sampled rows of one flat batch, over the paged caches.

        Args:
            step: state shared by all attention layers.
            token_ids, positions: [num_rows] int64.
            slot_mapping: [num_rows] int64, the cache slot of each row's K and V.
            sample_rows: [num_samples] int64.
            report: receives logits of prompt rows, piece by piece, and hidden states of embedded rows.
        """
        inputs, direct = (token_ids[None], positions[None], sample_rows), self.passes.direct
        with self._in_step(step, slot_mapping) as extra:
            if report is not None and report.reads_rows:
                return self.passes.reported(report, *inputs, **extra)
            compute = direct if direct is not None and direct.is_ready else self.passes.logits
            return compute(*inputs, **extra)

    @contextmanager
    def _in_step(self, step: AttentionStep, slot_mapping: Tensor) -> Iterator[dict[str, Tensor]]:
        """Set up one step; yields keyword arguments that the model passes on to attention."""
        tensors = self._handle_tensor, slot_mapping
        extra = dict(zip((STEP_HANDLE, STEP_SLOT_MAPPING), tensors, strict=True)) if self.passes_keywords else {}
        if not extra and self.calls:
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
            return self.passes.hidden_states(token_ids[None], positions[None], **extra)

    def head(self, hidden_states: Tensor) -> Tensor:
        """Logits [num_samples, vocab_size] of hidden states [num_samples, hidden_size]."""
        with self.installed():
            return self.passes.head(hidden_states)

    def splits_head(self) -> bool:
        """Whether hidden states and head can be computed separately; see `ForwardPasses.splits_head`."""
        with self.probing(StateProbe()):
            splits = self.has_base_model and self.passes.splits_head(self.device)
            return splits if self.ranks is None else self.ranks.agree(splits)

    def release_caches(self) -> None:
        self.uninstall()
        self.caches.release()

    def close(self) -> None:
        self.release_caches()
        self.calls, self.stacked = {}, None
        self.fused_layers, self.rotary_changes, self.passes.direct = [], [], None


def decoder_layers(model: nn.Module, attention: Iterable[nn.Module]) -> list[nn.Module]:
    """The ModuleList item that contains each attention module: the unit of compilation."""
    layer_of: dict[nn.Module, nn.Module] = {}
    for module in model.modules():  # nested lists come later, so the innermost wins
        if isinstance(module, nn.ModuleList):
            layer_of |= {part: layer for layer in module for part in modules_of(layer)}
    return [layer_of[module] for module in attention if module in layer_of]
