"""Loads adapters into an engine and unloads them, and prepares the engine for steps with adapters."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from nanovllm.engine import Engine
from nanovllm.features.adapters.loading import Adapter, check_name, read_adapter
from nanovllm.features.adapters.rank_slots import RankSlots
from nanovllm.features.adapters.slots import AdapterSlots
from nanovllm.features.adapters.steps import AdapterSteps, DeviceSlots, device_slots
from nanovllm.features.refusals import TENSOR_PARALLEL, refuse
from nanovllm.model_runner import ModelRunner

logger = logging.getLogger("nanovllm")


def load_adapter(engine: Any, name: str, path: Any) -> Adapter:
    """Load an adapter into an engine or a pool of replicas under a name, and return it.

    A name that is in use names the new adapter from now on; requests keep the one that they were queued with.

    Raises TypeError or ValueError before anything is changed: for a folder that is no LoRA adapter, one of another
    model, a rank above max_lora_rank, and an engine that serves none.
    """
    check_name(name)
    if not isinstance(engine, Engine):
        loaded: Adapter = engine.load_adapter(name, path)
        return loaded
    runner = engine.model_runner
    config: Any = engine.config
    if runner.binding.ranks is not None and runner.device.type == "cuda":
        refuse(
            "load_adapter", TENSOR_PARALLEL, "GPUs do not split factors among ranks. Merge the adapter into its model."
        )
    adapters: dict[str, Adapter] = engine.input_processor.parts.adapters
    targets = targets_of(runner)
    adapter = read_adapter(name, path, targets, runner.binding.dtype, config.max_lora_rank)
    for other in adapters.values():
        if other.digest == adapter.digest:
            adapter = replace(adapter, factors=other.factors)  # one copy of equal bytes
    _prepare(engine).reserve(adapter)
    adapters[name] = adapter
    logger.info("adapter %s: rank %d, %d modules, %s", name, adapter.rank, len(adapter.factors), adapter.digest)
    return adapter


def unload_adapter(engine: Any, name: str) -> None:
    """Forget a name; requests that were queued with its adapter end with it. Raises ValueError for an unknown name."""
    if not isinstance(engine, Engine):
        engine.unload_adapter(name)
        return
    adapters = engine.input_processor.parts.adapters
    if name not in adapters:
        raise ValueError(f"no adapter is named {name!r}; loaded are: {', '.join(sorted(adapters)) or 'none'}.")
    del adapters[name]


class Sizes(NamedTuple):
    """Sizes of a whole linear layer; a rank may have a part of it."""

    out_features: int
    in_features: int


def targets_of(runner: ModelRunner) -> dict[str, Sizes]:
    """The linear layers that adapters may change, by name: those within decoder layers with attention."""
    binding = runner.binding
    if binding.mixers:
        raise ValueError(f"{type(binding.model).__name__} has recurrent layers, and no adapter is served with them.")
    binding.uninstall()  # names of modules are the model's own then
    within = {id(module) for layer in binding.layer_modules for module in layer.modules()}
    parts: Mapping[str, Any] = getattr(binding.model, "rank_parts", {})
    return {
        name: Sizes(
            *parts[weight].shape if (weight := f"{name}.weight") in parts else (out_features, module.in_features)
        )
        for name, module in binding.model.named_modules()
        if id(module) in within and hasattr(module, "in_features")
        if (out_features := getattr(module, "out_features", None)) is not None
    }


def _prepare(engine: Engine) -> AdapterSlots:
    """Put admission and launches of adapters in front of the engine's own, with the first one."""
    runner = engine.model_runner
    config: Any = engine.config
    if isinstance(engine.scheduler.budget, AdapterSlots):
        return engine.scheduler.budget
    num_slots = min(config.max_loras, config.max_num_seqs)
    has_ranks = runner.binding.ranks is not None
    device: DeviceSlots = RankSlots(engine, num_slots) if has_ranks else device_slots(runner, num_slots)
    slots = AdapterSlots(engine.scheduler, num_slots, device.put)
    runner.launch_step = AdapterSteps(runner.launch_step, slots, device).launch
    slots.reserve = getattr(device, "reserve", slots.reserve)
    engine.scheduler.budget = slots
    return slots
