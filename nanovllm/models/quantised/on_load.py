"""Quantises a loaded model's linear layers and embedding in place, one after another."""

from __future__ import annotations

import logging
from collections.abc import Container, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from nanovllm.errors import UnsupportedModelError
from nanovllm.models.quantised.blocks import FORMATS, KIND_OF_OPTION, QuantisedEmbedding, QuantisedLinear, quantise
from nanovllm.models.quantised.scaled import ScaledLinear, rounded, why_not

logger = logging.getLogger("nanovllm")

_PANEL = 32  # outputs that CPU kernels read together; layers of other widths have no kernel


def quantise_model(model: Any, option: str, device: torch.device | str = "cpu") -> None:
    """Replace linear layers and the embedding by quantised ones; frees each plain weight in turn.

    Rows that are no multiple of the format's block, routed experts and all other modules are not quantised, nor are the
    embedding and the head by "fp8"; one log line gives their share.

    Args:
        option: "int8" or "int4", or "fp8" for a GPU; the first two leave blocks for `packed_linears` or `tiled`.
        device: the engine's, to which weights come one after another.

    Raises UnsupportedModelError for a model without any such layer.
    """
    # the key is the weight: tied modules share blocks
    device = torch.device(device)
    if option == "fp8":
        _scale(model, device)
        return
    kind = KIND_OF_OPTION[option]
    blocks_of = WeakIdKeyDictionary()
    num_before = sum(parameter.numel() for parameter in model.parameters())
    embedding = id(model.get_input_embeddings())  # a reference would keep its weight
    # Weights of modules that are not quantised: an embedding tied to a head of 32,001 outputs would be stored twice.
    plain = {
        id(module.weight)
        for module in model.modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter)
        and not _suits(module, kind, is_lookup=id(module) == embedding)
    }
    for parent in [module for module in model.modules() if module._modules]:  # no reference to modules to be freed
        for name, child in parent._modules.items():
            suits = child is not None and _suits(child, kind, is_lookup=id(child) == embedding)
            if suits and id(child.weight) not in plain:
                parent._modules[name] = _quantised(child, kind, blocks_of, device)
    _report(model, option, num_before)


def _scale(model: Any, device: torch.device) -> None:
    """Replace linear layers but the head by those of 8-bit floats on the device."""
    head = model.get_output_embeddings()
    plain = {id(module.weight) for module in (head, model.get_input_embeddings()) if module is not None}
    num_before = _num_weights(model, plain)
    for parent in [module for module in model.modules() if module._modules]:
        for name, child in parent._modules.items():
            if type(child) is not nn.Linear or child is head or why_not(*_sizes(child), device) is not None:
                continue
            values, scales = rounded(child.weight.detach().to(device))
            bias = None if child.bias is None else child.bias.to(device)
            parent._modules[name] = ScaledLinear(values, scales[:, 0].contiguous(), bias)
    _report(model, "fp8", num_before, plain)


def _sizes(linear: nn.Linear) -> tuple[int, int]:
    return linear.out_features, linear.in_features


def _num_weights(model: Any, plain: Container[int]) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in plain)


def _report(model: Any, option: str, num_before: int, plain: Container[int] = ()) -> None:
    """Log the share of quantised weights; raises UnsupportedModelError if there is none.

    Args:
        num_before: weights before.
        plain: ids of parameters that are meant to stay as they are.
    """
    num_left = _num_weights(model, plain)
    if num_left == num_before:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no linear layers that quantization={option!r} could quantise. Leave it out."
        )
    logger.info(
        "quantization=%r: %.1f of %.1f million weights; the others stay as they are",
        option, (num_before - num_left) / 1e6, num_before / 1e6,
    )  # fmt: skip
    if num_left > num_before // 10:
        named = [each for each in model.named_parameters() if id(each[1]) not in plain]
        left = max(named, key=lambda each: each[1].numel())[0]
        logger.warning(
            "quantization=%r: %d %% of the weights stay as they are, %s first: they are no linear layers of a width "
            "that can be quantised", option, 100 * num_left // num_before, left,
        )  # fmt: skip


def _suits(module: nn.Module, kind: str, *, is_lookup: bool) -> bool:
    weight = getattr(module, "weight", None)
    if not (type(module) is nn.Linear or (is_lookup and type(module) is nn.Embedding and module.max_norm is None)):
        return False
    if not isinstance(weight, nn.Parameter) or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    outputs_fit = is_lookup or len(weight) % _PANEL == 0
    return outputs_fit and weight.shape[1] % max(2, FORMATS[kind].elements) == 0


def _quantised(module: Any, kind: str, blocks_of: MutableMapping[Tensor, Tensor], device: torch.device) -> nn.Module:
    """The quantised module that replaces this one; tied weights share their blocks."""
    weight = module.weight
    if weight not in blocks_of:
        blocks_of[weight] = quantise(weight.to(device), kind)
    blocks = blocks_of[weight]
    if isinstance(module, nn.Embedding):
        return QuantisedEmbedding(kind, blocks, dtype=weight.dtype, padding_idx=module.padding_idx)
    return QuantisedLinear(kind, blocks, module.bias, dtype=weight.dtype)
