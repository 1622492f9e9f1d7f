"""The ranks of an engine on one GPU, for a machine without a second one; to NCCL each of them is a host of its own.

Everything but NVLink runs so: NCCL's collectives over sockets, our all-reduces in memory that both processes map. Speed
means nothing, since the ranks take turns on the device.
"""

import os
from types import SimpleNamespace

import torch

import nanovllm.fast.gpu.rank_runner
import nanovllm.features.ranks.workers as workers

_ENTRY = "from tests.support.shared_gpu import take_first_gpu; take_first_gpu()\n"
_SETTINGS = {"NCCL_HOSTID": "rank-0", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def share_one_gpu(patch, *, size=2):
    """Let `tensor_parallel_size` be up to `size` where there is one GPU, until the patch is undone."""
    for name, value in _SETTINGS.items():
        patch.setenv(name, value)
    cuda = SimpleNamespace(**vars(torch.cuda) | {"device_count": lambda: size})
    patch.setattr(nanovllm.fast.gpu.rank_runner, "torch", SimpleNamespace(**vars(torch) | {"cuda": cuda}))
    patch.setattr(workers, "ENTRY", _ENTRY + workers.ENTRY)


def take_first_gpu():
    """In the process of another rank, before it has a device: its GPU is the first one too."""
    os.environ["NCCL_HOSTID"] = f"rank-{os.getpid()}"

    def device(kind, *_):
        return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)

    workers.torch = SimpleNamespace(**vars(torch) | {"device": device})  # type: ignore[assignment]
