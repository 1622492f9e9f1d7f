"""Loads a quantised checkpoint by `transformers`: each weight is handed over as the library asks for it.

    headers of the files ──(layouts)──> StoredWeights: checked, nothing read
    each weight ──(a state dict that is read when it is indexed)──> plain, or a BlockTensor ──> QuantisedLinear

The library is handed weights by the plain names in the files, so renames, merged experts and tied weights are those of
a plain checkpoint. Its own dequantisation is not used: for experts it leaves out NVFP4's global scale and zero points,
for mixed formats it takes the first group's format, and for rows that are no multiple of a block other blocks.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, GenerationConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from nanovllm.errors import ModelLoadError
from nanovllm.models.quantised.block_tensor import BlockTensor
from nanovllm.models.quantised.blocks import QuantisedLinear, SortedLinear
from nanovllm.models.quantised.kept_experts import is_experts, keep_experts, projections_of
from nanovllm.models.quantised.layout import WrongValuesError
from nanovllm.models.quantised.stored import FileOf, Quantised, StoredWeights, open_files

logger = logging.getLogger("nanovllm")


def load(
    model_class: Any,
    source: str,
    weights: StoredWeights,
    config: Any,
    dtype: torch.dtype,
    options: dict[str, Any],
    *,
    keeps: bool,
    is_sharded: bool,
) -> tuple[Any, dict[str, Any]]:
    """(module, report of its load) of a checkpoint.

    Args:
        model_class: class or Auto class of the library.
        options: arguments of `from_pretrained`.
        keeps: weights stay quantised where kernels multiply them.
        is_sharded: they are left as BlockTensors, and cut among ranks before `keep_blocks`.
    """
    lookups: dict[str, Any] = {key: options[key] for key in ("local_files_only", "revision") if key in options}
    if model_class is AutoModelForCausalLM:
        model_class = _class_of(config, source, lookups if options.get("trust_remote_code") else None)
    plain = copy.deepcopy(config)
    del plain.quantization_config
    if plain.sub_configs.get("text_config") is getattr(model_class, "config_class", plain):
        plain = plain.get_text_config()  # the text part of a model of several modalities
    file_of = open_files()
    state: dict[str, Any] = {name: file_of(each).get_slice(each.name) for name, each in weights.plain.items()}
    state |= {name: _Entry(weight, file_of, dtype, keeps=keeps) for name, weight in weights.quantised.items()}
    module, report = model_class.from_pretrained(None, config=plain, state_dict=state, dtype=dtype, **options)
    if keeps:
        _log_plain(weights, 0 if is_sharded else keep_blocks(module))
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


class _Entry:
    """A quantised weight in place of a plain one's slice of a file: read when it is indexed by `...`."""

    def __init__(self, weight: Quantised, file_of: FileOf, dtype: torch.dtype, *, keeps: bool) -> None:
        self._weight = weight
        self._file_of = file_of
        self._dtype = dtype
        self._keeps = keeps and not weight.layout.why_not_kept

    def __getitem__(self, index: Any) -> Tensor:
        layout = self._weight.layout
        parts = self._weight.parts
        try:
            blocks = layout.blocks({role: self._file_of(part).get_tensor(part.name) for role, part in parts.items()})
        except WrongValuesError as error:
            role, what = error.args
            raise ModelLoadError(f"{parts[role].name} holds {what}.") from None
        found = BlockTensor(blocks.unflatten(0, layout.shape[:-1]), layout, self._dtype)
        return found if self._keeps else found.plain()


def _log_plain(weights: StoredWeights, num_kept: int) -> None:
    """Log one line a reason: weights of a kept checkpoint that are dequantised.

    Args:
        num_kept: weights that stay quantised; 0 if it is not known yet.
    """
    reasons = Counter(weight.layout.why_not_kept for weight in weights.quantised.values())
    num_left = reasons.pop("", 0) - num_kept
    if num_kept:
        reasons["they are no linear layers, or joined otherwise than by rows of one format"] = num_left
    for reason, count in reasons.items():
        if count:
            logger.info("%d quantised weights are held dequantised: %s", count, reason)


def keep_blocks(model: Any) -> int:
    """Put quantised modules in place of plain ones with blocks; returns how many weights of the files these hold."""
    num_kept = 0
    for path, module in [*model.named_modules()]:
        held = {name: each for name, each in module._parameters.items() if isinstance(each, BlockTensor)}
        if held and _kept(model, path, module, held):
            num_kept += sum(each.num_joined for each in held.values())
            continue
        for name, each in held.items():
            module._parameters[name] = nn.Parameter(each.plain(), requires_grad=False)
    return num_kept


def _kept(model: Any, path: str, module: Any, held: dict[str, BlockTensor]) -> bool:
    """Whether a module, with these parameters in blocks, was made to compute with them."""
    if type(module) is nn.Linear:
        weight = held["weight"]
        linear = QuantisedLinear(weight.content.form, weight.blocks, module.bias, dtype=weight.dtype)
        order = weight.content.order
        replacement = linear if order is None else SortedLinear(linear, order)
        replacement._forward_hooks.update(module._forward_hooks)  # sums over ranks
        replacement._forward_pre_hooks.update(module._forward_pre_hooks)
        model.set_submodule(path, replacement)
        return True
    by_rows = is_experts(module) and all(each.content.is_transposed == module.is_transposed for each in held.values())
    if not by_rows or held.keys() != {*projections_of(module)}:
        return False
    for name, each in held.items():
        module._parameters[name] = nn.Parameter(each.blocks, requires_grad=False)
    forms = {name: held[name].content.form for name in projections_of(module)}
    keep_experts(module, forms, next(iter(held.values())).dtype)
    return True
