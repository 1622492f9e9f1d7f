"""Loads one rank's part of a model: reads, shards and checks it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nanovllm.defaults import device_of
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.ranks.ranks import Ranks
from nanovllm.features.ranks.sharding import plan_shards, shard_model
from nanovllm.models import loader
from nanovllm.models.quantised.stored_config import checkpoint_of, keeps
from nanovllm.models.rank_guard import RankGuard
from nanovllm.models.source import is_gguf


def load_sharded(source: str, tokenizer: Any, config: EngineConfig, ranks: Ranks) -> loader.LoadedModel:
    """Load this rank's part of a model from its folder, file or hub id; only rank 0 has a tokenizer."""
    module = loader.load_module(source, config, ranks.device, is_sharded=True)
    guard = RankGuard(module, ranks)
    head = shard_model(module, ranks)
    module = module.to(ranks.device).eval()
    guard.check()
    if any(type(each) is not torch.nn.Parameter for each in module.parameters()):
        from nanovllm.models.quantised.reader import keep_blocks

        keep_blocks(module)
    identity = loader.identity_of(source, config, module)
    tokenizer = None if ranks.rank > 0 else loader.load_tokenizer(source, tokenizer, config)
    return loader.LoadedModel(module, tokenizer, is_live=False, identity=identity, head=head)


def check_shards(source: str, config: EngineConfig) -> None:
    """Raise UnsupportedModelError for a model that cannot be sharded among these ranks; reads only its config."""
    options = loader.lookup_options(source, config, source)
    checkpoint = None
    with loader.load_errors(f"the model {source!r}"), torch.device("meta"):
        if is_gguf(source):
            from nanovllm.models.gguf.loading import config_of

            model_config: Any = config_of(source)
        else:
            model_config = AutoConfig.from_pretrained(source, **options)
            kernels = loader.kernels_of(device_of(config), is_sharded=True)
            if keeps(source, model_config, config.quantization, kernels):
                checkpoint = checkpoint_of(model_config)
            if getattr(model_config, "quantization_config", None) is not None:
                del model_config.quantization_config
        own_class = loader.part_of_another(model_config)
        if own_class is None:
            model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=config.trust_remote_code)
        else:
            model = own_class(model_config)
    shards = plan_shards(model, config.tensor_parallel_size)
    if checkpoint is not None:
        from nanovllm.models.quantised.loading import check_split, folder_of

        rows = [shard.name for shard in shards if shard.style.startswith("rowwise")]
        check_split(source, folder_of(source, options), checkpoint, rows, config)
