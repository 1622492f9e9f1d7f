"""Embedding models saved without a head: the base class of a family, such as MistralModel.

The family's causal class is put around the base, so that it is hooked, probed and sped up like any other model. In
place of the head, which the class would fill at random, stand a few rows of zeros; requests never read their logits.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.utils import cached_file

from nanovllm.errors import UnsupportedModelError

NUM_ROWS = 256  # whole panels of the kernels, and more logits than any rehearsed option reads
Reader = Callable[[Any], tuple[Any, dict[str, Any]]]  # class of the library -> (model, report of its load)
_LAST_TOKEN = {"lasttoken", "pooling_mode_lasttoken"}  # the old and the new name of sentence-transformers


def is_headless(model: Any) -> bool:
    """Whether a model has a stand-in in place of a head."""
    return getattr(model, "is_headless", False)


def load_headless(config: Any, source: str, read: Reader, **options: Any) -> tuple[Any, dict[str, Any]] | None:
    """The model and the report of its load, if `config` names a family's base and no head is stored; else None.

    Args:
        read: loads a class of the library.
        options: arguments of `from_pretrained`, for other files.

    Raises UnsupportedModelError for one that pools otherwise than by the last token.
    """
    base_class = MODEL_MAPPING.get(type(config), None)
    if getattr(base_class, "__name__", "") not in (getattr(config, "architectures", None) or ())[:1]:
        return None
    base, info = read(base_class)
    model = with_stand_in(base)
    name = base_class.__name__
    if model is None and not info["unexpected_keys"]:
        raise UnsupportedModelError(
            f"{name} of {source!r} has no language model head, and none of a decoder's class fits it. An engine for "
            "encoders, such as sentence-transformers, may serve it."
        )
    if model is None or any(key in _names_of_head(model) for key in info["unexpected_keys"]):
        return None
    _check_pooling(name, source, {key: options.get(key) for key in ("local_files_only", "revision")})
    return model, info


def with_stand_in(base: Any) -> Any:
    """The causal model around a base, which it shares; None for a model that is no base of a causal class."""
    causal_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(base.config), None)
    if causal_class is None or type(base) is not MODEL_MAPPING.get(type(base.config), None):
        return None
    with torch.device("meta"):
        model = causal_class(copy.deepcopy(base.config))
        head = model.get_output_embeddings()
        if type(model.base_model) is not type(base) or type(head) is not nn.Linear:
            return None
        stand_in = nn.Linear(head.in_features, NUM_ROWS, bias=False)
    weight = next(base.parameters()).new_zeros(NUM_ROWS, head.in_features)
    stand_in.weight = nn.Parameter(weight, requires_grad=False)
    model.set_output_embeddings(stand_in)
    setattr(model, model.base_model_prefix, base)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):  # a head of more modules
        return None
    model.config = base.config
    model.is_headless = True
    return model.train(base.training)


def _names_of_head(model: Any) -> set[str]:
    """Names of a head's weight in files."""
    head = model.get_output_embeddings()
    return {f"{name}.weight" for name, module in model.named_modules() if module is head}


def _check_pooling(name: str, source: str, options: dict[str, Any]) -> None:
    """Refuse a checkpoint of sentence-transformers that pools otherwise than by the last token, or adds layers."""
    for module in _read(source, "modules.json", options) or ():
        kind = str(module.get("type")).rpartition(".")[2]
        path = module.get("path")
        given = (_read(source, f"{path}/config.json", options) or {}) if kind == "Pooling" else {}
        modes = {key for key, value in given.items() if value is True and key.startswith("pooling_mode_")}
        modes |= {given["pooling_mode"]} if isinstance(given.get("pooling_mode"), str) else set()
        pools_otherwise = kind == "Pooling" and not modes <= _LAST_TOKEN
        if pools_otherwise or kind not in ("Transformer", "Pooling", "Normalize"):
            seen = f"{', '.join(sorted(modes - _LAST_TOKEN))} in {path}" if pools_otherwise else f"{kind} in {path}"
            raise UnsupportedModelError(
                f"{name} of {source!r} embeds otherwise than by the last token's hidden state ({seen}), which is the "
                "only pooling here. Use sentence-transformers."
            )


def _read(source: str, file: str, options: dict[str, Any]) -> Any:
    """A JSON file of the model; None without one."""
    silent = dict.fromkeys(("_raise_exceptions_for_missing_entries", "_raise_exceptions_for_connection_errors"), False)
    path = cached_file(source, file, **silent, **options)
    return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
