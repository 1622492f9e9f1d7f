"""Opening of a pool: splits the host's GPUs or cores among replicas, starts all at once, waits until all are up.

Slow imports, transformers above all, follow the start of the replicas: these import the same modules meanwhile.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanovllm.errors import EngineDeadError
from nanovllm.features.composition.input_processor import build_input_processor
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.extras import is_installed
from nanovllm.features.refusals import REPLICAS, refuse
from nanovllm.models.limits import check_stored_limits
from nanovllm.models.source import check_skipped_tokenizer, find, needs_tokenizer
from nanovllm.observability.json_lines import writes_json
from nanovllm.observability.step_records import OnStep, StepHook
from nanovllm.serving.replicas.fleet import Fleet
from nanovllm.serving.replicas.messages import LoadFailed, Ready
from nanovllm.serving.replicas.pool import PoolParts, ReplicaPool, sends_block_events
from nanovllm.serving.replicas.replica import Replica, ReplicaResources
from nanovllm.serving.replicas.routing import POLICIES

logger = logging.getLogger("nanovllm")

DEFAULT_ROUTING = "prefix-aware"
# Seconds between checks of an idle pool: maximum delay before a dead replica is restarted.
LOOK_SECONDS = 0.5
CPUS = Path("/sys/devices/system/cpu")


def open_pool(
    model: Any,
    tokenizer: Any,
    on_step: StepHook | None,
    options: dict[str, Any],
    *,
    trace: Any = None,
    sends_records: bool = False,
    prepares_when_idle: bool = False,
    is_stepped_when_idle: bool = False,
) -> ReplicaPool:
    """Start `data_parallel_size` engine processes; arguments and errors as for `LLM`.

    Args:
        sends_records: replicas send their step records, for observers that are appended later.
        is_stepped_when_idle: its owner steps it without requests too; else a thread restarts dead replicas when idle.

    Raises ValueError, before any process is started, for options that replicas do not support, for more replicas than
    GPUs or cores, and for a model that cannot be sharded among a replica's ranks.
    """
    hook = None if on_step is None else OnStep(on_step)
    config = EngineConfig.from_options(**options)
    setup = _setup(model, tokenizer, config, options, has_trace=trace is not None)
    shares = split_host(config, gpus_each=config.tensor_parallel_size)
    check_skipped_tokenizer(tokenizer, config)
    source = find(setup["model"], needs_tokenizer=needs_tokenizer(tokenizer, config), revision=config.revision)
    _check_model(source, config)
    setup["prepares_when_idle"] = prepares_when_idle
    records = sends_records or hook is not None
    events = sends_block_events(config)
    replicas = [Replica(*each, setup, sends_records=records, sends_block_events=events) for each in enumerate(shares)]
    ends_in_order = bool(config.prefix_cache_dir or config.kv_events)
    fleet = Fleet(replicas, source, step_timeout=config.step_timeout, ends_in_order=ends_in_order)
    try:
        for replica in fleet.replicas:
            fleet.launch(replica)
        from nanovllm.models.loader import load_tokenizer

        own_tokenizer = load_tokenizer(model, tokenizer, config)  # the replicas load theirs meanwhile
        ready = _wait_until_up(fleet)
    except BaseException:
        fleet.close()
        raise
    route = POLICIES[config.routing or DEFAULT_ROUTING]()
    parts = pool_parts(config, own_tokenizer, ready)
    if is_installed("nanovllm.features.media"):
        from nanovllm.features.media.opening import open_front

        open_front(parts.input_processor, source)
    pool = ReplicaPool(fleet, parts, route)
    if hook is not None:
        pool.observers.append(hook)
    if not is_stepped_when_idle:
        start_keeper(pool)
    return pool


def start_keeper(pool: ReplicaPool) -> None:
    """Tend a pool in a thread until it ends or is collected, for an owner that steps it only during calls."""
    reference = weakref.ref(pool)
    threading.Thread(target=_tend, args=(reference,), name="nanovllm-keeper", daemon=True).start()


def _tend(reference: weakref.ref[ReplicaPool]) -> None:
    pause = threading.Event()  # never set
    while (pool := reference()) is not None and pool.tend():
        del pool  # the pause must not keep an unused pool alive
        pause.wait(LOOK_SECONDS)


def _check_model(source: str, config: EngineConfig) -> None:
    check_stored_limits(source, config)
    if config.tensor_parallel_size > 1:
        from nanovllm.models.sharded_loading import check_shards

        check_shards(source, config)


def split_host(config: EngineConfig, *, gpus_each: int = 1) -> list[ReplicaResources]:
    """Assign GPUs, or cores in order of NUMA nodes, to each replica; raises ValueError if there are too few."""
    count = config.data_parallel_size
    cores = sorted(os.sched_getaffinity(0))
    if config.device.startswith("cuda:"):
        refuse("a GPU by its number as device", REPLICAS)
    if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
        num_gpus = torch.cuda.device_count()
        if not num_gpus:
            raise ValueError(f"device is {config.device!r}, but PyTorch sees no GPU. Use device='cpu' or 'auto'.")
        if gpus_each > num_gpus:
            raise ValueError(
                f"tensor_parallel_size is {gpus_each}, and there are {num_gpus} GPUs. Set it to at most that, or make "
                "more GPUs visible (CUDA_VISIBLE_DEVICES)."
            )
        if count * gpus_each > num_gpus:
            raise ValueError(
                f"data_parallel_size is {count}, and there are {num_gpus} GPUs for replicas of {gpus_each} each. Set "
                f"it to at most {num_gpus // gpus_each}, or make more GPUs visible (CUDA_VISIBLE_DEVICES)."
            )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
        gpus = [name.strip() for name in visible.split(",")]
        groups = [gpus[first : first + gpus_each] for first in range(0, count * gpus_each, gpus_each)]
        return [ReplicaResources(frozenset(cores), {"CUDA_VISIBLE_DEVICES": ",".join(group)}) for group in groups]
    if count > len(cores):
        raise ValueError(
            f"data_parallel_size is {count}, and there are {len(cores)} cores for one replica each at least. Set it to "
            f"at most {len(cores)}."
        )
    cores.sort(key=_node)
    shares = [cores[index * len(cores) // count : (index + 1) * len(cores) // count] for index in range(count)]
    limit = openmp_threads(os.environ) or len(cores)
    return [
        ReplicaResources(frozenset(share), {"OMP_NUM_THREADS": str(min(limit, len(share))), "CUDA_VISIBLE_DEVICES": ""})
        for share in shares
    ]


def _node(core: int) -> int:
    """The core's NUMA node, so that shares in this order lie on few nodes; 0 where the system does not tell."""
    return next((int(folder.name[4:]) for folder in (CPUS / f"cpu{core}").glob("node[0-9]*")), 0)


def openmp_threads(environment: Mapping[str, str]) -> int | None:
    """Number of threads in OMP_NUM_THREADS; None if it is unset or invalid, which OpenMP ignores with a warning.

    The first number of a list such as "4,2" counts; further ones apply to nested parallel regions.
    """
    numbers = [number.strip(" \t\n\r\f\v") for number in environment.get("OMP_NUM_THREADS", "").split(",")]
    if not all(re.fullmatch(r"\+?[0-9]+", number) and int(number) > 0 for number in numbers):
        return None
    return int(numbers[0])


def _setup(
    model: Any, tokenizer: Any, config: EngineConfig, options: dict[str, Any], *, has_trace: bool
) -> dict[str, Any]:
    """Setup of a replica; raises ValueError or TypeError for options that cannot be sent."""
    if isinstance(model, torch.nn.Module):
        refuse("a loaded module as model", REPLICAS)
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"model must be a name or a folder, not {model!r}.")
    if has_trace:
        refuse("trace", REPLICAS)
    if not _can_be_sent(tokenizer):
        refuse("a tokenizer that cannot be pickled", REPLICAS)
    drafter = config.speculation
    if not _can_be_sent(drafter):
        refuse("a Drafter that cannot be pickled", REPLICAS)
    if config.policies:
        if not _can_be_sent(config.policies):
            refuse("a policy that cannot be pickled", REPLICAS)
        from nanovllm.features.policies.opening import check_policies

        check_policies(config)
    # The front bounds the queue: it refuses excess requests before sending them.
    own = {name: value for name, value in options.items() if name != "max_queue"}
    return {
        "model": os.fspath(model),
        "tokenizer": tokenizer,
        "options": own,
        "log_level": logger.getEffectiveLevel(),
        "logs_json": writes_json(),
    }


def _can_be_sent(value: Any) -> bool:
    """Whether a replica can read it, which does not import the program that started it."""
    try:
        sent = pickle.dumps(value)
    except Exception:
        return False
    return b"__main__" not in sent and b"__mp_main__" not in sent


def _wait_until_up(fleet: Fleet) -> list[Ready]:
    """Wait for each replica's `Ready`; raises the error of the first that fails."""
    ready: dict[int, Ready] = {}
    while len(ready) < len(fleet.replicas):
        fleet.wait(None)
        for replica, message in fleet.listen():
            if isinstance(message, LoadFailed):
                raise pickle.loads(message.error) if message.error else EngineDeadError(message.message)
            if isinstance(message, Ready):
                ready[replica.index] = message
            elif message is None:
                raise EngineDeadError(f"replica {replica.index} died while it loaded the model; its output says why.")
    return [ready[replica.index] for replica in fleet.replicas]


def pool_parts(options: EngineConfig, tokenizer: Any, ready: Sequence[Ready]) -> PoolParts:
    """Everything a ReplicaPool is built from; its replicas are ready.

    Args:
        options: the pool's options, unresolved; max_queue bounds the pool.
    """
    config = _smallest_config([EngineConfig(**one.config) for one in ready], options)
    return PoolParts(
        config,
        build_input_processor(tokenizer, config, ready[0].limits),
        tokenizer,
        ready[0].hash_seed,
        expects_prefixes=sends_block_events(config),
    )


def _smallest_config(configs: Sequence[EngineConfig], options: EngineConfig) -> EngineConfig:
    """Config of a pool: the resolved config of its replicas, with the smallest limits."""
    return replace(
        configs[0],
        max_queue=options.max_queue,
        policies=options.policies,
        speculation=options.speculation,
        max_model_len=min(config.max_model_len for config in configs),
        num_kv_blocks=min(config.num_kv_blocks for config in configs),
    )
