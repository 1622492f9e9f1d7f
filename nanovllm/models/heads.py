"""Loads the heads of a checkpoint, layers that `transformers` leaves out of the model."""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
import transformers
from torch import nn
from transformers import modeling_layers

from nanovllm.features.speculation_options import HEADS, HEADS_OF_MODEL
from nanovllm.models.headers import read_headers
from nanovllm.models.quantised.loading import folder_of

logger = logging.getLogger("nanovllm")

LIBRARY = "5.17"  # the first version of `transformers` in which heads were tried


def check_heads(model: Any, config: Any) -> None:
    """Raise ValueError, before anything is loaded, if no model that an engine loads here can have heads.

    Args:
        model: the argument of `LLM`; a loaded module belongs to its owner, and his heads may have changed.
    """
    name = f"speculation is {HEADS!r}, but "
    if isinstance(model, nn.Module):
        raise ValueError(f"{name}a loaded module comes without the heads of its checkpoint. Pass the folder.")
    if not hasattr(modeling_layers, "MtpModel"):
        raise ValueError(
            f"{name}transformers {transformers.__version__} cannot load heads; {LIBRARY} can. Install that, or set "
            "speculation='suffix'."
        )
    if config.quantization is not None:
        raise ValueError(f"{name}heads are not quantised, and quantization is {config.quantization!r}. Leave one out.")


def attach_heads(model: Any, source: str, config: Any, lookups: dict[str, Any]) -> None:
    """Load the heads of a model's checkpoint and keep them at the model; "auto" goes on without, and says why.

    Args:
        lookups: options of `from_pretrained`.

    Raises ValueError for a checkpoint without heads, or with a part of their tensors.
    """
    try:
        check_heads(source, config)
        heads = _load(model, source, lookups)
    except LookupError as error:
        if config.speculation == HEADS:
            raise ValueError(f"speculation is {HEADS!r}, but {error} Leave it out, or set 'suffix'.") from None
        logger.info("drafts come from texts, since %s", error)
        return
    vars(model)[HEADS_OF_MODEL] = (heads,)


def _load(model: Any, source: str, lookups: dict[str, Any]) -> Any:
    """The heads, on the model's device; raises LookupError without any, ValueError for a part of their tensors."""
    text_config = model.config.get_text_config(decoder=True)
    count = getattr(text_config, "num_mtp_layers", None)
    if not count:
        raise LookupError(f"the config of {source} names no heads (num_mtp_layers).")
    folder = folder_of(source, lookups)
    first = text_config.num_hidden_layers
    patterns = [rf"model\.layers\.{number}\." for number in range(first, first + count)] + [r"^mtp\."]
    if not any(re.search(pattern, name) for pattern in patterns for name in read_headers(folder)):
        raise LookupError(
            f"{source} holds none of the {count} heads that its config names: a converter may have cut them off."
        )
    if getattr(model.config, "quantization_config", None):
        raise LookupError(f"the weights of {source} are quantised, which heads cannot be.")
    # The library names the checkpoints that it knows; those of other sizes number their layers otherwise.
    vars(model)["_keys_to_ignore_on_load_unexpected"] = patterns
    name = model.config.name_or_path
    model.config.name_or_path = str(folder)
    try:
        with torch.inference_mode(False):
            heads = modeling_layers.MtpModel.from_pretrained(model)
    except RuntimeError as error:
        raise ValueError(f"speculation needs the heads of {source}: {error} Set speculation='suffix'.") from error
    finally:
        del vars(model)["_keys_to_ignore_on_load_unexpected"]
        model.config.name_or_path = name
    if count > 1:
        logger.info("drafts come from the first of %d heads, again and again", count)
    parameter = next(model.parameters())
    for layer in heads.layers:
        layer.to(parameter.device, parameter.dtype)
    del heads.layers[1:]
    heads.eval().requires_grad_(False)
    return heads
