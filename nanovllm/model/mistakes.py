"""Names folders without a readable model: git-lfs pointers, an adapter, tensors of another shape.

Called where loading has failed, so that a start reads nothing for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nanovllm.core.errors import ModelLoadError

ADAPTER = "adapter_config.json"
_POINTER = b"version https://git-lfs.github.com/spec/"  # begins a file that git has in place of a large one


def name_mistake(folder: Path) -> None:
    """Raise ModelLoadError for a folder of a known kind that is no model; return for any other."""
    if folder.is_file():
        _refuse_pointers([folder])
    if folder.is_dir():
        _refuse_pointers([folder / "config.json", *_read_weights(folder), *_read_tokenizer_files(folder)])
        _refuse_adapter(folder)


def name_tensors(source: str, info: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for tensors that are missing or of another shape, which the library fills at random.

    Args:
        info: Report of the load by `from_pretrained`.
    """
    if missing := sorted(info["missing_keys"]):
        raise ModelLoadError(
            f"the weights of {source!r} are incomplete: {len(missing)} tensors are missing, {missing[0]} first."
        )
    for name, given, wanted in sorted(info["mismatched_keys"], key=str):
        raise ModelLoadError(
            f"the weights of {source!r} are not those of its config.json: {name} has the shape {list(given)} in the "
            f"file and {list(wanted)} by the config. Take both from one revision."
        )


def _refuse_pointers(files: Iterable[Path]) -> None:
    """Raise ModelLoadError for a git-lfs pointer."""
    for file in files:
        if file.is_file() and file.stat().st_size < 1024 and file.read_bytes().startswith(_POINTER):
            raise ModelLoadError(
                f"{file} is a git-lfs pointer, not the file itself. Run git lfs pull in its folder, or fetch the model "
                "with nanovllm pull."
            )


def _refuse_adapter(folder: Path) -> None:
    """Raise ModelLoadError for a folder with the weights of an adapter alone."""
    if not (folder / ADAPTER).is_file() or any(not file.name.startswith("adapter_") for file in _weights(folder)):
        return
    try:
        base = json.loads((folder / ADAPTER).read_bytes()).get("base_model_name_or_path")
    except (ValueError, AttributeError):
        base = None
    raise ModelLoadError(
        f"the folder {folder} holds an adapter ({ADAPTER}) of the model {base!r}, not a model. Merge it into that "
        "model, as peft's merge_and_unload does, and name the merged folder."
    )


def _weights(folder: Path) -> list[Path]:
    return [path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern)]


def _read_weights(folder: Path) -> list[Path]:
    """Files of weights that the library reads, of those in several formats."""
    patterns = ("model*.safetensors", "*.safetensors", "*.bin")
    return next((found for pattern in patterns if (found := sorted(folder.glob(pattern)))), [])


def _read_tokenizer_files(folder: Path) -> list[Path]:
    """Files of the tokenizer that the library reads: the others only without the first."""
    first = folder / "tokenizer.json"
    return [first, folder / "tokenizer_config.json"] if first.is_file() else [folder / "tokenizer.model"]
