"""Adapters of a server: loaded at its start, and by requests from one folder."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path

from nanovllm.features.adapters.loading import CONFIG, WEIGHTS, digest_of
from nanovllm.serving.server.errors import ApiError
from nanovllm.serving.server.state import ServerState

SEPARATORS = frozenset("/\\\0")


async def load_given_adapters(state: ServerState) -> None:
    """Load the adapters that the server's settings name; raises as `load_adapter`."""
    for name, path in (state.settings.adapter or {}).items():
        await load_adapter(state, name, path)


async def load_adapter(state: ServerState, name: str, path: str, *, replaces: bool = False) -> None:
    """Load an adapter under a name, which later requests give as their model.

    Args:
        replaces: True replaces an adapter that has the name and other contents.

    Raises as `AsyncLLM.load_adapter`, and ValueError for a name that is taken.
    """
    if name.removesuffix(":latest") in state.model_names:
        raise ValueError(f"an adapter is named {name!r}, as the served model is. Give the adapter another name.")
    async with state.loading_turn:  # two loads of one name would both find it free
        before = state.engine.adapters.get(name)
        if not (before is None or replaces or before.digest == await asyncio.to_thread(_digest, path)):
            raise ValueError(
                f"lora_name is {name!r}, an adapter loaded with other contents. Unload it, set load_inplace, or choose "
                "another name."
            )
        await state.engine.load_adapter(name, path)


def _digest(path: str) -> str:
    """`Adapter.digest` of the files in a folder; empty without them, which `load_adapter` refuses by name."""
    try:
        return digest_of(*(Path(path, file).read_bytes() for file in (CONFIG, WEIGHTS)))
    except OSError:
        return ""


def path_in(
    folder: str,
    given: str,
    files: Iterable[str] = (CONFIG, WEIGHTS),
    *,
    field: str = "lora_path",
    flag: str = "--adapter-folder",
) -> str:
    """Path of a folder directly below another, by its name or its whole path.

    Args:
        files: files in it that are read.
        field, flag: names of `given` and `folder` in the error.

    Raises ApiError (403) for any other path, and for links that leave the folder above.
    """
    root = os.path.abspath(folder)
    name = given.removeprefix(os.path.join(root, ""))
    path = os.path.join(root, name)
    inside = os.path.realpath(root)
    is_child = name not in ("", ".", "..") and not SEPARATORS & set(name)
    files = [os.path.join(path, file) for file in ("", *files)] if is_child else []
    if not is_child or any(os.path.commonpath([inside, os.path.realpath(file)]) != inside for file in files):
        raise ApiError(
            403,
            f"{field} is {given!r}; it must be the name of a folder directly in {root} ({flag}), which no link leaves. "
            "Put it there.",
            param=field,
        )
    return path
