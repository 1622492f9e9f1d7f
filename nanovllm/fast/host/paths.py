"""Folders that outlive a process."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """The folder of the default model and of compiled kernels: $NANOVLLM_CACHE, else the user's cache folder."""
    if own := os.environ.get("NANOVLLM_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nanovllm"
