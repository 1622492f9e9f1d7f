"""The engine's own choices of attention and memory: FlexAttention or SDPA, and a fixed share of the memory."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from nanovllm.attention.operator import AttentionBackend, AttentionLayer
from nanovllm.attention.sdpa import Scores, SdpaAttention
from nanovllm.cache.kinds import kinds_of
from nanovllm.core.plain_config import EngineConfig
from nanovllm.process.device import cpp_compiler

logger = logging.getLogger("nanovllm")

CPU_CACHE_BYTES = 2**30


def memory_share(binding: Any, config: EngineConfig, choice: object) -> int:
    """Bytes that the KV cache may take by default; of a GPU half of what is free, and the other half is for steps."""
    if binding.device.type == "cpu":
        return CPU_CACHE_BYTES
    free, _ = torch.cuda.mem_get_info(binding.device)
    return int(config.gpu_memory_utilization * free) // 2


@dataclass(frozen=True, slots=True)
class PlainAttention:
    """FlexAttention on a CPU with a compiler, else SDPA.

    backend: "flex" or "sdpa".
    uses_graphs: False: no step is laid out for CUDA graphs.
    """

    backend: str
    uses_graphs: ClassVar[bool] = False

    @classmethod
    def for_model(cls, layers: Sequence[AttentionLayer], device: torch.device, config: EngineConfig) -> PlainAttention:
        """Raises ValueError for a backend that the user set and that is not there."""
        wanted = config.attention_backend
        if wanted not in ("auto", "flex", "sdpa"):
            raise ValueError(f"attention_backend is {wanted!r}, which this installation lacks. Use 'auto' or 'sdpa'.")
        compiles = wanted != "sdpa" and may_compile(config, device)
        backend = "flex" if compiles and (wanted == "flex" or device.type == "cpu") else "sdpa"
        if backend == "sdpa" and any(layer.traits.softcap is not None or layer.traits.has_sinks for layer in layers):
            raise ValueError(
                "the model has layers with a soft-cap or sinks, which 'sdpa' of this installation does not compute. "
                "Set attention_backend='flex', or install the whole package."
            )
        return cls(backend)

    def captures(self, config: EngineConfig, device: torch.device, obstacle: str | None = None) -> bool:
        """The resolved `cuda_graphs`: False; raises ValueError if the user set it."""
        if config.cuda_graphs:
            raise ValueError("cuda_graphs is True, which this installation lacks. Leave it out.")
        return False

    def build(
        self,
        layers: Sequence[AttentionLayer],
        device: torch.device,
        config: EngineConfig,
        pools: object = None,
        scores: Sequence[Scores | None] = (),
    ) -> AttentionBackend:
        """The backend; config is fully resolved. `scores` as of `SdpaAttention`."""
        kinds = kinds_of(layer.traits for layer in layers)
        if self.backend == "sdpa":
            block_bytes = max(layer.token_bytes for layer in layers) * config.block_size
            return SdpaAttention(kinds, config.block_size, block_bytes, layers[0].dtype, device, scores)
        from nanovllm.attention.flex_cpu import FlexAttention  # with a part of the compiler, which takes a second

        return FlexAttention(
            num_blocks=config.num_kv_blocks,
            block_size=config.block_size,
            kinds=kinds,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            device=device,
        )


def may_compile(config: EngineConfig, device: torch.device) -> bool:
    """Whether options and machine allow compilation; raises ValueError if a backend that the user set lacks it."""
    if config.enforce_eager:
        logger.warning("enforce_eager: nothing is compiled; layers run eagerly, attention is 'sdpa'")
        return False
    missing = _missing_compiler(device)
    if missing is None:
        return True
    if config.attention_backend in ("flex", "cpp"):
        raise ValueError(
            f"attention_backend={config.attention_backend!r} needs {missing}, and none was found. Install g++ or "
            "clang++ (or name one in the environment variables CC and CXX), or use attention_backend='sdpa'."
        )
    logger.warning("%s was not found: nothing is compiled; layers run eagerly, attention is 'sdpa'", missing)
    return False


def _missing_compiler(device: torch.device) -> str | None:
    """The compiler that torch.compile needs on this device and does not find; None if nothing is missing."""
    if device.type == "cuda":  # Triton builds its launchers in C
        names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang", "cc"]
        return None if any(shutil.which(name) for name in names) else "a C compiler"
    return None if shutil.which(cpp_compiler()) else "a C++ compiler"
