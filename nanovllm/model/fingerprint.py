"""Fingerprint of a model: its config, and names, shapes and samples of its weights."""

from __future__ import annotations

from itertools import chain

import torch
import xxhash
from torch import Tensor, nn

NUM_SAMPLES = 256  # of each tensor, evenly spaced


def model_digest(model: nn.Module) -> str:
    """A digest of config and weights, different for any other model.

    Weights are sampled: a change of a few values of a large tensor alone may go unseen.
    """
    digest = xxhash.xxh3_128()
    config = getattr(model, "config", None)
    if config is not None:
        values = {name: value for name, value in config.to_dict().items() if name not in ("_name_or_path",)}
        digest.update(repr(sorted(values.items(), key=lambda item: item[0])).encode())
    digest.update(type(model).__qualname__.encode())
    with torch.inference_mode():
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            digest.update(f"{name} {[*tensor.shape]} {tensor.dtype}".encode())
            digest.update(_samples(tensor))
    return digest.hexdigest()


def _samples(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    step = max(1, len(flat) // NUM_SAMPLES)
    return flat[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes() if len(flat) else b""
