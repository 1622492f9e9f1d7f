"""Classes of processors, by what they multiply with, and the compiler's flags for each.

The kernels are compiled for the very processor. `NANOVLLM_CPU_CLASS` names a lesser class instead, to try on one
machine what another would run.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nanovllm.core.errors import ProcessorClassError

VARIABLE = "NANOVLLM_CPU_CLASS"
_NO_TILES = ("-mno-amx-bf16", "-mno-amx-int8", "-mno-amx-tile")


@dataclass(frozen=True, slots=True)
class ProcessorClass:
    """What the kernels are compiled for.

    needs: the processor's flags without which it is of a lesser class.
    lesser_flags: of the compiler, for a processor of a better class; its own class is compiled for with `NATIVE`.
    """

    name: str
    needs: frozenset[str]
    lesser_flags: tuple[str, ...]


NATIVE = ("-march=native",)
# Best first; the last needs nothing.
X86 = (
    ProcessorClass("amx", frozenset({"amx_bf16", "amx_tile", "avx512_bf16", "avx512bw"}), NATIVE),
    ProcessorClass("avx512_bf16", frozenset({"avx512_bf16", "avx512bw"}), (*NATIVE, *_NO_TILES)),
    ProcessorClass("avx512", frozenset({"avx512f", "avx512bw"}), (*NATIVE, *_NO_TILES, "-mno-avx512bf16")),
    ProcessorClass("avx2", frozenset({"avx2", "fma"}), ("-march=x86-64-v3",)),
    ProcessorClass("plain", frozenset(), ("-march=x86-64",)),
)
OTHERS = (ProcessorClass("native", frozenset(), NATIVE),)


@dataclass(frozen=True, slots=True)
class Target:
    """A class, and the compiler's flags for it on this processor."""

    name: str
    flags: tuple[str, ...]


def targets(environment: Mapping[str, str] = os.environ) -> list[Target]:
    """What kernels can be compiled for, the best first, or that which the environment names.

    Raises ProcessorClassError for a name that this processor does not know.
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


def own_classes(flags: frozenset[str], machine: str) -> list[ProcessorClass]:
    """The classes that a processor belongs to, the best first."""
    classes = X86 if machine in ("x86_64", "AMD64") else OTHERS
    return [each for each in classes if each.needs <= flags]


@cache
def processor_flags() -> frozenset[str]:
    """What /proc/cpuinfo says that the first processor can; empty where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), ":")
    return frozenset(found.partition(":")[2].split())
