"""The commands `nanovllm pull` and `nanovllm rm`: models of the hub into its cache, and out of it."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from nanovllm.cli.flags import add_verbose_flag
from nanovllm.errors import ModelLoadError
from nanovllm.models import hub_files
from nanovllm.models.default_model import DEFAULT_MODEL, default_folder, ensure_default_model
from nanovllm.models.gguf.file import parts_of

NAMES = "ORG/NAME of the hub, ORG/NAME:QUANT for one GGUF file of a repository, such as :Q4_K_M"


def add_pull_command(commands: Any) -> None:
    """Register `nanovllm pull`."""
    pull = commands.add_parser(
        "pull", help="fetch a model into the hub's cache", allow_abbrev=False,
        description="Fetch a model of the Hugging Face hub into its cache (HF_HOME), as a first use would.",
    )  # fmt: skip
    pull.add_argument("model", metavar="MODEL", help=f"{NAMES}, or the embedded {DEFAULT_MODEL}")
    pull.add_argument("--revision", metavar="STR", help="branch, tag or commit")
    add_verbose_flag(pull)
    pull.set_defaults(run=_pull)


def add_rm_command(commands: Any) -> None:
    """Register `nanovllm rm`."""
    remove = commands.add_parser(
        "rm", help="remove a model from the hub's cache", allow_abbrev=False,
        description="Remove a model from the cache of the Hugging Face hub. Folders and files elsewhere stay.",
    )  # fmt: skip
    remove.add_argument("model", metavar="MODEL", help=f"{NAMES}, or the embedded {DEFAULT_MODEL}")
    add_verbose_flag(remove)
    remove.set_defaults(run=_remove)


def _pull(options: argparse.Namespace) -> int:
    name = options.model
    if name == DEFAULT_MODEL:
        path = ensure_default_model()
    else:
        _refuse_path(name, "is here already")
        path = hub_files.fetch(name, options.revision)
    files = parts_of(path) if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    print(f"{name} is in {path} ({_megabytes(sum(file.stat().st_size for file in files))})")
    return 0


def _remove(options: argparse.Namespace) -> int:
    name = options.model
    if name == DEFAULT_MODEL:
        folder = default_folder()
        if not folder.is_dir():
            raise ModelLoadError(f"{name} is not here: {folder} does not exist.")
        num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        shutil.rmtree(folder)
    else:
        _refuse_path(name, "is yours; remove it yourself")
        num_bytes = hub_files.remove(name)
    print(f"{name} is removed ({_megabytes(num_bytes)})")
    return 0


def _refuse_path(name: str, reason: str) -> None:
    if Path(name).expanduser().exists() or name.startswith((".", "/", "~")):
        raise ValueError(f"{name} is a path, and this command takes models of the hub. A model at a path {reason}.")


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"
