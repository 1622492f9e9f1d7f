"""Fingerprint of a model: its config, code that came with it, and every byte of its weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
import xxhash
from torch import Tensor, nn

from nanovllm.defaults import LoadedModel
from nanovllm.features.engine_config import EngineConfig

CHUNK_BYTES = 2**26  # size hashed at once, and copied from a GPU at once
VERSIONED = ("nanovllm", "torch", "transformers")  # files of prefixes name their versions
REMOTE_CODE = "transformers_modules"  # package of the library with the code of models


def digest_for_files(loaded: LoadedModel, config: EngineConfig) -> str | None:
    """The model's name in files of prefixes; None where there are none."""
    if config.prefix_cache_dir is None:
        return None
    if loaded.is_live:
        raise ValueError(
            f"prefix_cache_dir is {config.prefix_cache_dir!r}, but the model is a module, whose weights its owner may "
            "change. Save it (save_pretrained) and pass the folder, or set prefix_cache_host_bytes."
        )
    return model_digest(loaded.model)


def model_digest(model: nn.Module) -> str:
    """A digest of config, code and weights, different for any other model.

    Weights are the tensors in use, after they were converted, quantised or sharded: files that are
    rewritten in place, with their former size and times, are another model too. About 0.1 s a GB.
    """
    digest = xxhash.xxh3_128(b"all bytes of weights")
    config = getattr(model, "config", None)
    if config is not None:
        values = {name: value for name, value in config.to_dict().items() if name not in ("_name_or_path",)}
        digest.update(repr(sorted(values.items(), key=lambda item: item[0])).encode())
    for name, module in model.named_modules():
        # The format of quantised blocks: equal bytes are other weights in another one.
        form = getattr(module, "kind", None)
        digest.update(repr((name, type(module).__qualname__, form if isinstance(form, str) else None)).encode())
    for path in _code_of(model):
        digest.update(path.read_bytes())
    with torch.inference_mode():
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            digest.update(repr((name, [*tensor.shape], str(tensor.dtype))).encode())
            for chunk in _chunks(tensor):
                digest.update(chunk)
    return digest.hexdigest()


def _code_of(model: nn.Module) -> list[Path]:
    """Source files of the modules' classes, except packages that are named by their version."""
    found: set[Path] = set()
    for module_name in {type(module).__module__ for module in model.modules()}:
        package = module_name.partition(".")[0]
        file = getattr(sys.modules.get(module_name), "__file__", None)
        if file is not None and package not in VERSIONED:
            found.add(Path(file))
            if package == REMOTE_CODE:  # a model's own code and its imports
                found.update(Path(file).parent.glob("*.py"))
    return sorted(found)


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in order; valid until the next chunk."""
    flat = tensor.detach().reshape(-1)
    if not len(flat):
        return
    staging = None
    if flat.device.type == "cuda":
        staging = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
    for chunk in flat.view(torch.uint8).split(CHUNK_BYTES):
        on_host = chunk if staging is None else staging[: len(chunk)].copy_(chunk)
        yield on_host.numpy().data
