"""Loads a model and its tokenizer: the embedded default, a local folder or GGUF file, a hub id, or a loaded module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from nanovllm.defaults import LoadedModel, device_of
from nanovllm.errors import ModelLoadError, UnsupportedModelError
from nanovllm.features.chat.chat import with_chat_template
from nanovllm.features.engine_config import ABOUT_CHECKPOINTS, QUANTISED_ON_LOAD, EngineConfig
from nanovllm.features.headless import Reader, load_headless, with_stand_in
from nanovllm.features.option_checks import check_kv_cache_dtype
from nanovllm.features.speculation_options import AUTO, HEADS
from nanovllm.features.states.state_layers import LAYER_TYPES
from nanovllm.features.unsupported import attending_layers, unsupported
from nanovllm.models import hub
from nanovllm.models.added_tokens import added_tokens_option
from nanovllm.models.exact_activations import check_exact_activations
from nanovllm.models.experts import is_kept
from nanovllm.models.limits import check_limits, check_stored_limits
from nanovllm.models.mistakes import name_mistake, name_tensors
from nanovllm.models.source import check_skipped_tokenizer, find, find_tokenizer, is_gguf, needs_tokenizer


def load(model: str | os.PathLike[str] | nn.Module, tokenizer: Any, config: EngineConfig) -> LoadedModel:
    """Load a model by name, or accept a loaded one; arguments as for `LLM`.

    Raises ModelLoadError, UnsupportedModelError, or ValueError for options that contradict a loaded module.
    """
    check_skipped_tokenizer(tokenizer, config)
    if config.speculation == HEADS:
        from nanovllm.models.heads import check_heads

        check_heads(model, config)
    if isinstance(model, nn.Module):
        return _take_module(model, tokenizer, config)
    source = find_source(model, tokenizer, config)
    try:
        loaded = load_weights(source, config)
        return replace(loaded, tokenizer=load_tokenizer(source, tokenizer, config))
    finally:
        if is_gguf(source):
            from nanovllm.models.gguf.file import forget_opened

            forget_opened()


def find_source(model: Any, tokenizer: Any, config: EngineConfig) -> str:
    """Resolve a model's name to a folder, file or hub id, before anything is loaded.

    Raises ModelLoadError if the model or the named tokenizer is missing, ValueError for limits beyond the model's.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"model must be a name, a folder or a loaded transformers module, not {model!r}.")
    check_skipped_tokenizer(tokenizer, config)
    if config.kv_cache_dtype != "auto":
        check_kv_cache_dtype(config, device_of(config))
    if isinstance(tokenizer, (str, os.PathLike)):
        find_tokenizer(os.fspath(tokenizer))
    source = find(os.fspath(model), needs_tokenizer=needs_tokenizer(tokenizer, config), revision=config.revision)
    check_stored_limits(source, config)
    return source


def load_weights(source: str, config: EngineConfig) -> LoadedModel:
    """Load a model without its tokenizer from a folder, file or hub id."""
    device = device_of(config)
    module = load_module(source, config, device)
    module = place_quantised(module, device).to(device).eval()
    return LoadedModel(module, None, is_live=False, identity=identity_of(source, config, module))


def place_quantised(module: Any, device: torch.device) -> Any:
    """The module, its quantised linear layers and experts in the form of the device."""
    if device.type == "cuda" and any(is_kept(part) for part in module.modules()):
        from nanovllm.models.quantised.tiled import place

        with torch.inference_mode(False):
            place(module, device)
    return module


def identity_of(source: str, config: EngineConfig, module: nn.Module | None = None) -> str:
    """Identity of a model's weights, for the seed of block hashes: weights that are kept quantised are others.

    Args:
        module: the loaded model.
    """
    form = config.quantization if config.quantization in QUANTISED_ON_LOAD else None
    if form is None and module is not None and any(is_kept(part) for part in module.modules()):
        form = "kept"
    return ":".join(filter(None, (source, _commit_of(source, config), form)))


def _commit_of(source: str, config: EngineConfig) -> str | None:
    """The commit of a hub model just loaded; None for a local model."""
    if os.path.exists(source):
        return None
    path = try_to_load_from_cache(source, "config.json", revision=config.revision)
    return os.path.basename(os.path.dirname(path)) if isinstance(path, str) else None


def load_module(source: str, config: EngineConfig, device: torch.device, *, is_sharded: bool = False) -> Any:
    """Load a model from a folder, file or hub id, on the CPU.

    Args:
        is_sharded: True if this rank keeps only its shard.
    """
    options = lookup_options(source, config, source)
    if is_gguf(source):
        from nanovllm.models.gguf import loading

        with _no_progress_bars():
            return loading.load_module(source, config, device, is_sharded=is_sharded)
    if config.quantization in QUANTISED_ON_LOAD:
        _check_device(config, device)
    with load_errors(f"the model {source!r}", source):
        model_config = AutoConfig.from_pretrained(source, **options)
    text_config = model_config.get_text_config(decoder=True)
    attending_layers(_name_of(model_config), text_config, LAYER_TYPES)  # refuses layers of unknown types
    check_limits(text_config, config)  # defaults of the config's class included
    kernels = kernels_of(device, is_sharded=is_sharded)
    read = _reader(source, model_config, config, options, kernels, is_sharded=is_sharded)
    with load_errors(f"the model {source!r}", source), _no_progress_bars(), torch.inference_mode(False):
        model_class = part_of_another(model_config) or AutoModelForCausalLM
        module, info = load_headless(model_config, source, read, **options) or read(model_class)
    if info["missing_keys"] or info["mismatched_keys"]:  # the library fills them with random numbers and only warns
        name_tensors(source, info)
    if config.speculation in (HEADS, AUTO):
        from nanovllm.models.heads import attach_heads

        attach_heads(module, source, config, options)
    if config.quantization in QUANTISED_ON_LOAD:
        from nanovllm.models.quantised.on_load import quantise_model

        with torch.inference_mode(False):
            quantise_model(module, config.quantization, device)
    return module


def _check_device(config: EngineConfig, device: torch.device) -> None:
    """Raise ValueError if the device has no kernels for weights that are quantised on load."""
    if device.type == "cpu" and config.quantization != "fp8":
        return
    from nanovllm.models.quantised.scaled import why_not
    from nanovllm.models.quantised.tiled import why_not_packed

    reason = why_not(16, 16, device) if config.quantization == "fp8" else why_not_packed(device)
    if reason is not None:
        least = "8.9 and later" if config.quantization == "fp8" else "9.0 and later, and for CPUs"
        raise ValueError(
            f"quantization is {config.quantization!r}, which is for GPUs of capability {least}, but {reason}. Leave it "
            "out, or set 'int8' or 'int4' on a CPU."
        )


def kernels_of(device: torch.device, *, is_sharded: bool) -> str:
    """The device's type, or another text for a GPU without products of quantised weights."""
    if device.type != "cuda":
        return device.type
    if is_sharded:
        return "several GPUs"
    from nanovllm.models.quantised.tiled import why_not_packed

    return device.type if why_not_packed(device) is None else "this GPU"


def _reader(
    source: str, model_config: Any, config: EngineConfig, options: dict[str, Any], kernels: str, *, is_sharded: bool
) -> Reader:
    """Function that reads a model of a class of the library, with the report of its load; nothing is read yet.

    Args:
        kernels: type of the device, as `kernels_of` returns it.

    Raises ValueError for an option that contradicts the checkpoint, UnsupportedModelError for quantised weights that
    cannot be dequantised, and ModelLoadError for damaged ones.
    """
    dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    options = options | {"output_loading_info": True, "ignore_mismatched_sizes": True}
    if not getattr(model_config, "quantization_config", None) and config.quantization not in ABOUT_CHECKPOINTS:
        return lambda model_class: model_class.from_pretrained(source, dtype=dtype, **options)
    from nanovllm.models.quantised.loading import folder_of, reading
    from nanovllm.models.quantised.stored_config import checkpoint_of, keeps

    is_kept = keeps(source, model_config, config.quantization, kernels)
    checkpoint: Any = checkpoint_of(model_config)
    if not checkpoint.is_read:
        raise unsupported("quantised format", _name_of(model_config), f"quant_method {checkpoint.method!r}")
    with load_errors(f"the model {source!r}", source):
        folder = folder_of(source, options)
    return reading(source, folder, model_config, checkpoint, config, options, is_kept=is_kept, is_sharded=is_sharded)


def part_of_another(config: Any) -> Any:
    """The class of a model saved as the text part of a larger one (Emu3); None for any other model.

    The library's Auto class does not map such a config.
    """
    model_class = getattr(transformers, _name_of(config), None)
    is_own = getattr(model_class, "config_class", None) is type(config)
    return model_class if is_own and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING else None


def _name_of(config: Any) -> str:
    name: str = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    return name


def load_tokenizer(model: str | os.PathLike[str], tokenizer: Any, config: EngineConfig) -> Any:
    """The tokenizer of `load`, without loading weights; None if it is skipped. Raises ModelLoadError."""
    if config.skip_tokenizer_init:
        return None
    name = os.fspath(model)
    source = find(name, needs_tokenizer=tokenizer is None, revision=config.revision)
    options = lookup_options(source, config, name)
    with load_errors(f"the tokenizer of {name!r}", source), _no_progress_bars():
        loaded = _read_tokenizer(source, options) if tokenizer is None else _load_tokenizer(tokenizer, config)
    return loaded if config.chat_template is None else with_chat_template(loaded, config.chat_template)


@contextmanager
def load_errors(what: str, source: str = "") -> Iterator[None]:
    """Convert errors of the libraries that read a model to ModelLoadError, or name the mistake that `source` is."""
    try:
        yield
    except UnsupportedModelError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        name_mistake(Path(source or os.devnull))
        raise ModelLoadError(f"{what} could not be loaded: {error}") from error


def lookup_options(source: str, config: EngineConfig, name: str | None = None) -> dict[str, Any]:
    """Options of `from_pretrained`: no access to the hub for a local folder, or while the hub is unreachable.

    Args:
        name: model id, to which `revision` applies; None for a separate tokenizer.
    """
    is_local = os.path.exists(source)
    revision, file = (None, "tokenizer_config.json") if name is None else (config.revision, "config.json")
    reads_cache = is_local or not hub.is_reachable(source, revision, file=file)
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code, "local_files_only": reads_cache}
    if name is not None and config.revision is not None:
        if is_local and ":" not in name:
            raise ValueError(f"revision is {config.revision!r}, but {name!r} is no hub model. Leave revision out.")
        options["revision"] = config.revision
    return options


def _take_module(model: nn.Module, tokenizer: Any, config: EngineConfig) -> LoadedModel:
    if not hasattr(model, "config") or not hasattr(model, "get_input_embeddings"):
        raise TypeError(f"model must be a transformers causal language model, not {type(model).__name__}.")
    parameter = next(model.parameters())
    if config.dtype not in ("auto", str(parameter.dtype).removeprefix("torch.")):
        raise ValueError(f"dtype is {config.dtype!r}, but the module's is {parameter.dtype}; leave dtype at 'auto'.")
    device = parameter.device if config.device == "auto" else torch.device(config.device)
    if device.type != parameter.device.type or device.index not in (None, parameter.device.index):
        raise ValueError(
            f"device is {config.device!r}, but the module is on {parameter.device}; leave device at 'auto'."
        )
    check_kv_cache_dtype(config, parameter.device)
    if config.quantization is not None:
        raise ValueError(
            f"quantization is {config.quantization!r}, but a loaded module is its owner's, and quantised weights would "
            "not follow his changes. Leave it out, or save the module (save_pretrained) and pass the folder."
        )
    if config.exact_activations:
        check_exact_activations(config, None)
    if config.revision is not None:
        raise ValueError("revision chooses among a hub model's versions; a loaded module has none.")
    if config.trust_remote_code:
        raise ValueError("trust_remote_code is about loading a model; a loaded module needs none. Leave it out.")
    with load_errors(f"the tokenizer {tokenizer!r}"), _no_progress_bars():
        loaded = None if tokenizer is None else _load_tokenizer(tokenizer, config)
    if config.chat_template is not None:
        loaded = with_chat_template(loaded, config.chat_template)
    return LoadedModel(with_stand_in(model) or model, loaded, is_live=True, identity=f"module-{id(model)}")


def _load_tokenizer(tokenizer: Any, config: EngineConfig) -> Any:
    """Load a tokenizer given separately from the model; the model's revision does not apply."""
    if isinstance(tokenizer, (str, os.PathLike)):
        source = find_tokenizer(os.fspath(tokenizer))
        return _read_tokenizer(source, lookup_options(source, config))
    if not callable(getattr(tokenizer, "decode", None)) or not callable(tokenizer):
        raise TypeError(f"tokenizer must be a tokenizer, a folder or a hub id, not {tokenizer!r}.")
    return tokenizer


def _read_tokenizer(source: str, options: dict[str, Any]) -> Any:
    """Read the tokenizer of a folder, GGUF file or hub id, and silence its warning of long texts.

    Too long a prompt is refused elsewhere, with the number of its tokens.
    """
    if is_gguf(source):
        from nanovllm.models.gguf.loading import load_tokenizer as read_tokenizer

        tokenizer = read_tokenizer(source)
    else:
        tokenizer = AutoTokenizer.from_pretrained(source, **options, **added_tokens_option(source))
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True  # marks it as issued
    return tokenizer


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Disable the library's progress bars, which are meant for long downloads, not for a second of loading."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
