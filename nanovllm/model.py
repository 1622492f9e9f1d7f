"""Hooks a `transformers` module to paged attention, and restores it exactly when unhooked."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from nanovllm.attention import (
    ATTENTION_NAME,
    LAYER_CACHE,
    LAYER_ENGINE,
    LAYER_KIND,
    LAYER_SHARES,
    STEP_HANDLE,
    STEP_SLOT_MAPPING,
    AttentionLayer,
    AttentionStep,
    LayerCache,
    attention_function,
    step_in_force,
)
from nanovllm.kv_cache import KVCaches, StateShapes
from nanovllm.layout import BatchLayout
from nanovllm.probe import PROBE_NAME, Masks, PassProbe, Probe, Probing, plain_probe, probe_model, probing_with
from nanovllm.sampler import StepReport

Change = tuple[dict[str, Any], str, Any]  # an object's attributes, a name among them, a value

_ABSENT = object()


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All submodules, each once, unordered: `model.modules()` without its nested generators.

    A live module is walked in every step, which is a good part of a step's host time.
    """
    found: dict[int, nn.Module] = {}
    pending = [model]
    while pending:
        module = pending.pop()
        if id(module) not in found:
            found[id(module)] = module
            pending += [child for child in module._modules.values() if child is not None]
    return list(found.values())


class AttributePatches:
    """A stack of patches. `undo` can be called again after an interrupt cut it short."""

    def __init__(self) -> None:
        self._undo: list[Change] = []

    def __len__(self) -> int:
        return len(self._undo)

    def apply(self, changes: Iterable[Change]) -> None:
        # Writes to the attribute dictionaries, so that wrappers of a module's __setattr__ do not see it.
        for attributes, name, value in changes:
            self._undo.append((attributes, name, attributes.get(name, _ABSENT)))
            attributes[name] = value

    def undo(self, *, down_to: int = 0) -> None:
        """Undo the latest changes until `down_to` are left."""
        while len(self._undo) > down_to:
            attributes, name, before = self._undo[-1]
            if before is _ABSENT:
                attributes.pop(name, None)
            else:
                attributes[name] = before
            self._undo.pop()


def redirected_to(model: nn.Module, attention_name: str, others: Mapping[str, str]) -> list[Change]:
    """Changes that select attention by name, `others` by attribute of configs, eval mode, and uncompiled calls.

    The owner's compiled calls would be compiled again for our passes.
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
    for config in configs.values():
        attributes = vars(config)
        changes.append((attributes, "_attn_implementation_internal", attention_name))
        changes += [(attributes, name, value) for name, value in others.items() if name in attributes]
    return changes


def layer_changes(
    layers: Sequence[AttentionLayer], caches: Sequence[LayerCache], kinds: Sequence[int], engine_handle: int | None
) -> list[Change]:
    """Attributes of hooked attention modules.

    Args:
        caches: K and V of each layer.
        kinds: the number of each layer's kind.
        engine_handle: handle of the engine, for a model that does not pass its keyword arguments on to attention.
    """
    changes: list[Change] = []
    for layer, cache, kind in zip(layers, caches, kinds, strict=True):
        attributes = vars(layer.module)
        changes.append((attributes, LAYER_CACHE, cache))
        changes.append((attributes, LAYER_KIND, kind))
        changes.append((attributes, LAYER_SHARES, layer.traits.shares is not None))
        if engine_handle is not None:
            changes.append((attributes, LAYER_ENGINE, engine_handle))
    return changes


# The name has no mask function, so the library builds no mask and never inspects positions.
AttentionInterface.register(ATTENTION_NAME, attention_function)

_handles = itertools.count()
# Several engines may share a module, in several threads: while one has it hooked, the others wait.
_module_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


def lock_of(model: Any) -> threading.RLock:
    """The lock that is held while a module is hooked, or read."""
    return _module_locks.setdefault(model.base_model, threading.RLock())


class StateLayers:
    """Layers that keep states instead of K and V. By default the model has none, and this is false."""

    def __bool__(self) -> bool:
        return False

    @property
    def shapes(self) -> StateShapes:
        """Shape and dtype of each state of one sequence, by layer."""
        return ()

    @property
    def num_bytes(self) -> int:
        """Bytes of one sequence's states in all layers."""
        return 0

    def fitted(self, config: Any, device_type: str) -> Any:
        """The options, with a block size that fits the states; raises ValueError for another."""
        return config

    def probing_changes(self) -> list[Change]:
        """Changes that make layers compute each row as a sequence, so that the rows of a probe do not mix."""
        return []

    def step_changes(self, pools: list[list[Tensor]]) -> list[Change]:
        """Changes that make layers compute over pools of states: for each layer, [num_slots, ...] of each state."""
        return []

    def begin_step(self, layout: BatchLayout, device: torch.device) -> None:
        """Set the rows of the next step, by the layout of the group of states."""


class Rope:
    """Rotary embeddings: by default those of the module, which depend on nothing but positions.

    Attributes:
        changes: changes of the model's modules during probes and steps.
        choice: name of the frequencies, on which cached keys depend.
    """

    changes: Sequence[Change] = ()
    choice = ""

    def pin(self, max_model_len: int) -> None:
        """Choose the frequencies for sequences of up to that many tokens, before any step."""


class Watch(Protocol):
    """Detects changes that its owner makes to a module."""

    def changes(self, *, with_structure: bool) -> tuple[bool, bool]:
        """(weights changed, structure changed) since the last call; without `with_structure` the latter is False."""


class WholePass:
    """Forward passes of a causal language model, from tokens to logits; paged attention or a probe must be installed.

    Args:
        vocab_size: number of tokens that can be sampled.

    Attributes:
        has_base_model: True if hidden states can be computed apart from logits, as in `ForwardPasses`.
    """

    has_base_model = False

    def __init__(self, model: Any, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size

    def logits(self, token_ids: Tensor, positions: Tensor, sample_rows: Tensor | int, **kwargs: Any) -> Tensor:
        """Logits [num_samples, vocab_size] of the sampled rows of one flat batch.

        Args:
            token_ids, positions: [1, num_rows] int64.
            sample_rows: [num_samples] int64; 0 for all rows.

        Raises RuntimeError if the owner of a live module has made its vocabulary smaller.
        """
        logits: Tensor = self._model(
            input_ids=token_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=sample_rows,
            return_dict=True,
            **kwargs,
        ).logits[0]
        num_logits = logits.shape[1]
        if num_logits == self._vocab_size:
            return logits
        if num_logits < self._vocab_size:
            raise RuntimeError(
                f"{type(self._model).__name__} gives logits of {num_logits} tokens, and {self._vocab_size} when this "
                "engine was built. Build a new engine."
            )
        return logits[:, : self._vocab_size].contiguous()  # a token without an embedding could not be an input

    def of_step(self, report: StepReport | None, *inputs: Tensor, **kwargs: Any) -> Tensor:
        """Logits of a step, with the arguments of `logits`; the pass of a feature also fills the report."""
        return self.logits(*inputs, **kwargs)

    def drop_copies(self) -> None:
        """Drop everything that keeps the model's weights besides the model."""


class BindingParts(NamedTuple):
    """Parts of a binding that a plain model can do without.

    probe_for: function that makes the first probe of a model.
    masks_for: function that makes the masks of each probe from the config of a text model.
    check: function that raises UnsupportedModelError for a model that an engine would compute wrongly.
    implementations: attribute of configs -> name of an implementation of `transformers` that is not attention.
    """

    states: StateLayers = StateLayers()
    rope: Rope = Rope()
    probe_for: Callable[[Any], Probe] = plain_probe
    masks_for: Callable[[Any], Masks] = lambda _: Masks()
    check: Callable[[Probing, Probe], object] = lambda *_: None
    implementations: Mapping[str, str] = MappingProxyType({})


PLAIN = BindingParts()


class ModelBinding:
    """A model and its attention layers; `installed` hooks them to paged attention for one step.

    Args:
        model: a causal language model of `transformers`, not copied, and unchanged outside of `installed`.
        is_live: True if the owner continues to use the module (training): changes are undone after each step.
        parts: parts of features; by default those of a plain model.

    Attributes:
        layers: attention layers, in the order of the forward pass.
        layer_modules: decoder layers that contain the attention layers; faster calls may replace them.
        mixers: layers that keep states.
        vocab_size: number of tokens that can be sampled: with a row in the head and a row in the embedding.
        passes: forward passes of the model; `ForwardPasses` can split them into hidden states and logits.
        patches: changes of the model that are in force.
        min_rows: fewest rows of a step; 2 with compiled layers, since a single row would be specialised.
        watch: detects changes of a live module; None if it is not live.
        ranks: `Ranks` of a sharded model.
        head_shards: `ShardedHead`, if logits cover only this rank's tokens.
        unshared: linear layers with plain weights that no other module reads, and that may be freed.
    """

    def __init__(self, model: Any, *, is_live: bool, parts: BindingParts = PLAIN) -> None:
        self.model = model
        self.is_live = is_live
        self.ranks: Any = None
        self.head_shards: Any = None
        self.unshared: set[nn.Linear] = set()
        self.watch: Watch | None = None
        self.device: torch.device = next(model.parameters()).device
        self.min_rows, self.handle = 1, next(_handles)
        with torch.inference_mode(False):
            self._handle_tensor = torch.tensor([self.handle], device="cpu")  # the operator reads it on the host
        self._lock = lock_of(model)
        self.layer_modules: list[nn.Module] = []
        self.calls: dict[nn.Module, Callable[..., Any]] = {}
        self.stacked: Any = None  # `StackedLayers`, the layers in one launch
        self.fused_layers: list[Any] = []  # `FusedLayer` in the place of each decoder layer
        self.rotary_changes: list[Change] = []
        self.patches = AttributePatches()
        self._is_installed = False
        self.mixers = parts.states
        self.rope = parts.rope
        self._implementations = parts.implementations
        self._masks_for = parts.masks_for
        probe = probe_model(model, self.probing, parts.probe_for)
        self.layers = probe.layers
        self.passes_keywords = probe.passes_keywords
        parts.check(self.probing, probe)
        self.vocab_size = min(model.get_input_embeddings().num_embeddings, probe.logits.shape[1])
        self.passes: Any = WholePass(model, self.vocab_size)
        self.dtype = self.layers[0].dtype if self.layers else model.dtype
        self.caches = KVCaches(self.layers, self.device, self.mixers.shapes)

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
        self.patches.undo()  # leftovers of an interrupt
        changes = [*redirected_to(self.model, attention_name, self._implementations), *self.rope.changes]
        handle = None if self.passes_keywords else self.handle
        changes += layer_changes(self.layers, self.caches.of_layers, self.caches.kinds, handle) + self.rotary_changes
        calls = *self.calls.items(), *zip(self.layer_modules, self.fused_layers, strict=False)
        changes += [(vars(module), "_compiled_call_impl", call) for module, call in calls]
        changes += self.mixers.step_changes(self.caches.of_records)
        self.patches.apply(changes)
        self._is_installed = True

    def uninstall(self) -> None:
        """Restore the module to its state before `installed`; may be called again after an interrupt."""
        with self._lock:
            self._is_installed = False
            self.patches.undo()

    @contextmanager
    def probing(self, probe: PassProbe) -> Iterator[None]:
        """Replace attention by the probe."""
        with self._lock, torch.no_grad(), torch.autocast(self.device.type, enabled=False), probing_with(probe):
            self.uninstall()  # a model that is not live stays hooked between steps
            probe.masks = self._masks_for(self.model.config.get_text_config(decoder=True))
            try:
                self.patches.apply(redirected_to(self.model, PROBE_NAME, self._implementations))
                self.patches.apply([*self.rope.changes, *self.mixers.probing_changes()])
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
            report: report of the sampler's stage; None if every sequence is plain.

        The logits are empty if the report needs none.
        """
        with self._in_step(step, slot_mapping) as extra:
            logits: Tensor = self.passes.of_step(report, token_ids[None], positions[None], sample_rows, **extra)
            return logits

    def compute_step(
        self,
        compute: Callable[..., Tensor],
        step: AttentionStep,
        token_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        *rows: Tensor,
    ) -> Tensor:
        """The result of a function of `passes` over the paged caches; other arguments as in `forward_step`."""
        with self._in_step(step, slot_mapping) as extra:
            return compute(token_ids[None], positions[None], *rows, **extra)

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

    def release_caches(self) -> None:
        self.uninstall()
        self.caches.release()

    def close(self) -> None:
        self.release_caches()
        self.calls = {}
        self.stacked = None
        self.fused_layers = []
        self.rotary_changes = []
        self.passes.drop_copies()
