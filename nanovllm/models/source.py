"""Resolves a model's name to a source: embedded, a local folder, a GGUF file, a hub id or a file of one; no torch."""

from __future__ import annotations

from pathlib import Path

from nanovllm.errors import ModelLoadError
from nanovllm.features.engine_config import EngineConfig
from nanovllm.models import hub, hub_files
from nanovllm.models.default_model import DEFAULT_MODEL, ensure_default_model
from nanovllm.models.mistakes import model_texts, name_mistake, refuse_pointers, tokenizer_texts

WEIGHT_PATTERNS = ("*.safetensors", "*.bin")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def stored_files(source: str) -> dict[str, tuple[int, int]]:
    """(bytes, mtime in ns) of each file of a local model, by name; empty for a hub id."""
    path = Path(source).expanduser()
    if path.is_dir():
        patterns = {*WEIGHT_PATTERNS, *TOKENIZER_FILES, "*.json", "*.jinja", "*.py"}
        files = sorted({file for pattern in patterns for file in path.glob(pattern)})
    else:
        files = _parts_of(path) if is_gguf(path) else []
    states = ((file.name, file.stat()) for file in files if not file.name.startswith(".") and file.exists())
    return {name: (state.st_size, state.st_mtime_ns) for name, state in states}


def needs_tokenizer(tokenizer: object, config: EngineConfig) -> bool:
    """Whether the model must bring its own tokenizer."""
    return tokenizer is None and not config.skip_tokenizer_init


def check_skipped_tokenizer(tokenizer: object, config: EngineConfig) -> None:
    """Raise ValueError for a tokenizer that skip_tokenizer_init would leave unused."""
    if tokenizer is not None and config.skip_tokenizer_init:
        raise ValueError("a tokenizer is given, but skip_tokenizer_init loads none. Leave one of the two out.")


def is_gguf(path: str | Path) -> bool:
    """Whether this is a file with the suffix .gguf or the magic of GGUF."""
    path = Path(path).expanduser()
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def find(name: str, *, needs_tokenizer: bool, revision: str | None = None) -> str:
    """Resolve a model's name to a folder, GGUF file or hub id; builds the embedded model on first use.

    A name such as "org/model:Q4_K_M" is a GGUF file of a hub repository, which is fetched.

    Raises ModelLoadError as `find_folder`, `hub_files.gguf_path` and `hub.is_reachable`.
    """
    if name == DEFAULT_MODEL:
        return str(ensure_default_model())
    if ":" in name and (parts := hub_files.split_name(name)) is not None:
        name = str(hub_files.gguf_path(*parts, revision))
    folder = find_folder(name, needs_tokenizer=needs_tokenizer)
    if folder is None:
        hub.is_reachable(name, revision)
    return name if folder is None else str(folder)


def find_tokenizer(name: str) -> str:
    """Resolve a tokenizer's name to a folder, GGUF file or hub id; builds the embedded model on first use.

    Raises ModelLoadError for a path without a tokenizer, and as `hub.is_reachable`.
    """
    if name == DEFAULT_MODEL:
        return str(ensure_default_model())
    path = Path(name).expanduser()
    refuse_pointers([path, *tokenizer_texts(path)])
    has_one = is_gguf(path) and _has_tokenizer(path)
    if has_one or any((path / file).is_file() for file in TOKENIZER_FILES):
        return str(path)
    if path.exists():
        raise ModelLoadError(
            f"tokenizer is {name!r}, which holds none ({', '.join(TOKENIZER_FILES)}, or a GGUF file's)."
        )
    if _is_path(name):
        raise ModelLoadError(f"tokenizer is {name!r}, and there is no such folder or file.")
    hub.is_reachable(name, file="tokenizer_config.json")
    return name


def find_folder(name: str, *, needs_tokenizer: bool) -> Path | None:
    """The folder or GGUF file of this name; None if the name can only be a hub id.

    Raises ModelLoadError for a missing path, an incomplete folder and a damaged file.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            name_mistake(folder)
            if files := sorted(folder.glob("*.gguf")):
                raise ModelLoadError(f"the folder {folder} has no config.json, but GGUF files; name one: {files[0]}.")
            raise ModelLoadError(f"the folder {folder} has no config.json, so it does not hold a transformers model.")
        if not any(path for pattern in WEIGHT_PATTERNS for path in folder.glob(pattern)):
            raise ModelLoadError(f"the folder {folder} has no weights ({' or '.join(WEIGHT_PATTERNS)}).")
        if needs_tokenizer and not any((folder / file).is_file() for file in TOKENIZER_FILES):
            raise ModelLoadError(
                f"the folder {folder} has no tokenizer ({', '.join(TOKENIZER_FILES)}); pass tokenizer=..., or "
                "skip_tokenizer_init=True to prompt it with token ids."
            )
        refuse_pointers([*model_texts(folder), *(tokenizer_texts(folder) if needs_tokenizer else ())])
        return folder
    if is_gguf(folder):
        if needs_tokenizer and not _has_tokenizer(folder):
            raise ModelLoadError(
                f"{folder} has no tokenizer (tokenizer.ggml.tokens); pass tokenizer=..., or "
                "skip_tokenizer_init=True to prompt it with token ids."
            )
        return folder
    if folder.exists():
        refuse_pointers([folder])
        raise ModelLoadError(
            f"{folder} is a file, but no GGUF file; a model is one, or a folder with config.json, weights and a "
            "tokenizer."
        )
    if _is_path(name):
        raise ModelLoadError(f"there is no {'file' if folder.suffix == '.gguf' else 'folder'} {folder}.")
    return None


def _is_path(name: str) -> bool:
    """Whether a name cannot be an id of the hub."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(".gguf")


# `models.gguf` is imported only for GGUF files.
def _parts_of(path: Path) -> list[Path]:
    from nanovllm.models.gguf.file import parts_of

    return parts_of(path)


def _has_tokenizer(path: Path) -> bool:
    from nanovllm.models.gguf.file import open_gguf

    return open_gguf(path).has_tokenizer
