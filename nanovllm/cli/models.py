"""The command `nanovllm models`: lists models on this machine, and models to download."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanovllm.cli.flags import add_verbose_flag
from nanovllm.errors import ModelLoadError, UnsupportedModelError
from nanovllm.features.extras import MissingLibraryError
from nanovllm.models.default_model import DEFAULT_MODEL, default_folder
from nanovllm.models.gguf.config import read_config, refuse_types
from nanovllm.models.gguf.file import GGUFFile, is_first_part, parts_of
from nanovllm.models.quantised.stored_config import checkpoint_of
from nanovllm.models.source import WEIGHT_PATTERNS

DESCRIPTION = "List the models of this machine: the embedded default and those in the cache of the Hugging Face hub."
HEADINGS = ("MODEL", "SIZE", "CONTEXT", "ARCHITECTURE", "STATE")
READY = "ready"


@dataclass(frozen=True, slots=True)
class ListedModel:
    """Model of the list.

    name: value for --model; the path of a GGUF file. size: bytes on disk. context: longest sequence in tokens.
    state: ready, or not.
    """

    name: str
    size: int | None
    context: int | None
    architecture: str | None
    state: str
    folder: str | None


def add_models_command(commands: Any) -> None:
    """Register the subcommand."""
    models = commands.add_parser("models", help="list models", description=DESCRIPTION, allow_abbrev=False)
    models.add_argument("--json", action="store_true", help="print one JSON object a line instead of a table")
    add_verbose_flag(models)
    models.set_defaults(run=_models)


def _models(options: argparse.Namespace) -> int:
    from huggingface_hub import constants

    found = [_default_model(), *_cached_models()]
    if options.json:
        for model in found:
            print(json.dumps(asdict(model)))
        return 0
    rows = [HEADINGS, *map(_row, found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    fetched = "not now: HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "fetched at its first use"
    print("\nAlso: a folder with a transformers model or a GGUF file, -m PATH,")
    print(f"or a model of the hub, -m ORG/NAME ({fetched}).")
    return 0


def _default_model() -> ListedModel:
    folder = default_folder()
    if not folder.is_dir():
        return ListedModel(DEFAULT_MODEL, None, None, None, "the default, fetched at its first use (93 MB)", None)
    size = sum(path.stat().st_size for path in folder.iterdir())
    return _listed(DEFAULT_MODEL, folder, size, f"{READY}, the default")


def _cached_models() -> Iterator[ListedModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id.lower()):
        if repo.repo_type == "model" and repo.revisions:
            newest = max(repo.revisions, key=lambda revision: revision.last_modified)
            folder = newest.snapshot_path
            files = [] if (folder / "config.json").exists() else sorted(folder.rglob("*.gguf"))
            if files:
                yield from (_listed_gguf(path) for path in files if is_first_part(path))
            else:
                yield _listed(repo.repo_id, folder, repo.size_on_disk)


def _listed_gguf(path: Path) -> ListedModel:
    """Describe a GGUF file, by its path; a split one by its first part, with the size of all parts."""
    size = path.stat().st_size
    try:
        file = GGUFFile(path)
        refuse_types(file)
        config = read_config(file)
    except (ModelLoadError, UnsupportedModelError, MissingLibraryError) as error:
        reason = str(error).removeprefix(str(path)).lstrip(" :")
        return ListedModel(str(path), size, None, None, f"GGUF, which is not read: {reason}", str(path.parent))
    size = sum(part.stat().st_size for part in parts_of(path))
    context = config["max_position_embeddings"]
    name = config["architectures"][0]
    return ListedModel(str(path), size, context, name, READY, str(path.parent))


def _listed(name: str, folder: Path, size: int, state: str = READY) -> ListedModel:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        state = "no config.json: not a transformers model"
        return ListedModel(name, size, None, None, state, str(folder))
    text = config.get("text_config") or config
    if (checkpoint := checkpoint_of(config)) is not None:
        state = f"{state}: {checkpoint}" if checkpoint.is_read else f"in a format that is not read: {checkpoint}"
    missing = [path for path in _shards(folder) if not path.exists()]
    if missing:
        state = f"incomplete, {missing[0].name} is missing: it is fetched at its next use"
    return ListedModel(
        name,
        size,
        text.get("max_position_embeddings"),
        next(iter(config.get("architectures") or ()), config.get("model_type")),
        state,
        str(folder),
    )


def _shards(folder: Path) -> list[Path]:
    """Weight files of a snapshot."""
    for index in folder.glob("*.index.json"):
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        except (OSError, ValueError, KeyError):
            continue
        return [folder / name for name in sorted(set(names))]
    found = [path for pattern in WEIGHT_PATTERNS for path in folder.glob(pattern)]
    return found or [folder / "model.safetensors"]


def _row(model: ListedModel) -> tuple[str, ...]:
    size = "" if model.size is None else f"{model.size / 1e6:,.0f} MB"
    context = "" if model.context is None else f"{model.context:,}"
    return model.name, size, context, model.architecture or "", model.state
