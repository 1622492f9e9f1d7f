"""Begins with a GPU in a thread, before transformers is imported."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Thread
from typing import Any

import torch
from torch import nn


def begin_gpu(model: Any, options: Mapping[str, Any]) -> None:
    """Begin to load a GPU's libraries and kernels while a model loads, unless this process uses a GPU already."""
    device = str(options.get("device", "auto"))
    is_for_gpu = device.startswith(("auto", "cuda")) and not isinstance(model, nn.Module)
    if is_for_gpu and torch.cuda.is_available() and not torch.cuda.is_initialized():
        from nanovllm.fast.gpu.option_kernels import use_gpu

        given = model, device.replace("auto", "cuda"), str(options.get("dtype", "auto"))
        Thread(target=use_gpu, args=given).start()  # no daemon: the driver must not end while a thread uses it
