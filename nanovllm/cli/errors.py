"""Errors of files and of memory in plain words."""

from __future__ import annotations

import errno
import os


def in_words(error: Exception) -> str:
    """Message of an error for the terminal; an OSError without errno, in terms of files, folders and options."""
    path = getattr(error, "filename", None)
    if path is None and getattr(error, "errno", None) == errno.ENOMEM:
        return (
            "the system has not as much memory as was asked for. Set a smaller --kv-cache-memory-bytes, "
            "--num-kv-blocks or --max-model-len."
        )
    if not isinstance(error, OSError) or path is None:
        return str(error)
    if isinstance(error, FileNotFoundError):
        folder = os.path.dirname(os.path.abspath(os.fsdecode(path)))
        return f"there is no {'file' if os.path.isdir(folder) else 'folder for the file'} {path}."
    if isinstance(error, IsADirectoryError):
        return f"{path} is a folder, where a file is needed."
    if isinstance(error, PermissionError):
        return f"this user may not open {path}."
    return f"{path}: {error.strerror}."
