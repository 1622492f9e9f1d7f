"""Memory of one GPU that the processes of other GPUs map, by the driver's own calls.

PyTorch has memory of this kind too, but gives it to registered process groups alone, which are the user's.
"""

from __future__ import annotations

import ctypes
from typing import Any

from nanovllm.kernels.nvrtc import check, driver

_HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """Names memory of one process to the others."""

    _fields_ = (("data", ctypes.c_ubyte * _HANDLE_BYTES),)


class PeerMemory:
    """Zeroed memory on the current device, and what every peer allocated so. Constructing it waits for all ranks.

    It stays until the process ends: who frees it must know that no peer uses it any more.

    Args:
        rank, size: as for `Ranks`.
        store: of all ranks, for this memory alone.

    Attributes:
        addresses: of each rank's memory, in the current device's address space.

    Raises CudaError on this rank if the device cannot, and where a peer's memory cannot be mapped.
    """

    def __init__(self, rank: int, size: int, num_bytes: int, store: Any) -> None:
        own, handle = ctypes.c_uint64(), _Handle()
        name = b""  # of memory that could not be allocated
        try:
            check(driver().cuMemAlloc_v2(ctypes.byref(own), ctypes.c_size_t(num_bytes)), f"allocate {num_bytes} bytes")
            check(driver().cuMemsetD8_v2(own, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes)), "clear memory")
            check(driver().cuCtxSynchronize(), "wait for the device")
            check(driver().cuIpcGetMemHandle(ctypes.byref(handle), own), "share memory with other processes")
            name = bytes(handle)
        finally:
            store.set(f"memory-{rank}", name.hex())  # also of a failure: the peers wait for it
        self.addresses = [own.value if peer == rank else _mapped(store, peer) for peer in range(size)]


def _mapped(store: Any, peer: int) -> int:
    """The address at which a peer's memory is mapped."""
    name = bytes.fromhex(store.get(f"memory-{peer}").decode())
    address = ctypes.c_uint64()
    handle = _Handle.from_buffer_copy(name.ljust(_HANDLE_BYTES, b"\0"))
    open_handle = driver().cuIpcOpenMemHandle_v2
    open_handle.argtypes = (ctypes.c_void_p, _Handle, ctypes.c_uint)
    check(open_handle(ctypes.byref(address), handle, _ENABLE_PEER_ACCESS), f"map the memory of rank {peer}")
    return address.value
