"""The CPU's C++ kernels: compiled for the model's dtype, head size and group when they are first needed (two to four
seconds), for the very processor, and kept in the user's cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanovllm.core.errors import CompilerError, KernelBuildError
from nanovllm.core.paths import cache_root
from nanovllm.kernels.packed_product import LANES, can_pack
from nanovllm.kernels.processor_classes import Target, targets
from nanovllm.kernels.start_check import first_wrong
from nanovllm.process.device import cpp_compiler

logger = logging.getLogger("nanovllm")
progress = logging.getLogger("nanovllm.progress")  # which `nanovllm chat` shows in its own way

SOURCES = Path(__file__).with_name("csrc")
ELEMENTS = {torch.float32: "float", torch.bfloat16: "bfloat16"}
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp")
_TRAITS = (c_int64, c_int64, c_float, c_void_p)
# The functions' arguments; the sources describe them.
_SIGNATURES = {
    "paged_decode_attention": [c_void_p] * 9 + [c_int64] * 5 + [c_float, c_int, *_TRAITS],
    "paged_chunk_attention": [c_void_p] * 8 + [c_int64] * 4 + [c_float, c_int, *_TRAITS],
    "attention_inputs": [c_void_p] * 9 + [c_int64, c_int],
    "attention_outputs": [c_void_p] * 5 + [c_int64, c_int],
    "decoder_layers": [c_void_p, c_int64] + [c_void_p] * 6 + [c_int64, c_int],
    "linear": [c_void_p] * 3 + [c_int64, c_int],
    "linear_unrounded": [c_void_p] * 3 + [c_int64, c_int],
}


class Kernels:
    """The functions of the compiled library, for one dtype and number of query heads a KV head.

    Args:
        target: the name of the class of processors that it is compiled for.
    """

    def __init__(self, library: Path, dtype: torch.dtype, num_groups: int, target: str) -> None:
        self.dtype, self.num_groups, self.target = dtype, num_groups, target
        functions = ctypes.CDLL(str(library))
        for name, arguments in _SIGNATURES.items():
            function = getattr(functions, name)
            function.argtypes, function.restype = arguments, None
        self.decode: Any = functions.paged_decode_attention
        self.chunk: Any = functions.paged_chunk_attention
        self.attention_inputs: Any = functions.attention_inputs
        self.attention_outputs: Any = functions.attention_outputs
        self.decoder_layers: Any = functions.decoder_layers
        self.linear: Any = functions.linear
        self.linear_unrounded: Any = functions.linear_unrounded

    def can_pack(self, linears: Sequence[nn.Module]) -> bool:
        """Whether `PackedProduct` takes these layers, side by side."""
        return can_pack(linears, self.dtype)


def load_kernels(dtype: torch.dtype, head_dim: int, num_groups: int, value_dim: int | None = None) -> Kernels:
    """The compiled kernels of the best class that is right on this processor; from the cache folder if they are there.

    Args:
        value_dim: that of the keys by default.

    Raises KernelBuildError if none are, ProcessorClassError, or ValueError for a dtype or a head size that they do not
    serve.
    """
    value_dim = value_dim or head_dim
    if dtype not in ELEMENTS or head_dim % LANES or value_dim % LANES:
        raise ValueError(
            f"they serve float32 and bfloat16 in heads of a multiple of {LANES}, not {dtype} in "
            f"{head_dim if head_dim % LANES else value_dim}."
        )
    sizes = {"ELEMENT": ELEMENTS[dtype], "HEAD_DIM": head_dim, "VALUE_DIM": value_dim, "NUM_GROUPS": num_groups}
    options = [f"-D{name}={size}" for name, size in sizes.items()]
    for target, library in compiled_targets(partial(built_library, "kernels", options, SOURCES)):
        kernels = Kernels(library, dtype, num_groups, target.name)
        wrong = first_wrong(kernels, head_dim, value_dim)
        if wrong is None:
            return kernels
        logger.warning("the C++ kernels for %s are not used, since they are wrong here: %s", target.name, wrong)
    raise KernelBuildError(f"they are wrong on this processor: {wrong}")


def compiled_targets(build: Callable[[Target], Path]) -> Iterator[tuple[Target, Path]]:
    """The classes that the compiler can compile for, the best first, each with its library; others are left out.

    An old compiler may know this processor, and not all that the kernels use of it.

    Raises KernelBuildError, from the best class, if there is none.
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
            _say_refused(", ".join(refused), target.name, str(next(iter(refused.values()))))
        yield target, library
    if refused and not is_said:
        raise next(iter(refused.values()))


@cache
def _say_refused(refused: str, taken: str, reason: str) -> None:
    logger.warning(
        "the C++ kernels are compiled for %s, not for %s: %s. A newer compiler (CXX) makes them faster",
        taken, refused, reason,
    )  # fmt: skip


def built_library(name: str, options: list[str], folder: Path, target: Target, *, others: Sequence[Path] = ()) -> Path:
    """The shared library of a folder's sources, from the cache folder if this processor's is there already.

    Args:
        name: what its file's name begins with.
        options: of the compiler, besides FLAGS and the target's.
        others: files outside of the folder that its sources include.

    Raises CompilerError if the compiler fails, KernelBuildError if nothing can be compiled or written.
    """
    command = [cpp_compiler(), *target.flags, *FLAGS, *options]
    texts = [path.read_text(encoding="utf-8") for path in (*sorted(folder.glob("*.*")), *others)]
    identity = "\0".join([*command, *texts, processor()])
    library = cache_root() / "kernels" / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.so"
    if not library.exists():
        progress.warning(
            "compiling the C++ kernels for this processor (%s) and model shape: a few seconds, once", target.name
        )
        _build([*command, *(str(path) for path in sorted(folder.glob("*.cpp")))], library)
    return library


def processor() -> str:
    """What -march=native depends on: a cache folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _build(command: list[str], library: Path) -> None:
    """Compile beside the final place and rename, so that what is there is complete."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / library.name
            done = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise CompilerError(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
            os.replace(built, library)
    except OSError as error:
        raise KernelBuildError(f"the kernels could not be built in {library.parent}: {error}") from error
