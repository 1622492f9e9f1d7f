"""The index of transformers' model files, which it makes when it is imported, kept in the cache folder.

It looks through 2,500 files and reads 1,700 of them twice to find which file defines which name, 0.5 s of each start.
As long as all of them have the size and the time of change that they had, the index of an earlier start is the same.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, wraps
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from nanovllm.core.paths import cache_root

_MODULE, _FUNCTION = "transformers.utils.import_utils", "define_import_structure"
_CHECKSUM_BYTES = hashlib.sha256().digest_size


def keep_import_index() -> None:
    """In this process transformers takes its index from the cache folder; call it before that is imported.

    For processes of nanovllm's own: a command, a replica, another rank. In others a library leaves imports alone.
    """
    if _MODULE not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Exchanges the function of one module once that has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                if hasattr(module, _FUNCTION):
                    setattr(module, _FUNCTION, _kept(getattr(module, _FUNCTION), Path(str(module.__file__))))

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _kept(make: Callable[..., Any], source: Path) -> Callable[..., Any]:
    """The library's function, with its results for the folder of all models from files; `source` defines it."""
    models = source.parents[1] / "models"
    identity = cache(lambda: _identity(models, source))

    @wraps(make)
    def find(*args: Any, **options: Any) -> Any:
        places = models, models / "__init__.py"  # others are of one model: a few files
        if not (args and isinstance(args[0], (str, Path)) and Path(args[0]) in places):
            return make(*args, **options)
        try:
            call = repr((str(args[0]), args[1:], sorted(options.items())))
            file = cache_root() / "imports" / f"{_digest(os.fsencode(call)).hex()[:24]}.index"
            known = file.read_bytes() if file.exists() else b""
            checksum, result = known[:_CHECKSUM_BYTES], known[_CHECKSUM_BYTES:]
            if checksum == _digest(identity() + result):
                return marshal.loads(result)
        except Exception:  # no home folder, a file that cannot be looked at, such as an editor's link to nowhere
            return make(*args, **options)
        made = make(*args, **options)
        with suppress(OSError, ValueError):  # a cache that cannot be written; marshal takes no objects of classes
            result = marshal.dumps(made)
            file.parent.mkdir(parents=True, exist_ok=True)
            beside = file.with_suffix(".new")  # one for all processes: the checksum tells what two have mixed
            beside.write_bytes(_digest(identity() + result) + result)
            os.replace(beside, file)
        return made

    return find


def _identity(models: Path, source: Path) -> bytes:
    """Of Python, the library, the function's source file and every file of the folder: path, size, time of change."""
    others = [(str(file), file.stat()) for file in (source, models.parent / "__init__.py")]
    states = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in (*others, *sorted(_files(str(models))))]
    version = getattr(sys.modules.get("transformers"), "__version__", None)
    return _digest(repr((sys.version, marshal.version, version, states)).encode())


def _files(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir():
                yield entry.path, entry.stat()
            elif entry.name != "__pycache__":
                yield from _files(entry.path)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
