"""Where a model is, by its name: the embedded default, a local folder, or an id of the hub; without torch."""

from __future__ import annotations

from pathlib import Path

from nanovllm.errors import ModelLoadError
from nanovllm.model.default_model import DEFAULT_MODEL, ensure_default_model

WEIGHT_PATTERNS = ("*.safetensors", "*.bin")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def find(name: str, *, needs_tokenizer: bool) -> str:
    """The folder or hub id behind a name; makes the embedded model, and raises what `find_folder` does."""
    if name == DEFAULT_MODEL:
        return str(ensure_default_model())
    folder = find_folder(name, needs_tokenizer=needs_tokenizer)
    return name if folder is None else str(folder)


def find_folder(name: str, *, needs_tokenizer: bool) -> Path | None:
    """The folder of this name, None for what can only be a hub id.

    Raises ModelLoadError for a path to nothing, and for a folder that lacks something.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelLoadError(f"the folder {folder} has no config.json, so it does not hold a transformers model.")
        if not any(path for pattern in WEIGHT_PATTERNS for path in folder.glob(pattern)):
            raise ModelLoadError(f"the folder {folder} has no weights ({' or '.join(WEIGHT_PATTERNS)}).")
        if needs_tokenizer and not any((folder / file).is_file() for file in TOKENIZER_FILES):
            raise ModelLoadError(
                f"the folder {folder} has no tokenizer ({', '.join(TOKENIZER_FILES)}); pass tokenizer=..."
            )
        return folder
    if folder.exists():
        raise ModelLoadError(f"{folder} is a file; a model is a folder with config.json, weights and a tokenizer.")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelLoadError(f"there is no folder {folder}.")
    return None
