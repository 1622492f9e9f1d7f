"""Puts a model's binding together: its hooks, the checks of its rows, and the parts that its layers need."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from nanovllm.errors import UnsupportedModelError
from nanovllm.fast.host.memory import LazyMemory
from nanovllm.features.forward_passes import split_passes
from nanovllm.features.groups.mask_probe import MaskProbe
from nanovllm.features.headless import is_headless
from nanovllm.features.live_modules.module_watch import ModuleWatch
from nanovllm.features.speculation_options import HEADS_OF_MODEL
from nanovllm.features.states.state_layers import LAYER_TYPES, recurrent_modules
from nanovllm.features.unsupported import attending_layers, unsupported
from nanovllm.model import BindingParts, ModelBinding, StateLayers, lock_of, modules_of
from nanovllm.models.experts import EXPERTS
from nanovllm.models.guard import RowProbe, check_rows, refuse_cached_windows, refuse_quantised_weights
from nanovllm.models.pinned_rope import PinnedRope
from nanovllm.probe import Probe, Probing

if TYPE_CHECKING:
    from nanovllm.features.ranks.ranks import Ranks
    from nanovllm.features.ranks.sharding import ShardedHead


def build_binding(
    model: Any, *, is_live: bool, ranks: Ranks | None = None, head: ShardedHead | None = None
) -> ModelBinding:
    """A model's binding; raises UnsupportedModelError for a model that cannot be served.

    Args:
        ranks: the ranks of a sharded model.
        head: the sharded head, if the head is sharded too.
    """
    is_on_cpu = next(model.parameters()).device.type == "cpu"
    unshared: set[nn.Linear] = set()

    def check(probing: Probing, probe: Probe) -> None:
        refuse_cached_windows(model, probe)
        check_all = partial(check_rows, model, probing, probe)
        if is_on_cpu and not is_live:  # its packed weights will replace the plain ones
            from nanovllm.models.packed_linears import with_weights_hidden

            unshared.update(with_weights_hidden(model, check_all)[1])
        else:
            check_all()

    refuse_quantised_weights(model)
    parts = BindingParts(
        states=_state_layers(model),
        rope=PinnedRope(model),
        masks_for=MaskProbe.from_config,
        probe_for=_probe_for,
        check=check,
        implementations=EXPERTS,
    )
    binding = ModelBinding(model, is_live=is_live, parts=parts)
    split_passes(binding)
    if is_headless(model) and not binding.passes.has_base_model:
        name = type(model.base_model).__name__
        raise UnsupportedModelError(f"{name} has no head, and {type(model).__name__} does not call it for states.")
    binding.unshared = unshared
    binding.layer_modules = decoder_layers(model, [layer.module for layer in binding.layers])
    if HEADS_OF_MODEL in vars(model):
        from nanovllm.features.speculation.heads.head import bind_head

        bind_head(binding)
    if is_on_cpu:
        binding.caches.memory = LazyMemory()
    if is_live:
        binding.watch = ModuleWatch(model, lock_of(model))
    binding.ranks = ranks
    if ranks is not None and head is not None:
        from nanovllm.features.ranks.sharding import split_logits

        split_logits(binding, ranks, head)
    return binding


def _probe_for(model: Any) -> Probe:
    others = LAYER_TYPES if recurrent_modules(model) else {}
    attending = attending_layers(type(model).__name__, model.config.get_text_config(decoder=True), others)
    return RowProbe.for_model(model, attending=attending, is_mixed=bool(others), refused=unsupported)


def _state_layers(model: nn.Module) -> StateLayers:
    if not (recurrent := recurrent_modules(model)):
        return StateLayers()
    from nanovllm.features.states.mixers import Mixers

    return Mixers(model, recurrent)


def decoder_layers(model: nn.Module, attention: Iterable[nn.Module]) -> list[nn.Module]:
    """The ModuleList item that contains each attention module: the unit of compilation."""
    layer_of: dict[nn.Module, nn.Module] = {}
    for module in model.modules():  # the walk reaches nested lists later, so the innermost wins
        if isinstance(module, nn.ModuleList):
            layer_of |= {part: layer for layer in module for part in modules_of(layer)}
    return [layer_of[module] for module in attention if module in layer_of]
