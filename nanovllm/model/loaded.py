"""A model ready to be hooked: a loaded `transformers` module, or a folder through `from_pretrained`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm.core.errors import ModelLoadError, UnsupportedModelError
from nanovllm.core.plain_config import EngineConfig
from nanovllm.core.sampling_params import MODEL_OPTIONS, SamplingParams
from nanovllm.model.config_fields import positions_of

UNLIMITED_MODEL_LEN = 32_768  # default max_model_len without a limit in the config (Mamba)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to be hooked."""

    model: Any  # a module with the methods of a transformers model
    tokenizer: Any
    is_live: bool  # the module was passed in, and its owner continues to use it
    identity: str  # distinguishes its KV from other models'
    head: Any = None  # `ShardedHead`, if it is sharded among ranks
    memory: Any = None  # `HugePages` for packed weights on a CPU

    @property
    def text_config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    @property
    def vocab_size(self) -> int:
        vocab_size: int = self.model.get_input_embeddings().num_embeddings
        return vocab_size

    @property
    def has_head(self) -> bool:
        return not getattr(self.model, "is_headless", False)

    @property
    def name(self) -> str:
        """The class of the model, or of the base that is all of it."""
        return type(self.model if self.has_head else self.model.base_model).__name__

    def num_positions(self, max_model_len: int | None) -> int:
        """The number of positions, or max_model_len, of a model without attention, which may have no limit."""
        return positions_of(self.text_config) or max_model_len or UNLIMITED_MODEL_LEN

    @property
    def max_position_embeddings(self) -> int:
        """The model's number of positions; raises UnsupportedModelError if its config has none."""
        limit = positions_of(self.text_config)
        if limit is None:
            raise UnsupportedModelError(f"the config of {type(self.model).__name__} has no max_position_embeddings.")
        return limit

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence tokens that the generation config, the config and the tokenizer name."""
        found: dict[int, None] = {}
        added = getattr(self.tokenizer, "added_tokens_decoder", None) or {}
        for source in (getattr(self.model, "generation_config", None), self.tokenizer, self.text_config):
            eos = getattr(source, "eos_token_id", None)
            named = eos if isinstance(eos, (list, tuple)) else [] if eos is None else [int(eos)]
            is_default = source is self.text_config and found and added  # of a class, where it is the id of plain text
            found |= dict.fromkeys(token_id for token_id in named if not is_default or token_id in added)
        return tuple(found)

    @property
    def sampling_defaults(self) -> dict[str, int | float]:
        """Sampling options of the generation config; raises ModelLoadError for values out of range.

        `do_sample: true` without a temperature means temperature 1, as in `transformers`; `false` is ignored.
        """
        config = getattr(self.model, "generation_config", None)
        values = {name: getattr(config, name, None) for name in MODEL_OPTIONS}
        given = {name: value for name, value in values.items() if value is not None}
        if getattr(config, "do_sample", None) is True:
            given.setdefault("temperature", 1.0)
        try:
            checked = SamplingParams(**given)
        except (TypeError, ValueError) as error:
            raise ModelLoadError(
                f"the model's generation_config holds sampling options that cannot be used: {error} "
                "To leave them out, set generation_config='none'."
            ) from error
        return {name: getattr(checked, name) for name in given}


def device_of(config: EngineConfig) -> torch.device:
    """The device of the options; raises ValueError for a GPU if there is none."""
    has_gpu = torch.cuda.is_available()
    device = torch.device(config.device if config.device != "auto" else "cuda" if has_gpu else "cpu")
    if device.type == "cuda" and not has_gpu:
        raise ValueError(f"device is {config.device!r}, but PyTorch sees no GPU. Use device='cpu' or 'auto'.")
    return device


def load_plain(model: str | os.PathLike[str] | nn.Module, tokenizer: Any, config: EngineConfig) -> LoadedModel:
    """A loaded module as it is, or the model and the tokenizer of a folder."""
    if isinstance(model, nn.Module):
        return LoadedModel(model, tokenizer, is_live=True, identity=f"module-{id(model)}")
    name = os.fspath(model)
    dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    module = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device_of(config)).eval()
    if tokenizer is None and not config.skip_tokenizer_init:
        tokenizer = AutoTokenizer.from_pretrained(name)
    return LoadedModel(module, tokenizer, is_live=False, identity=name)
