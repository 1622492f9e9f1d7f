"""Models of the Hugging Face hub as files: fetched into its cache, chosen by quantisation, removed; without torch."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from nanovllm.errors import ModelLoadError
from nanovllm.features.extras import check_extra
from nanovllm.models import hub

DEFAULT_QUANT = "Q4_K_M"  # llama.cpp's default, too
AUTO = "auto"
# Files of a transformers model; other formats of its weights are not fetched.
PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py")
PICKLES = "*.bin"
_HUB_GGUF = re.compile(r"([\w.-]+/[\w.-]+):([\w.-]+)")
_QUANT = re.compile(r"(?:^|[-._/])((?:I?Q\d|TQ\d|MXFP4|BF16|F16|F32)(?:_[A-Za-z0-9]+)*)(?=[-._/]|$)", re.IGNORECASE)
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


def split_name(name: str) -> tuple[str, str] | None:
    """(repository, quantisation or file) of a name such as "org/model:Q4_K_M"; None for other names."""
    found = None if Path(name).expanduser().exists() else _HUB_GGUF.fullmatch(name)
    return None if found is None else (found[1], found[2])


def gguf_path(repo: str, quant: str, revision: str | None = None) -> Path:
    """The GGUF file of a repository with a quantisation, fetched unless the hub's cache has it; parts come along.

    Args:
        quant: such as Q4_K_M, the name of a file, or AUTO for DEFAULT_QUANT, else the only one.

    Raises ModelLoadError as `hub.is_reachable`, and for a quantisation that the repository has not.
    """
    check_extra(f"the model {repo}:{quant}", "gguf", "gguf")
    names = _names_now(repo, revision)
    name = choose_gguf(repo, quant, names)
    folder, _, base = name.rpartition("/")
    stem = re.sub(r"-00001-of-(\d{5})\.gguf$", r"-*-of-\1.gguf", base)
    paths = _download(repo, revision, [f"{folder}/{stem}".lstrip("/")])
    return paths / name


def choose_gguf(repo: str, quant: str, names: Sequence[str]) -> str:
    """The file of a quantisation among a repository's; raises ModelLoadError."""
    quants = _by_quant(names)
    files = [file for group in quants.values() for file in group]
    if not files:
        raise ModelLoadError(f"{repo} has no GGUF files. Name it without a quantisation: {repo}.")
    if quant in files or f"{quant}.gguf" in files:
        return quant if quant in files else f"{quant}.gguf"
    if quant == AUTO:
        quant = DEFAULT_QUANT if DEFAULT_QUANT in quants or len(quants) > 1 else next(iter(quants))
    found = quants.get(quant.upper(), [])
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelLoadError(f"{repo} has {len(found)} files of {quant}: {', '.join(found)}. Name one: {repo}:FILE.")
    raise ModelLoadError(f"{repo} has no GGUF file of {quant}; it has {', '.join(sorted(quants))}.")


def _by_quant(names: Sequence[str]) -> dict[str, list[str]]:
    """First parts of a repository's GGUF files by quantisation, or by stem where the name has none."""
    quants: dict[str, list[str]] = {}
    for name in names:
        is_projector = Path(name).name.startswith("mmproj")  # an encoder of images, not the language model
        if name.endswith(".gguf") and not _LATER_PART.search(name) and not is_projector:
            found = _QUANT.findall(name)
            quants.setdefault(found[-1].upper() if found else Path(name).stem, []).append(name)
    return quants


def fetch(name: str, revision: str | None = None) -> Path:
    """Fetch a model of the hub whole; returns its folder or GGUF file.

    Raises ModelLoadError as `gguf_path`, and for a repository of GGUF files without a choice.
    """
    if (parts := split_name(name)) is not None:
        return gguf_path(*parts, revision)
    names = _names_now(name, revision)
    if "config.json" not in names:
        quants = sorted(_by_quant(names))
        remedy = f" It has GGUF files: name one, {name}:{quants[0]}, of {', '.join(quants)}." if quants else ""
        raise ModelLoadError(f"{name} has no config.json, so it does not hold a transformers model.{remedy}")
    has_tensors = any(file.endswith(".safetensors") for file in names)
    return _download(name, revision, [*PATTERNS, *(() if has_tensors else (PICKLES,))])


def remove(name: str) -> int:
    """Remove a model, or one GGUF file of its repository, from the hub's cache; returns the bytes freed.

    Raises ModelLoadError for a model that is not there, naming the near ones.
    """
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    repo, quant = split_name(name) or (name, None)
    try:
        cache = scan_cache_dir()
        found = next(cached for cached in cache.repos if cached.repo_type == "model" and cached.repo_id == repo)
    except (CacheNotFound, StopIteration):
        raise ModelLoadError(
            f"the hub's cache has no model {repo!r}.{hub.near(repo)} `nanovllm models` lists what is there."
        ) from None
    if quant is None:
        strategy = cache.delete_revisions(*(revision.commit_hash for revision in found.revisions))
        strategy.execute()
        shutil.rmtree(found.repo_path, ignore_errors=True)  # leftovers of an interrupted download
        return int(found.size_on_disk)
    return sum(_remove_gguf(revision.snapshot_path, repo, quant) for revision in found.revisions)


def _remove_gguf(snapshot: Path, repo: str, quant: str) -> int:
    names = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*.gguf")]
    first = snapshot / choose_gguf(repo, quant, names)
    parts = first.parent.glob(re.sub(r"-00001-of-(\d{5})\.gguf$", r"-*-of-\1.gguf", first.name))
    num_bytes = 0
    for part in list(parts):
        blob = part.resolve()
        part.unlink()
        if blob.exists():  # two files of equal contents share it
            num_bytes += blob.stat().st_size
            blob.unlink()
    return num_bytes


def _names_now(repo: str, revision: str | None) -> tuple[str, ...]:
    return _file_names(repo, revision, int(time.monotonic() / hub.KNOWN_SECONDS))


@lru_cache(maxsize=32)
def _file_names(repo: str, revision: str | None, period: int) -> tuple[str, ...]:
    """Names of a repository's files, or of those in the cache while the hub is unreachable; asked once a `period`."""
    from huggingface_hub import HfApi

    folder = _cached_folder(repo, revision)
    if not hub.is_reachable(repo, revision, is_cached=folder is not None) and folder is not None:
        return tuple(str(path.relative_to(folder)) for path in folder.rglob("*"))
    with _fetch_errors(repo):
        return tuple(HfApi().list_repo_files(repo, revision=revision))


def _cached_folder(repo: str, revision: str | None) -> Path | None:
    """The snapshot of a repository in the cache, maybe with some of its files; the library refuses such offline."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE, f"models--{repo.replace('/', '--')}")
    ref = folder / "refs" / (revision or constants.DEFAULT_REVISION)
    snapshot = folder / "snapshots" / (ref.read_text() if ref.is_file() else revision or "")
    return snapshot if snapshot.is_dir() and snapshot.name != "snapshots" else None


def _download(repo: str, revision: str | None, patterns: list[str]) -> Path:
    """The snapshot with the files of these patterns, or the cached one while the hub is unreachable."""
    from huggingface_hub import snapshot_download

    folder = _cached_folder(repo, revision)
    if folder is not None and not hub.is_reachable(repo, revision, is_cached=True):
        return folder
    with _fetch_errors(repo):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))


@contextmanager
def _fetch_errors(repo: str) -> Iterator[None]:
    """Convert errors of the library, which depend on the HTTP client that its release uses."""
    try:
        yield
    except Exception as error:
        raise ModelLoadError(f"{repo} could not be fetched: {str(error).strip().partition(chr(10))[0]}") from error
