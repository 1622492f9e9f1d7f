"""Memory for the KV cache: the device's, less the weights and a worst-case step."""

from __future__ import annotations

import torch

from nanovllm.device import DEVICE_LOCK, raise_device_error
from nanovllm.fast.attention.backends import AttentionChoice
from nanovllm.fast.attention.flex_gpu import widened_share
from nanovllm.fast.gpu.gpu_memory import free_earlier_engines, measure_peaks, workspace_bytes
from nanovllm.features.engine_config import EngineConfig
from nanovllm.model import ModelBinding

# GPU memory left free beyond the measured peak, for allocator fragmentation and kernels' own workspaces.
GPU_RESERVE_BYTES = 512 * 2**20


def memory_for_cache(binding: ModelBinding, config: EngineConfig, choice: AttentionChoice) -> int:
    """Bytes that the cache may take on a GPU by default; 0 where the user has set its size."""
    if config.num_kv_blocks is not None or config.kv_cache_memory_bytes is not None:
        return 0
    free_earlier_engines(binding)
    try:
        with DEVICE_LOCK:
            peaks = measure_peaks(binding, config, choice)
            num_step_bytes = peaks.whole + (workspace_bytes(binding, config, peaks) if choice.uses_graphs else 0)
    except RuntimeError as error:
        raise_device_error(error)
    free, total = torch.cuda.mem_get_info(binding.device)  # memory of other processes counts as used
    num_bytes = int(config.gpu_memory_utilization * total) - (total - free) - num_step_bytes - GPU_RESERVE_BYTES
    if choice.uses_graphs:
        num_bytes = int(num_bytes / (1 + widened_share(binding.layers)))
    # Compiled code depends on the caches' size, which is rounded so that the next process finds the code again.
    block_bytes = max(1, binding.caches.num_bytes(config.block_size))  # 0 without attention
    num_blocks = max(0, num_bytes) // block_bytes
    return block_bytes * (num_blocks - num_blocks % max(1, num_blocks >> 5))
