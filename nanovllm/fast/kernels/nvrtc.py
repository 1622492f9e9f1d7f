"""Compiles CUDA C++ with the compiler library of PyTorch's GPU builds; machine code is kept in the cache folder."""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from nanovllm.fast.host.paths import cache_root

BFLOAT16 = Path(__file__).with_name("bfloat16.h")  # a source that others begin with
_MAX_SHARED_BYTES = 8  # number of a function attribute
_CLUSTER, _STARTS_EARLY = 4, 6  # numbers of launch attributes
_locks: defaultdict[str, Lock] = defaultdict(Lock)  # lock of each file of the cache


class CudaError(RuntimeError):
    """An error of the compiler or the driver."""


def joined_sources(*paths: Path) -> str:
    """The text of some source files, in their order, as one."""
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


@cache
def _compiler() -> Any:
    version = (torch.version.cuda or "").split(".")[0]
    name = f"libnvrtc.so.{version}"
    folders = [Path(torch.__file__).parents[1] / "nvidia", Path("/usr/local/cuda/lib64")]
    found = [str(path) for folder in folders if folder.is_dir() for path in sorted(folder.rglob(name))]
    for path in [*found, name, ctypes.util.find_library("nvrtc")]:
        try:
            return ctypes.CDLL(path) if path else None
        except OSError:
            continue
    return None


@cache
def driver() -> Any:
    """The CUDA driver library."""
    return ctypes.CDLL("libcuda.so.1")


def is_available() -> bool:
    """Whether this PyTorch has a compiler."""
    return torch.version.cuda is not None and _compiler() is not None


def compile_source(source: str, architecture: str, definitions: Mapping[str, Any]) -> bytes:
    """Machine code of a source text, cached on disk by text, options and the compiler's version; raises CudaError.

    Args:
        architecture: such as "sm_90".
        definitions: macros and their values.
    """
    library = _compiler()
    if library is None:
        raise CudaError("there is no libnvrtc beside PyTorch nor on the loader's path; install nvidia-cuda-nvrtc.")
    options = [f"--gpu-architecture={architecture}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in definitions.items()]
    identity = "\0".join([source, *options, *map(str, _version(library))])
    path = cache_root() / "kernels" / f"{hashlib.sha256(identity.encode()).hexdigest()[:24]}.cubin"
    with _locks[path.name]:  # a thread at start may be at it
        with suppress(OSError):
            return path.read_bytes()
        code = _compile(library, source, options)
        with suppress(OSError):  # a missing cache folder costs a compilation at each start
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(code)
            os.replace(file.name, path)
    return code


def _version(library: Any) -> tuple[int, int]:
    major = ctypes.c_int()
    minor = ctypes.c_int()
    check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "name its version")
    return major.value, minor.value


def _compile(library: Any, source: str, options: Sequence[str]) -> bytes:
    program = ctypes.c_void_p()
    check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"source.cu", 0, None, None), "create")
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            raise CudaError(f"the source does not compile:\n{_text(library, program, 'ProgramLog').decode()}")
        return _text(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(library: Any, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def check(result: int, action: str) -> None:
    """Raise CudaError unless the compiler or driver returned success."""
    if result:
        raise CudaError(f"CUDA answers {result} to: {action}.")


class _Attribute(ctypes.Structure):
    _fields_ = [("number", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("sizes", ctypes.c_uint * 7),  # grid (3), block (3), bytes of shared memory
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("num_attributes", ctypes.c_uint),
    ]  # fmt: skip


class CudaFunction:
    """A kernel of compiled code, on the current device.

    Args:
        shared_bytes: bytes of dynamic shared memory per block.
    """

    def __init__(self, code: bytes, name: str, *, num_threads: int, shared_bytes: int) -> None:
        torch.cuda.current_stream().synchronize()  # creates the context
        self._num_threads = num_threads
        self._shared_bytes = shared_bytes
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        check(driver().cuModuleLoadData(ctypes.byref(self._module), code), "load code")
        check(driver().cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()), f"find {name}")
        set_attribute = driver().cuFuncSetAttribute
        check(set_attribute(self._function, _MAX_SHARED_BYTES, shared_bytes), f"take {shared_bytes} shared bytes")

    def launch(self, num_blocks: int, *arguments: Any) -> None:
        """Launch on the current stream. Arguments are ctypes objects."""
        self._launch(driver().cuLaunchKernel, num_blocks, arguments, (None,))

    def launch_at_once(self, num_blocks: int, *arguments: Any) -> None:
        """Cooperative launch on the current stream: all blocks run concurrently. Arguments are ctypes objects."""
        self._launch(driver().cuLaunchCooperativeKernel, num_blocks, arguments, ())

    def launch_early(self, num_blocks: int, *arguments: Any, cluster: int = 1, shared_bytes: int | None = None) -> None:
        """Launch on the current stream, from where the kernel before allows it (programmatic dependent launch).

        The kernel itself has to wait for that one's results. Arguments are ctypes objects.

        Args:
            cluster: number of neighbouring blocks in a cluster, a divisor of `num_blocks`.
            shared_bytes: less than the function's own.
        """
        shared = self._shared_bytes if shared_bytes is None else shared_bytes
        attributes = (_Attribute * 2)(
            _Attribute(_STARTS_EARLY, 0, (ctypes.c_int * 16)(1)),
            _Attribute(_CLUSTER, 0, (ctypes.c_int * 16)(cluster, 1, 1)),
        )
        sizes = (ctypes.c_uint * 7)(num_blocks, 1, 1, self._num_threads, 1, 1, shared)
        stream = torch.cuda.current_stream().cuda_stream
        config = _LaunchConfig(sizes, stream, attributes, 1 if cluster == 1 else 2)
        pointers = _pointers(arguments)
        check(driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None), "launch")

    def _launch(self, launch: Any, num_blocks: int, arguments: tuple[Any, ...], extra: tuple[None, ...]) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointers = _pointers(arguments)
        check(
            launch(
                self._function, num_blocks, 1, 1, self._num_threads, 1, 1, self._shared_bytes, stream, pointers, *extra
            ),
            "launch",
        )  # fmt: skip


def _pointers(arguments: tuple[Any, ...]) -> Any:
    return (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
