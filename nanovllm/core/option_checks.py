"""Checks of engine options beyond their types: values of one option, and options that contradict one another.

Each error names value, limit and remedy. What needs the model or the device is checked when it is resolved.
"""

from __future__ import annotations

import math
import numbers
import re
from typing import TYPE_CHECKING

from nanovllm.core.validation import real

if TYPE_CHECKING:
    from nanovllm.core.config import EngineConfig

FLASH_BLOCK_SIZE = 128
MIN_AGEING_S = 1e-3  # keeps priority levels apart in floating point
_ENDPOINT = re.compile(r"tcp://.+:\d{1,5}|ipc://.+")


def check_options(config: EngineConfig) -> None:
    """Raise ValueError or TypeError for the first value that cannot be."""
    if not isinstance(config.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.device):
        raise ValueError(f"device is {config.device!r}; it must be 'auto', 'cpu', 'cuda' or 'cuda:N'.")
    shares = {"gpu_memory_utilization": 1} | ({} if config.window_pool_share is None else {"window_pool_share": 0.99})
    for name, most in shares.items():
        share = getattr(config, name)
        if isinstance(share, bool) or not isinstance(share, numbers.Real) or not 0.0 < float(share) <= most:
            raise ValueError(f"{name} is {share!r}; it must be a number above 0 and at most {most}.")
    ageing = config.priority_ageing_s
    if ageing is not None and 0.0 < real("priority_ageing_s", ageing, 0.0, math.inf) < MIN_AGEING_S:
        raise ValueError(
            f"priority_ageing_s is {ageing}; it must be at least {MIN_AGEING_S} seconds, or 0 for no ageing."
        )
    if config.revision is not None and not isinstance(config.revision, str):
        raise TypeError(f"revision must be a string, not {config.revision!r}.")
    _check_kernels(config)
    _check_replicas(config)
    _check_kv_events(config)


def _check_kernels(config: EngineConfig) -> None:
    if config.attention_backend == "flash" and config.block_size not in (None, FLASH_BLOCK_SIZE):
        raise ValueError(
            f"block_size is {config.block_size}, but attention_backend='flash' works on blocks of {FLASH_BLOCK_SIZE}"
            " tokens. Leave block_size out, or use attention_backend='flex'."
        )
    if config.enforce_eager and config.attention_backend in ("flex", "flash", "cpp"):
        raise ValueError(
            f"attention_backend={config.attention_backend!r} needs compilation, which enforce_eager=True forbids. "
            "Use attention_backend='sdpa' or 'auto', or drop enforce_eager."
        )


def _check_replicas(config: EngineConfig) -> None:
    if config.routing is not None and config.data_parallel_size == 1:
        raise ValueError(
            f"routing is {config.routing!r}, but there is one replica to route to. Set data_parallel_size to at "
            "least 2, or leave routing out."
        )


def _check_kv_events(config: EngineConfig) -> None:
    for name in ("kv_events", "kv_events_replay"):
        endpoint = getattr(config, name)
        if endpoint is not None and not (isinstance(endpoint, str) and _ENDPOINT.fullmatch(endpoint)):
            raise ValueError(
                f"{name} is {endpoint!r}; it must be like 'tcp://*:5557', 'tcp://HOST:PORT' or 'ipc://PATH'."
            )
    if not isinstance(config.kv_events_topic, str):
        raise TypeError(f"kv_events_topic must be a string, not {config.kv_events_topic!r}.")
    for name in ("kv_events_replay", "kv_events_topic", "kv_events_rank"):
        if getattr(config, name) and config.kv_events is None:
            raise ValueError(f"{name} is {getattr(config, name)!r}, but no events are published. Set kv_events too.")
    ports = [int(end.rpartition(":")[2]) for end in (config.kv_events, config.kv_events_replay) if end and "tcp" in end]
    if len(ports) == 2 and all(ports) and abs(ports[0] - ports[1]) < config.data_parallel_size:
        raise ValueError(
            f"kv_events_replay has port {ports[1]} and kv_events port {ports[0]}, to which each replica adds its "
            f"number. Set ports that are at least {config.data_parallel_size} apart."
        )
    if (last := max(ports, default=0) + config.kv_events_rank + config.data_parallel_size - 1) > 65535:
        raise ValueError(
            f"kv_events and kv_events_replay have ports of up to {last}, with the number of the replica; 65535 is the "
            "highest. Set lower ones."
        )
    if config.kv_events is not None and not config.enable_prefix_caching:
        raise ValueError(
            f"kv_events is {config.kv_events!r}, but enable_prefix_caching=False caches no prefix. Leave one of them "
            "out."
        )
