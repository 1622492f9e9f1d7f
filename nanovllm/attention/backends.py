"""Which form of attention an engine gets: what was measured fastest on its device, as far as it can be had there.

docs/guide/tuning.md and docs/results/gpu.md have the figures.
"""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass, replace

import torch

from nanovllm.attention.cpp import CppAttention
from nanovllm.attention.flash import has_tried_version, import_failure, missing_for_flash
from nanovllm.attention.flex_cpu import FlexAttention
from nanovllm.attention.sdpa import SdpaAttention
from nanovllm.config import FLASH_BLOCK_SIZE, EngineConfig
from nanovllm.execution.direct import AttentionForm
from nanovllm.kernels.cpp import KernelBuildError, Kernels, load_kernels
from nanovllm.model.binding import ModelBinding

logger = logging.getLogger("nanovllm")


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """What was chosen.

    backend: "flex", "flash", "sdpa" or "cpp".
    compiles: whether layers may be compiled.
    uses_graphs: whether steps are captured, or at least laid out for it (on a GPU, "flex" and "flash").
    kernels: of "cpp".
    """

    backend: str
    compiles: bool
    uses_graphs: bool
    kernels: Kernels | None

    @classmethod
    def of(cls, binding: ModelBinding, config: EngineConfig) -> AttentionChoice:
        """Raises ValueError for a backend that was asked for and cannot be had, saying what is missing."""
        device = binding.device
        compiles = _may_compile(config, device)
        wanted = config.attention_backend
        kernels = None
        if wanted == "auto":
            fastest = "cpp" if device.type != "cuda" else "flash" if _auto_takes_flash(binding, config) else "flex"
            wanted = fastest if compiles else "sdpa"
        if wanted == "flash":
            missing = _missing_for_flash(binding, config) or import_failure()
            if missing is not None:
                raise ValueError(f"attention_backend='flash' cannot be had: {missing}. Use 'auto' or 'flex'.")
        if wanted == "cpp":
            try:
                kernels = _load_kernels(binding)
            except (KernelBuildError, ValueError) as error:
                if config.attention_backend == "cpp":
                    raise ValueError(f"attention_backend='cpp' cannot be had: {error}") from error
                logger.warning("attention is 'sdpa', since the C++ kernels cannot be had: %s", error)
                wanted = "sdpa"
        return cls(wanted, compiles, wanted in ("flex", "flash") and device.type == "cuda", kernels)

    def captures(self, config: EngineConfig, device: torch.device) -> bool:
        """What `cuda_graphs` comes to; raises ValueError if it was asked for and cannot be had."""
        if config.cuda_graphs and not self.uses_graphs:
            raise ValueError(
                "cuda_graphs=True needs compiled layers on a GPU and attention_backend='flex' or 'flash', and this "
                f"engine has {self.backend!r} on {device}. Leave it out."
            )
        return self.uses_graphs if config.cuda_graphs is None else config.cuda_graphs

    def form(self, binding: ModelBinding, config: EngineConfig, *, uncompiled: bool = False) -> AttentionForm:
        """The form itself, for steps that are not captured; config is fully resolved, but for one `uncompiled`."""
        layer = binding.layers[0]
        if self.backend == "flex" and not uncompiled:
            return FlexAttention(
                num_blocks=config.num_kv_blocks,
                block_size=config.block_size,
                num_groups=layer.num_heads // layer.num_kv_heads,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                device=binding.device,
            )
        page_bytes = binding.caches.num_bytes(config.block_size) // len(binding.layers)
        if self.kernels is not None and not uncompiled:
            return CppAttention(
                self.kernels,
                num_blocks=config.num_kv_blocks,
                block_size=config.block_size,
                page_bytes=page_bytes,
            )
        return SdpaAttention(config.block_size, page_bytes, layer.dtype, binding.device)


def preferred_block_size(binding: ModelBinding, config: EngineConfig) -> int | None:
    """Where the user set none: what the form that they want works on; None for the device's default."""
    if config.block_size is not None:
        return None
    takes_flash = config.attention_backend == "flash"  # where it is missing, `AttentionChoice` says what
    if config.attention_backend == "auto":
        takes_flash = _auto_takes_flash(binding, replace(config, block_size=FLASH_BLOCK_SIZE))
    return FLASH_BLOCK_SIZE if takes_flash else None


def _may_compile(config: EngineConfig, device: torch.device) -> bool:
    if config.enforce_eager:
        logger.warning("enforce_eager: nothing is compiled; layers run eagerly, attention is 'sdpa'")
        return False
    missing = _missing_compiler(device)
    if missing is None:
        return True
    if config.attention_backend in ("flex", "flash", "cpp"):
        raise ValueError(
            f"attention_backend={config.attention_backend!r} needs {missing}, and none was found. Install g++ or "
            "clang++ (or name one in the environment variables CC and CXX), or use attention_backend='sdpa'."
        )
    logger.warning("%s was not found: nothing is compiled; layers run eagerly, attention is 'sdpa'", missing)
    return False


def _missing_compiler(device: torch.device) -> str | None:
    """What torch.compile needs on this device and does not find; None if it has all."""
    if device.type == "cuda":  # Triton builds its launchers in C
        names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang", "cc"]
        return None if any(shutil.which(name) for name in names) else "a C compiler"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return None if shutil.which(get_cpp_compiler()) else "a C++ compiler"
    except (InvalidCxxCompiler, RuntimeError, OSError):
        return "a C++ compiler"


def _auto_takes_flash(binding: ModelBinding, config: EngineConfig) -> bool:
    """Where the user has installed it, in the version that was measured, and asked for nothing that it cannot do."""
    if config.enforce_eager or not has_tried_version() or _missing_for_flash(binding, config) is not None:
        return False
    failure = import_failure()
    if failure is not None:
        logger.warning("attention is 'flex': %s", failure)
    return failure is None


def _missing_for_flash(binding: ModelBinding, config: EngineConfig) -> str | None:
    layer = binding.layers[0]
    missing = missing_for_flash(binding.device, layer.dtype, layer.head_dim)
    if missing is None and config.block_size != FLASH_BLOCK_SIZE:
        return f"it works on blocks of {FLASH_BLOCK_SIZE} tokens, and block_size is {config.block_size}"
    return missing


def _load_kernels(binding: ModelBinding) -> Kernels:
    layer = binding.layers[0]
    if binding.device.type != "cpu":
        raise ValueError(f"they run on a CPU, and the model is on {binding.device}.")
    return load_kernels(layer.dtype, layer.head_dim, layer.num_heads // layer.num_kv_heads)
