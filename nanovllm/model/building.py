"""Puts a model's binding together: hooks, and the checks and parts that its layers need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from nanovllm.core.errors import UnsupportedModelError
from nanovllm.model.binding import ModelBinding, ModelParts, StateLayers, lock_of
from nanovllm.model.experts import EXPERTS
from nanovllm.model.guard import RowCheck
from nanovllm.model.headless import is_headless
from nanovllm.model.module_watch import ModuleWatch
from nanovllm.model.pinned_rope import PinnedRope
from nanovllm.model.state_layers import recurrent_modules

if TYPE_CHECKING:
    from nanovllm.model.ranks import Ranks
    from nanovllm.model.sharding import ShardedHead


def build_binding(
    model: Any, *, is_live: bool, ranks: Ranks | None = None, head: ShardedHead | None = None
) -> ModelBinding:
    """A model's binding; raises UnsupportedModelError for a model that cannot be served.

    Args:
        model, is_live: as of `ModelBinding`.
        ranks: the ranks of a sharded model.
        head: the sharded head, if the head is sharded too.
    """
    check = RowCheck(hides=not is_live)
    binding = ModelBinding(
        model, is_live=is_live, parts=ModelParts(_state_layers(model), PinnedRope(model), check, EXPERTS)
    )
    if is_headless(model) and not binding.has_base_model:
        name = type(model.base_model).__name__
        raise UnsupportedModelError(f"{name} has no head, and {type(model).__name__} does not call it for states.")
    binding.unshared = check.unshared
    binding.ranks = ranks
    if ranks is not None and head is not None:
        from nanovllm.model.sharding import split_logits

        split_logits(binding, ranks, head)
    if is_live:
        binding.watch = ModuleWatch(model, lock_of(model))
    return binding


def _state_layers(model: nn.Module) -> StateLayers:
    if not (recurrent := recurrent_modules(model)):
        return StateLayers()
    from nanovllm.model.mixers import Mixers

    return Mixers(model, recurrent)
