"""Checks of a command before the import of torch: missing model, limits above the model's, files, endpoints."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.extras import check_extra
from nanovllm.models.default_model import DEFAULT_MODEL, default_folder
from nanovllm.models.limits import check_stored_limits
from nanovllm.models.source import check_skipped_tokenizer, find, find_tokenizer, needs_tokenizer


def check_start(options: argparse.Namespace, engine_options: Mapping[str, Any]) -> None:
    """Check a command's model, tokenizer and engine options by files and packages, without loading the model.

    Raises ModelLoadError, UnsupportedModelError, ValueError for options that contradict the model or each other, and
    RuntimeError for missing packages.
    """
    config = EngineConfig.from_options(**engine_options)
    if config.data_parallel_size > 1:
        check_extra("data_parallel_size", "serve", "msgspec")
    _check_adapters(getattr(options, "adapter", None) or {})
    check_skipped_tokenizer(options.tokenizer, config)
    if options.tokenizer is not None and options.tokenizer != DEFAULT_MODEL:
        find_tokenizer(options.tokenizer)
    if options.model != DEFAULT_MODEL:
        source = find(
            options.model, needs_tokenizer=needs_tokenizer(options.tokenizer, config), revision=config.revision
        )
        check_stored_limits(source, config)
    elif default_folder().is_dir():  # a missing folder is created when the model is loaded
        check_stored_limits(str(default_folder()), config)
    if config.policies:
        from nanovllm.features.policies.opening import check_policies

        check_policies(config)
    if config.kv_events is not None:
        from nanovllm.features.kv_events.kv_events import KvEventPublisher

        KvEventPublisher.check(config)


def _check_adapters(given: Any) -> None:
    """Raise ValueError for a name or a folder of --adapter that cannot be: pairs of both, or a mapping."""
    paths = dict(given)
    if len(paths) < len(given):
        raise ValueError(f"--adapter names one adapter twice: {', '.join(name for name, _ in given)}.")
    for name, path in paths.items():
        if not os.path.isdir(os.path.expanduser(path)):
            raise ValueError(f"--adapter {name}={path}: there is no such folder. Name one that PEFT has saved.")


def check_output(flag: str, path: str | None) -> None:
    """Raise ValueError for a file that cannot be written; it stays unchanged, and a new one is removed again."""
    if path is None:
        return
    folder = Path(path).parent
    if not folder.is_dir():
        raise ValueError(f"{flag} is {path!r}, but the folder {str(folder)!r} does not exist. Create it first.")
    is_new = not Path(path).exists()
    if not (is_new or Path(path).is_file() or Path(path).is_dir()):
        return  # a device, or a pipe that opening would wait for
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666))
    except OSError as error:
        raise ValueError(f"{flag} is {path!r}, which cannot be written: {error.strerror}. Name another file.") from None
    if is_new:
        os.unlink(path)


def check_output_folder(flag: str, path: str) -> None:
    """Raise ValueError for a folder that cannot be written or created."""
    there = next(parent for parent in (Path(path).absolute(), *Path(path).absolute().parents) if parent.exists())
    if not there.is_dir():
        raise ValueError(f"{flag} is {path!r}, but {there} is a file. Name another folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{flag} is {path!r}, but this user may not write to {there}. Name another folder.")
