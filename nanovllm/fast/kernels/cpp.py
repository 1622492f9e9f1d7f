"""C++ kernels for CPUs: compiled on first use (some 8 s) for the model's dtype, head size and group size and this
processor, and stored in the user's cache folder. Models with heads of other sizes share the object of the layers.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL, c_float, c_int, c_int64, c_void_p
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from nanovllm.device import cpp_compiler
from nanovllm.errors import KernelBuildError
from nanovllm.fast.host.paths import cache_root
from nanovllm.fast.kernels.packed_product import LANES, can_pack
from nanovllm.fast.kernels.processor_classes import Target, targets
from nanovllm.fast.kernels.start_check import first_wrong

logger = logging.getLogger("nanovllm")
progress = logging.getLogger("nanovllm.progress")  # `nanovllm chat` formats it differently

SOURCES = Path(__file__).with_name("csrc")
ELEMENTS = {torch.float32: "float", torch.bfloat16: "bfloat16"}
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp")
_TRAITS = (c_int64, c_int64, c_float, c_void_p)
# Argument types of the functions, which the sources describe.
_SIGNATURES = {
    "paged_decode_attention": [c_void_p] * 9 + [c_int64] * 5 + [c_float, c_int, *_TRAITS],
    "paged_chunk_attention": [c_void_p] * 8 + [c_int64] * 4 + [c_float, c_int, *_TRAITS],
    "attention_inputs": [c_void_p] * 9 + [c_int64, c_int],
    "attention_outputs": [c_void_p] * 5 + [c_int64, c_int],
    "decoder_layers": [c_void_p, c_int64] + [c_void_p] * 6 + [c_int64, c_int],
    "linear": [c_void_p] * 3 + [c_int64, c_int],
    "linear_unrounded": [c_void_p] * 3 + [c_int64, c_int],
}


class CompilerError(KernelBuildError):
    """The compiler refused the kernels for one class of processors; it may take them for a lesser one."""


def open_library(library: Path, signatures: Mapping[str, Any]) -> Any:
    """Functions of a compiled library by their argument types; none returns a value."""
    functions = CDLL(str(library))
    for name, arguments in signatures.items():
        function = getattr(functions, name)
        function.argtypes = arguments
        function.restype = None
    return functions


class Kernels:
    """Functions of the compiled library, for one dtype and number of query heads per KV head.

    Args:
        target: name of the processor class that it is compiled for.

    Attributes:
        least_byte_rows: rows in a product from which quantised weights are multiplied with rows of 8 bits; 0 if none.
    """

    def __init__(self, library: Path, dtype: torch.dtype, num_groups: int, target: str) -> None:
        self.dtype = dtype
        self.num_groups = num_groups
        self.target = target
        functions = open_library(library, _SIGNATURES)
        functions.least_byte_rows.restype = c_int64
        self.least_byte_rows: int = functions.least_byte_rows()
        self.decode: Any = functions.paged_decode_attention
        self.chunk: Any = functions.paged_chunk_attention
        self.attention_inputs: Any = functions.attention_inputs
        self.attention_outputs: Any = functions.attention_outputs
        self.decoder_layers: Any = functions.decoder_layers
        self.linear: Any = functions.linear
        self.linear_unrounded: Any = functions.linear_unrounded

    def can_pack(self, linears: Sequence[nn.Module]) -> bool:
        """Whether `PackedProduct` can pack these layers together."""
        return can_pack(linears, self.dtype)


def load_kernels(
    dtype: torch.dtype, head_dim: int, num_groups: int, value_dim: int | None = None, exact_rows: bool = False
) -> Kernels:
    """Kernels for the best processor class that passes the start check, cached on disk.

    Args:
        value_dim: defaults to head_dim.
        exact_rows: multiply quantised weights with rows of 15 bits instead of 8, where rows become bytes.

    Raises KernelBuildError if no class compiles or passes, ProcessorClassError, and ValueError for an unsupported dtype
    or head size.
    """
    value_dim = value_dim or head_dim
    if dtype not in ELEMENTS or head_dim % LANES or value_dim % LANES:
        raise ValueError(
            f"they serve float32 and bfloat16 in heads of a multiple of {LANES}, not {dtype} in "
            f"{head_dim if head_dim % LANES else value_dim}."
        )
    sizes = {"HEAD_DIM": head_dim, "VALUE_DIM": value_dim, "NUM_GROUPS": num_groups}
    options_of = {
        "paged_attention.cpp": [f"-D{name}={size}" for name, size in sizes.items()],
        "decoder_layer.cpp": [f"-DEXACT_ROWS={exact_rows:d}"],
    }
    options = [f"-DELEMENT={ELEMENTS[dtype]}"]
    build = partial(built_library, "kernels", options, SOURCES, options_of=options_of)
    for target, library in compiled_targets(build):
        kernels = Kernels(library, dtype, num_groups, target.name)
        wrong = first_wrong(kernels, head_dim, value_dim)
        if wrong is None:
            return kernels
        logger.warning("the C++ kernels for %s are not used, since they are wrong here: %s", target.name, wrong)
    raise KernelBuildError(f"they are wrong on this processor: {wrong}")


def compiled_targets(build: Callable[[Target], Path]) -> Iterator[tuple[Target, Path]]:
    """Processor classes that the compiler supports, best first, with their libraries.

    An old compiler may know this processor, but not all instructions that the kernels use.

    Raises KernelBuildError with the best class's error if there is none.
    """
    refused: dict[str, CompilerError] = {}
    is_said = False
    for target in targets():
        try:
            library = build(target)
        except CompilerError as error:
            refused[target.name] = error
            continue
        if refused and not is_said:
            is_said = True
            _warn_of_lesser_class(", ".join(refused), target.name, str(next(iter(refused.values()))))
        yield target, library
    if refused and not is_said:
        raise next(iter(refused.values()))


@cache
def _warn_of_lesser_class(refused: str, used: str, reason: str) -> None:
    logger.warning(
        "the C++ kernels are compiled for %s, not for %s: %s. A newer compiler (CXX) makes them faster",
        used, refused, reason,
    )  # fmt: skip


def built_library(
    name: str,
    options: Sequence[str],
    folder: Path,
    target: Target,
    *,
    headers: Sequence[Path] = (),
    options_of: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Path:
    """The shared library of a folder's sources for this processor, compiled unless cached on disk.

    Args:
        name: prefix of its file name.
        options: compiler options besides FLAGS and the target's.
        headers: files outside of the folder that its sources include.
        options_of: further options by a source's file name. Libraries share objects with the same options.

    Raises CompilerError if the compiler fails, KernelBuildError if nothing can be compiled or written.
    """
    included = [path.read_text(encoding="utf-8") for path in (*sorted(folder.glob("*.h")), *headers)]
    commands = {}  # compiler command by the object that it writes
    for source in sorted(folder.glob("*.cpp")):
        command = [cpp_compiler(), *target.flags, *FLAGS, *options, *options_of.get(source.name, ())]
        digest = _digest([*command, source.read_text(encoding="utf-8"), *included, processor()])
        commands[cache_root() / "objects" / f"{source.stem}-{digest}.o"] = [*command, "-c", str(source)]
    library = cache_root() / "kernels" / f"{name}-{_digest([path.name for path in commands])}.so"
    if not library.exists():
        progress.warning(
            "compiling the C++ kernels for this processor (%s) and model shape: a few seconds, once", target.name
        )
        _build(commands, library)
    return library


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


def processor() -> str:
    """Identity of this processor for -march=native: different machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _build(commands: Mapping[Path, Sequence[str]], library: Path) -> None:
    """Compile the missing objects at once, then link all."""
    missing = [(command, path) for path, command in commands.items() if not path.exists()]
    if missing:
        with ThreadPoolExecutor(len(missing)) as threads:
            list(threads.map(_compile, *zip(*missing, strict=True)))
    _compile([cpp_compiler(), *FLAGS, *map(str, commands)], library)


def _compile(command: Sequence[str], output: Path) -> None:
    """Compile in a temporary folder and rename, so that an existing file is complete."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent) as folder:
            built = Path(folder) / output.name
            done = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise CompilerError(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
            os.replace(built, output)
    except OSError as error:
        raise KernelBuildError(f"the kernels could not be built in {output.parent}: {error}") from error
