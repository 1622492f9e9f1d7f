"""Defaults of an engine: a loaded module or a folder, FlexAttention or SDPA, and a fixed share of the memory."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm.attention import AttentionBackend, AttentionLayer, Scores, SdpaAttention
from nanovllm.config import EngineConfig, positions_of
from nanovllm.device import cpp_compiler
from nanovllm.errors import ModelLoadError, UnsupportedModelError
from nanovllm.layout import kinds_of
from nanovllm.sampling_params import SamplingParams

UNLIMITED_MODEL_LEN = 32_768  # default max_model_len without a limit in the config (Mamba)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to be hooked."""

    model: Any  # a module with the methods of a transformers model
    tokenizer: Any
    is_live: bool  # the module was passed in, and its owner continues to use it
    identity: str  # distinguishes its KV from other models'
    head: Any = None  # `ShardedHead`, if it is sharded among ranks

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
        """Name of the model's class, or of its base's if that is all of it."""
        return type(self.model if self.has_head else self.model.base_model).__name__

    def num_positions(self, max_model_len: int | None) -> int:
        """The model's number of positions. A model without attention may have no limit: then max_model_len."""
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
            is_default = source is self.text_config and found and added  # a class's default may be the id of plain text
            found |= dict.fromkeys(token_id for token_id in named if not is_default or token_id in added)
        return tuple(found)

    def sampling_defaults(self, options: type[SamplingParams]) -> dict[str, int | float]:
        """Sampling options of the generation config; raises ModelLoadError for values out of range.

        `do_sample: true` without a temperature means temperature 1, as in `transformers`; `false` is ignored.
        """
        config = getattr(self.model, "generation_config", None)
        values = {name: getattr(config, name, None) for name in options.model_options}
        given = {name: value for name, value in values.items() if value is not None}
        if getattr(config, "do_sample", None) is True:
            given.setdefault("temperature", 1.0)
        try:
            checked = options(**given)
        except (TypeError, ValueError) as error:
            raise ModelLoadError(
                f"the model's generation_config holds sampling options that cannot be used: {error} "
                "To leave them out, set generation_config='none'."
            ) from error
        return {name: getattr(checked, name) for name in given}


def device_of(config: EngineConfig) -> torch.device:
    """The device that the options name; raises ValueError for a GPU if there is none."""
    has_gpu = torch.cuda.is_available()
    device = torch.device(config.device if config.device != "auto" else "cuda" if has_gpu else "cpu")
    if device.type == "cuda" and not has_gpu:
        raise ValueError(f"device is {config.device!r}, but PyTorch sees no GPU. Use device='cpu' or 'auto'.")
    return device


def load_plain(model: str | os.PathLike[str] | nn.Module, tokenizer: Any, config: EngineConfig) -> LoadedModel:
    """Load the model and the tokenizer of a folder; a loaded module is taken unchanged."""
    if isinstance(model, nn.Module):
        return LoadedModel(model, tokenizer, is_live=True, identity=f"module-{id(model)}")
    name = os.fspath(model)
    dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    module = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device_of(config)).eval()
    if tokenizer is None and not config.skip_tokenizer_init:
        tokenizer = AutoTokenizer.from_pretrained(name)
    return LoadedModel(module, tokenizer, is_live=False, identity=name)


logger = logging.getLogger("nanovllm")

CPU_CACHE_BYTES = 2**30


def memory_share(binding: Any, config: EngineConfig, choice: object) -> int:
    """Bytes that the KV cache may take by default; on a GPU half of the free memory: steps need the other half."""
    if binding.device.type == "cpu":
        return CPU_CACHE_BYTES
    free, _ = torch.cuda.mem_get_info(binding.device)
    return int(config.gpu_memory_utilization * free) // 2


@dataclass(frozen=True, slots=True)
class PlainAttention:
    """FlexAttention on a CPU with a compiler, else SDPA.

    backend: "flex" or "sdpa".
    uses_graphs: False: no step is laid out for CUDA graphs.
    """

    backend: str
    uses_graphs: ClassVar[bool] = False

    @classmethod
    def for_model(cls, layers: Sequence[AttentionLayer], device: torch.device, config: EngineConfig) -> PlainAttention:
        """The backend of these layers; raises ValueError if the user set one that is not installed."""
        wanted = config.attention_backend
        if wanted not in ("auto", "flex", "sdpa"):
            raise ValueError(f"attention_backend is {wanted!r}, which this installation lacks. Use 'auto' or 'sdpa'.")
        compiles = wanted != "sdpa" and may_compile(config, device)
        backend = "flex" if compiles and (wanted == "flex" or device.type == "cpu") else "sdpa"
        if backend == "sdpa" and any(layer.traits.softcap is not None or layer.traits.has_sinks for layer in layers):
            raise ValueError(
                "the model has layers with a soft-cap or sinks, which 'sdpa' of this installation does not compute. "
                "Set attention_backend='flex', or install the whole package."
            )
        return cls(backend)

    def captures(self, config: EngineConfig, device: torch.device, obstacle: str | None = None) -> bool:
        """The resolved `cuda_graphs`: False; raises ValueError if the user set it."""
        if config.cuda_graphs:
            raise ValueError("cuda_graphs is True, which this installation lacks. Leave it out.")
        return False

    def build(
        self,
        layers: Sequence[AttentionLayer],
        device: torch.device,
        config: EngineConfig,
        pools: object = None,
        scores: Sequence[Scores | None] = (),
    ) -> AttentionBackend:
        """The backend; config is fully resolved. `scores` as of `SdpaAttention`."""
        kinds = kinds_of(layer.traits for layer in layers)
        if self.backend == "sdpa":
            block_bytes = max(layer.token_bytes for layer in layers) * config.block_size
            return SdpaAttention(kinds, config.block_size, block_bytes, layers[0].dtype, device, scores)
        from nanovllm.flex import FlexAttention  # imports a part of the compiler: one second

        return FlexAttention(
            num_blocks=config.num_kv_blocks,
            block_size=config.block_size,
            kinds=kinds,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            device=device,
        )


def may_compile(config: EngineConfig, device: torch.device) -> bool:
    """Whether options and machine allow compilation; raises ValueError if a backend that the user set lacks it."""
    if config.enforce_eager:
        logger.warning("enforce_eager: nothing is compiled; layers run eagerly, attention is 'sdpa'")
        return False
    missing = _missing_compiler(device)
    if missing is None:
        return True
    if config.attention_backend in ("flex", "cpp"):
        raise ValueError(
            f"attention_backend={config.attention_backend!r} needs {missing}, and none was found. Install g++ or "
            "clang++ (or name one in the environment variables CC and CXX), or use attention_backend='sdpa'."
        )
    logger.warning("%s was not found: nothing is compiled; layers run eagerly, attention is 'sdpa'", missing)
    return False


def _missing_compiler(device: torch.device) -> str | None:
    """The compiler that torch.compile needs on this device and does not find; None if nothing is missing."""
    if device.type == "cuda":  # Triton builds its launchers in C
        names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang", "cc"]
        return None if any(shutil.which(name) for name in names) else "a C compiler"
    return None if shutil.which(cpp_compiler()) else "a C++ compiler"
