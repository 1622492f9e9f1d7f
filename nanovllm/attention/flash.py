"""FlexAttention's FLASH backend for chunks: FlashAttention-4's kernels under the same block masks.

It takes blocks of 128 slots, the size of its tiles, and a table as wide as the cache; docs/results/gpu.md has figures.
FlashAttention-4: the project flash-attention (Dao et al.), installed by the extra `flash`.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from nanovllm.cache.kinds import LayerTraits
from nanovllm.core.config import FLASH_BLOCK_SIZE

LOGGING_PACKAGES = ("flash_attn", "cutlass", "quack")
TRIED_VERSION = "4.0.0b5"  # of flash-attn-4: its interface still changes; the extra `flash` pins the same


def supports_traits(traits: LayerTraits) -> str | None:
    """The first trait of a layer that the FLASH backend was not tried with, in words; None if it serves the layer."""
    return traits.first_beyond()


def missing_for_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """The obstacle to the FLASH backend for a model's chunks, in words; None if there is none."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "it was tried on GPUs of compute capability 9 alone (H100, H200)"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it knows bfloat16 and float16, and the model is in {str(dtype).removeprefix('torch.')}"
    if not 96 < head_dim <= 128:  # others have tiles that are not 128 by 128
        return f"its tiles fit pages of {FLASH_BLOCK_SIZE} for heads of 104 to 128, and the model's have {head_dim}"
    try:
        is_there = find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError as error:
        is_there = error.name != "flash_attn"  # else something that it needs is missing; `import_failure` names it
    except Exception:  # the search imports the package around it
        is_there = True
    return None if is_there else "flash-attn-4 is not installed (pip install 'nanovllm[flash]')"


def has_tried_version() -> bool:
    try:
        return version("flash-attn-4") == TRIED_VERSION
    except PackageNotFoundError:
        return False


@functools.cache
def import_failure() -> str | None:
    """Why FlashAttention-4 is installed but not usable, in words; None if it can be imported.

    Imports it, once a process. The compiler would do so within a step, where a failure ends the engine.
    """
    keep_compiled_kernels()
    try:
        with _without_debug_lines():
            import_module("flash_attn.cute.interface")
    except Exception as error:  # a native library that is missing, a version of a dependency: anything
        return (
            f"flash-attn-4 is installed but cannot be imported ({type(error).__name__}: {error}); reinstall it "
            "(pip install --force-reinstall 'nanovllm[flash]')"
        )
    return None


def keep_compiled_kernels() -> None:
    """Let FlashAttention find the kernels that it compiled in an earlier process; to be called before its import."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


@contextmanager
def _without_debug_lines() -> Iterator[None]:
    """Around the import: it and its compiler log at DEBUG, through handlers of their own, also later at each kernel.

    A level that was set before stays.
    """
    loggers, disabled = logging.root.manager.loggerDict, logging.root.manager.disable
    chosen = {name for name, logger in loggers.items() if isinstance(logger, logging.Logger) and logger.level}
    for package in LOGGING_PACKAGES:
        if package not in chosen:
            logging.getLogger(package).setLevel(logging.INFO)
    logging.disable(max(disabled, logging.DEBUG))  # messages logged before their loggers have a level
    try:
        yield
    finally:
        logging.disable(disabled)
        for name, logger in list(loggers.items()):
            is_theirs = name.partition(".")[0] in LOGGING_PACKAGES and name not in chosen
            if is_theirs and isinstance(logger, logging.Logger) and 0 < logger.level < logging.INFO:
                logger.setLevel(logging.INFO)
