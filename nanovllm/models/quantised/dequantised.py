"""Loads a quantised checkpoint with plain weights: each is widened as the library asks for it.

The library is handed the plain weights by their names in the files, so that its renames, merged experts and tied
weights are those of a plain checkpoint. Its own dequantisation is not used: for experts it leaves out NVFP4's global
scale and zero points, for mixed formats it takes the first group's format, and for rows that are no multiple of a block
other blocks.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, GenerationConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from nanovllm.errors import ModelLoadError
from nanovllm.features.extras import check_extra
from nanovllm.models.headers import StoredTensor, read_headers
from nanovllm.models.quantised.stored import Quantised, find
from nanovllm.models.quantised.stored_config import Checkpoint
from nanovllm.models.quantised.widened import reader_of

logger = logging.getLogger("nanovllm")


class StoredWeights:
    """Weights of a quantised checkpoint, by the headers of its files.

    found: weights by plain name. num_stored_bytes: bytes of all tensors. num_unused: scales of activations, K and V.
    """

    def __init__(self, source: str, folder: Path, checkpoint: Checkpoint) -> None:
        """Find and check the weights; nothing of them is read.

        Raises MissingLibraryError without the library that reads the format, and ModelLoadError for missing, damaged
        and contradictory tensors, named.
        """
        if checkpoint.method == "compressed-tensors":
            check_extra(f"the model {source} ({checkpoint})", "quantized", "compressed_tensors")
        headers = read_headers(folder)
        if not headers:
            raise ModelLoadError(f"{source} ({checkpoint}) has no *.safetensors, which alone are read quantised.")
        self.found: Mapping[str, Quantised | StoredTensor] = find(
            headers, checkpoint.method, reader_of(source, checkpoint)
        )
        quantised = [weight for weight in self.found.values() if isinstance(weight, Quantised)]
        if not quantised:
            raise ModelLoadError(
                f"the config.json of {source} says that its weights are quantised ({checkpoint}), and none of them is: "
                f"{next(iter(headers.values()))} is the first. Take both from one revision."
            )
        self.num_stored_bytes = sum(tensor.num_bytes for tensor in headers.values())
        num_parts = sum(len(weight.parts) for weight in quantised)
        self.num_unused = len(headers) - num_parts - (len(self.found) - len(quantised))

    @property
    def num_weights(self) -> int:
        return sum(weight.num_elements for weight in self.found.values())

    @property
    def kept(self) -> tuple[int, int]:
        """(weights, bytes) of linear layers, which can stay quantised; routed experts are dequantised."""
        linear = [each for name, each in self.found.items() if isinstance(each, Quantised) and ".experts." not in name]
        num_bytes = sum(part.num_bytes for weight in linear for part in weight.parts.values())
        return sum(weight.num_elements for weight in linear), num_bytes


class PlainWeights(dict[str, Any]):
    """Plain weights by name, as a state dict: each is read and widened when it is indexed by `...`."""

    def __init__(self, weights: StoredWeights, files: ExitStack) -> None:
        super().__init__()
        opened: dict[Path, Any] = {}

        def file_of(tensor: StoredTensor) -> Any:
            if tensor.path not in opened:
                opened[tensor.path] = files.enter_context(safe_open(tensor.path, framework="pt"))
            return opened[tensor.path]

        for name, weight in weights.found.items():
            if isinstance(weight, StoredTensor):
                self[name] = file_of(weight).get_slice(weight.name)
            else:
                self[name] = _Widened(weight, {role: file_of(part) for role, part in weight.parts.items()})


class _Widened:
    """A quantised weight in place of a plain one's slice of a file."""

    def __init__(self, weight: Quantised, files: Mapping[str, Any]) -> None:
        self._weight = weight
        self._files = files

    def __getitem__(self, index: Any) -> Tensor:
        parts = self._weight.parts
        try:
            with torch.inference_mode(False):
                tensors = {role: file.get_tensor(parts[role].name) for role, file in self._files.items()}
                plain = self._weight.widen(tensors)
        except Exception as error:  # the formats' own libraries raise whatever they like
            raise ModelLoadError(f"{self._weight.name} cannot be dequantised: {error}") from error
        if tuple(plain.shape) != self._weight.shape:
            raise ModelLoadError(
                f"{self._weight.name} was dequantised to {list(plain.shape)}, not {list(self._weight.shape)}."
            )
        return plain[index]


def load_plain(
    model_class: Any, source: str, weights: StoredWeights, config: Any, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """(module, report of its load) of a checkpoint's widened weights.

    Args:
        model_class: class or Auto class of the library.
        options: arguments of `from_pretrained`.
    """
    lookups: dict[str, Any] = {key: options[key] for key in ("local_files_only", "revision") if key in options}
    if model_class is AutoModelForCausalLM:
        model_class = _class_of(config, source, lookups if options.get("trust_remote_code") else None)
    plain = copy.deepcopy(config)
    del plain.quantization_config
    if plain.sub_configs.get("text_config") is getattr(model_class, "config_class", plain):
        plain = plain.get_text_config()  # the text part of a model of several modalities
    with ExitStack() as files:
        state = PlainWeights(weights, files)
        module, report = model_class.from_pretrained(None, config=plain, state_dict=state, dtype=dtype, **options)
    module.name_or_path = source
    module.config.name_or_path = source
    with suppress(OSError):  # no generation_config.json: the library's own, made of the config, stays
        module.generation_config = GenerationConfig.from_pretrained(source, **lookups)
    return module, report


def _class_of(config: Any, source: str, lookups: dict[str, Any] | None) -> Any:
    """The causal class of a config, which an Auto class finds by a folder only.

    Args:
        lookups: options to find code that comes with the model; None if it must not run.
    """
    reference = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if reference is not None and lookups is not None:
        return get_class_from_dynamic_module(reference, source, **lookups)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelLoadError(f"{type(config).__name__} of {source!r} has no causal language model in transformers.")
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
