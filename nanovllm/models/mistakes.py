"""Names folders without a readable model: git-lfs pointers, an adapter, tensors of another shape.

Texts are looked at before a load, since a library takes a pointer for a template; weights where a load has failed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nanovllm.errors import ModelLoadError
from nanovllm.features.option_checks import is_pointer

ADAPTER = "adapter_config.json"


def name_mistake(path: Path) -> None:
    """Raise ModelLoadError for a file or a folder of a known kind that is no model; return for any other."""
    refuse_pointers([path])
    if path.is_dir():
        refuse_pointers([*model_texts(path), *_read_weights(path), *tokenizer_texts(path)])
        _refuse_adapter(path)


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


def refuse_pointers(files: Iterable[Path]) -> None:
    """Raise ModelLoadError for a git-lfs pointer."""
    for file in files:
        if file.is_file() and file.stat().st_size < 1024 and is_pointer(file.read_bytes()):
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


def model_texts(folder: Path) -> list[Path]:
    """Texts that the library reads with a model's weights."""
    return [folder / "config.json", folder / "generation_config.json", *folder.glob("*.index.json")]


def tokenizer_texts(folder: Path) -> list[Path]:
    """Files of the tokenizer that the library reads: vocabularies only without tokenizer.json."""
    first = folder / "tokenizer.json"
    vocabularies = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
    files = [first] if first.is_file() else [folder / name for name in vocabularies]
    others = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json"
    templates = (*folder.glob("*.jinja"), *folder.glob("additional_chat_templates/*.jinja"))
    return [*files, *(folder / name for name in others), *templates]
