"""GPU memory that processes of other GPUs map, through the CUDA driver.

PyTorch offers such memory only to registered process groups, which are the user's.
"""

from __future__ import annotations

import ctypes
from typing import Any

from nanovllm.fast.kernels.nvrtc import check, driver

_HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """IPC handle of one process's memory."""

    _fields_ = (("data", ctypes.c_ubyte * _HANDLE_BYTES),)


class PeerMemory:
    """Zeroed memory on the current device, and every peer's, mapped; construction waits for all ranks.

    It is never freed: a peer might still use it.

    Args:
        rank, size: number of this process and number of processes, see `Ranks`.
        store: key-value store that all ranks share, used for this memory alone.

    Attributes:
        addresses: address of each rank's memory in the current device's address space.

    Raises CudaError if this rank cannot allocate, or cannot map a peer's memory.
    """

    def __init__(self, rank: int, size: int, num_bytes: int, store: Any) -> None:
        own = ctypes.c_uint64()
        handle = _Handle()
        name = b""  # stays empty if the allocation fails
        try:
            check(driver().cuMemAlloc_v2(ctypes.byref(own), ctypes.c_size_t(num_bytes)), f"allocate {num_bytes} bytes")
            check(driver().cuMemsetD8_v2(own, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes)), "clear memory")
            check(driver().cuCtxSynchronize(), "wait for the device")
            check(driver().cuIpcGetMemHandle(ctypes.byref(handle), own), "share memory with other processes")
            name = bytes(handle)
        finally:
            store.set(f"memory-{rank}", name.hex())  # also after a failure, since the peers wait for it
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
