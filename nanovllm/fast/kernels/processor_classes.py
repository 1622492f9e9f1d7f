"""Processor classes by their instructions for products, and compiler flags for each.

Kernels are compiled for the processor that runs them. `NANOVLLM_CPU_CLASS` selects a lesser class, to test on one
machine the kernels of another.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nanovllm.errors import ProcessorClassError

VARIABLE = "NANOVLLM_CPU_CLASS"
_NO_TILES = ("-mno-amx-bf16", "-mno-amx-int8", "-mno-amx-tile")


@dataclass(frozen=True, slots=True)
class ProcessorClass:
    """A class of processors with the same kernels.

    needs: processor flags that the class requires.
    lesser_flags: compiler flags on a processor of a better class; a processor's own class uses `NATIVE`.
    """

    name: str
    needs: frozenset[str]
    lesser_flags: tuple[str, ...]


# Flags of instructions that multiply bytes, in which products of quantised weights round differently.
BYTE_PRODUCTS = frozenset({"amx_int8", "avx512_vnni", "avx512_vbmi", "avx_vnni"})
NATIVE = ("-march=native",)
# Best first; the last requires nothing.
X86 = (
    ProcessorClass("amx", frozenset({"amx_bf16", "amx_tile", "avx512_bf16", "avx512bw"}), NATIVE),
    ProcessorClass("avx512_bf16", frozenset({"avx512_bf16", "avx512bw"}), (*NATIVE, *_NO_TILES)),
    ProcessorClass("avx512", frozenset({"avx512f", "avx512bw"}), (*NATIVE, *_NO_TILES, "-mno-avx512bf16")),
    ProcessorClass("avx2", frozenset({"avx2", "fma"}), ("-march=x86-64-v3",)),
    ProcessorClass("plain", frozenset(), ("-march=x86-64",)),
)
NON_X86 = (ProcessorClass("native", frozenset(), NATIVE),)


@dataclass(frozen=True, slots=True)
class Target:
    """A class and its compiler flags on this processor."""

    name: str
    flags: tuple[str, ...]


def targets(environment: Mapping[str, str] = os.environ) -> list[Target]:
    """Targets for this processor, best first; NANOVLLM_CPU_CLASS skips the better ones.

    Raises ProcessorClassError for a class that this processor does not support.
    """
    own = own_classes(processor_flags(), platform.machine())
    found = [Target(own[0].name, NATIVE), *(Target(lesser.name, lesser.lesser_flags) for lesser in own[1:])]
    wanted = environment.get(VARIABLE)
    if not wanted:
        return found
    names = [target.name for target in found]
    if wanted not in names:
        raise ProcessorClassError(
            f"NANOVLLM_CPU_CLASS is {wanted!r}, but this processor's classes are {', '.join(names)}. Set it to one of "
            "them, or leave it out."
        )
    return found[names.index(wanted) :]


def rounding_class(environment: Mapping[str, str] = os.environ) -> str:
    """Processor class and byte products of the kernels: machines with equal ones round alike."""
    best = targets(environment)[0]
    byte_products = BYTE_PRODUCTS & processor_flags() if NATIVE[0] in best.flags else frozenset()
    return " ".join([best.name, *sorted(byte_products)])


def own_classes(flags: frozenset[str], machine: str) -> list[ProcessorClass]:
    """Classes that a processor supports, best first."""
    classes = X86 if machine in ("x86_64", "AMD64") else NON_X86
    return [each for each in classes if each.needs <= flags]


@cache
def processor_flags() -> frozenset[str]:
    """Flags of the first processor in /proc/cpuinfo; empty if there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), ":")
    return frozenset(found.partition(":")[2].split())
