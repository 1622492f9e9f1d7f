"""Updates the weights of an engine between two steps, all of them or none."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from nanovllm.engine import Engine
from nanovllm.features.adapters.salts import AdapterSalt, adapter_of
from nanovllm.features.updates.pausing import Pausing
from nanovllm.features.updates.sleeping import bring_weights
from nanovllm.sequence import Sequence

logger = logging.getLogger("nanovllm")

_STAGED = "staged_weights"  # attribute of a rank's runner: values that are checked and not yet written
Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Callable[[], Any]


def update_weights(engine: Any, weights: Weights, *, keep_kv: bool = False, version: str | None = None) -> None:
    """See `Updating.update_weights`."""
    from nanovllm.features.updates import versions
    from nanovllm.features.updates.places import checked, places_of  # imports every form that keeps a copy

    versions.check_label(version)
    if not isinstance(engine, Engine):
        engine.change("update_weights", weights, keep_kv=keep_kv, version=version)
        return
    runner = engine.model_runner
    binding = runner.binding
    given = weights() if callable(weights) else weights
    bring_weights(engine)
    binding.uninstall()  # names of modules are those of the model
    places = places_of(binding)
    values = checked(places, given.items() if isinstance(given, Mapping) else given)
    commit: Callable[[], Any] = partial(_write, runner, values)
    if binding.ranks is not None:
        names = {place.key: name for name, place in places.items()}
        commit = _stage_together(engine, {names[place.key]: (tensor, place.dtype) for place, tensor in values})
    with engine._changing():
        engine._drop_in_flight(has_failed=False)
        commit()
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


def _write(runner: Any, values: Any = None) -> None:
    """Write checked values into this rank's model: by default the staged ones."""
    from nanovllm.features.updates.places import write

    binding = runner.binding
    if binding.device.type == "cuda":
        runner.follow_last_stream()
    write(vars(runner).pop(_STAGED) if values is None else values)
    if binding.watch is not None:
        binding.watch.changes(with_structure=True)  # nothing that its owner has changed
    runner.executor.model_changed(in_place=True)


def _stage_together(engine: Engine, values: Mapping[str, tuple[Tensor, Any]]) -> Callable[[], Any]:
    """Bring new values to every rank, which checks them; returns the call that writes them on all ranks."""
    runner: Any = engine.model_runner
    shared = runner.share(values)
    with engine._changing():
        engine._drop_in_flight(has_failed=False)  # other ranks may wait for its draw
    try:
        runner.together(_stage, shared)
    except BaseException:
        runner.together(_unstage)
        raise
    return partial(runner.together, _write)


def _stage(runner: Any, shared: Any) -> None:
    from nanovllm.features.updates.places import checked, places_of

    runner.binding.uninstall()
    vars(runner)[_STAGED] = checked(places_of(runner.binding), shared.open().items())


def _unstage(runner: Any) -> None:
    vars(runner).pop(_STAGED, None)


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
        floating-point numbers; ValueError with both data_parallel_size and tensor_parallel_size above 1, and for
        quantised weights.
        """
        with self._interrupts(), self._turn() as engine:
            update_weights(engine, weights, keep_kv=keep_kv, version=version)
