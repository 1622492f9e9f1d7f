"""Updates the weights of an engine between two steps, all of them or none."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from nanovllm.engine import Engine
from nanovllm.features.adapters.salts import AdapterSalt, adapter_of
from nanovllm.features.refusals import TENSOR_PARALLEL, refuse
from nanovllm.features.updates import versions
from nanovllm.features.updates.pausing import Pausing
from nanovllm.features.updates.sleeping import bring_weights
from nanovllm.sequence import Sequence

logger = logging.getLogger("nanovllm")

Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Callable[[], Any]


def update_weights(engine: Any, weights: Weights, *, keep_kv: bool = False, version: str | None = None) -> None:
    """See `Updating.update_weights`."""
    from nanovllm.features.updates.places import checked, places_of, write  # imports every form that keeps a copy

    versions.check_label(version)
    if not isinstance(engine, Engine):
        engine.change("update_weights", weights, keep_kv=keep_kv, version=version)
        return
    runner = engine.model_runner
    binding = runner.binding
    if binding.ranks is not None:
        refuse("update_weights", TENSOR_PARALLEL)
    given = weights() if callable(weights) else weights
    bring_weights(engine)
    binding.uninstall()  # names of modules are those of the model
    values = checked(places_of(binding), given.items() if isinstance(given, Mapping) else given)
    with engine._changing():
        engine._drop_in_flight(has_failed=False)
        if binding.device.type == "cuda":
            runner.follow_last_stream()
        write(values)
        if binding.watch is not None:
            binding.watch.changes(with_structure=True)  # nothing that its owner has changed
        runner.executor.model_changed(in_place=True)
        _forget_prefixes(engine, keep_kv=keep_kv)
        versions.begin(engine, version)
    logger.info("%d weights were updated", len(values))


def check_weights(engine: Engine, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Raise as `update_weights` would; returns the names besides the given ones that the same weights have."""
    from nanovllm.features.updates.places import checked, places_of

    named = list(weights)
    engine.model_runner.binding.uninstall()
    places = places_of(engine.model_runner.binding)
    keys = {place.key for place, _ in checked(places, named)}
    return [name for name in places.keys() - dict(named).keys() if places[name].key in keys]


def _forget_prefixes(engine: Engine, *, keep_kv: bool) -> None:
    """Let no later request find KV of the weights before."""
    scheduler = engine.scheduler
    if keep_kv:
        for sequence in scheduler.running:
            if sequence.num_computed_tokens:
                sequence.cache_salt = _mixed(sequence)
                sequence.block_hashes.clear()
    else:
        scheduler.preempt_all()
    engine.reset_prefix_cache()


def _mixed(sequence: Sequence) -> str:
    """A salt that no other sequence has: for KV of several weights."""
    adapter = adapter_of(sequence.cache_salt)
    salt = f"\0mixed {uuid.uuid4()}"
    return salt if adapter is None else AdapterSalt(adapter, salt)


class Updating(Pausing):
    """Mixin of `LLM`."""

    def update_weights(self: Any, weights: Weights, *, keep_kv: bool = False, version: str | None = None) -> None:
        """Write new weights into the model between two steps, in place and into every copy that the engine keeps.

        Args:
            weights: tensors by the names of the model's `state_dict`, all or some; a mapping, pairs, or a function that
                returns either. Another floating-point dtype is converted.
            keep_kv: False drops all KV, so that running requests compute their tokens again; with True they go on from
                the KV that they have. In both cases later requests find no KV of the weights before.
            version: label of at most 256 characters that outputs report with their tokens, as `weight_versions`.

        Raises TypeError or ValueError, and changes nothing, for an unknown name, another shape, or values that are no
        floating-point numbers; ValueError with tensor_parallel_size above 1, and for quantised weights.
        """
        with self._interrupts(), self._turn() as engine:
            update_weights(engine, weights, keep_kv=keep_kv, version=version)
