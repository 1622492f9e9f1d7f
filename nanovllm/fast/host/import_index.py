"""Caches on disk two indices that transformers builds when it is imported: of its model files, of installed packages.

To find which file defines which name, it visits 2,500 files and reads 1,700 of them twice: 0.5 s of each start. The
cached index is valid while size and mtime of all these files are unchanged. To find which package installed which
module, it visits all files of all packages: 2.4 s where there are many. That index is valid while the same packages are
installed.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial, wraps
from importlib import metadata
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from nanovllm.fast.host.paths import cache_root

_MODULE, _FUNCTION = "transformers.utils.import_utils", "define_import_structure"
_CHECKSUM_BYTES = hashlib.sha256().digest_size


def keep_import_index() -> None:
    """Let transformers read its index from the cache folder; call it before transformers is imported.

    Only for processes that nanovllm starts (a command, a replica, another rank): a library must not change imports.
    """
    if _MODULE not in sys.modules:
        sys.meta_path.insert(0, _Finder())
        make = metadata.packages_distributions  # the library calls it when it is imported, or soon after
        metadata.packages_distributions = wraps(make)(lambda: _cached(make, "packages", _packages))


class _Finder:
    """Import hook that replaces a function of one module after its execution."""

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
    """The library's function, defined in `source`, with results for the folder of all models cached on disk."""
    models = source.parents[1] / "models"
    identity = cache(lambda: _identity(models, source))

    @wraps(make)
    def find(*args: Any, **options: Any) -> Any:
        cached = models, models / "__init__.py"  # other arguments name one model: a few files
        if not (args and isinstance(args[0], (str, Path)) and Path(args[0]) in cached):
            return make(*args, **options)
        call = repr((str(args[0]), args[1:], sorted(options.items())))
        return _cached(partial(make, *args, **options), call, identity)

    return find


def _packages() -> bytes:
    """Digest of the names and mtimes of all installed packages' metadata."""
    found = []
    for folder in dict.fromkeys(path or os.curdir for path in sys.path):
        if os.path.isdir(folder):
            with os.scandir(folder) as entries:
                own = [each for each in entries if each.name.endswith((".dist-info", ".egg-info"))]
            found += [(folder, entry.name, entry.stat().st_mtime_ns) for entry in own]
        elif os.path.exists(folder):  # an archive
            found.append((folder, "", os.stat(folder).st_mtime_ns))
    return _digest(repr((sys.version, marshal.version, sorted(found))).encode())


def _cached(make: Callable[[], Any], call: str, identity: Callable[[], bytes]) -> Any:
    """The result of `make`; from the cache if the identities are equal."""
    try:
        file = cache_root() / "imports" / f"{_digest(os.fsencode(call)).hex()[:24]}.index"
        known = file.read_bytes() if file.exists() else b""
        checksum, result = known[:_CHECKSUM_BYTES], known[_CHECKSUM_BYTES:]
        if checksum == _digest(identity() + result):
            return marshal.loads(result)
    except Exception:  # no home folder, or a file without stat, such as an editor's dangling link
        return make()
    made = make()
    with suppress(OSError, ValueError):  # an unwritable cache; marshal refuses instances of classes
        result = marshal.dumps(made)
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_suffix(".new")  # all processes share this path; the checksum detects concurrent writes
        written.write_bytes(_digest(identity() + result) + result)
        os.replace(written, file)
    return made


def _identity(models: Path, source: Path) -> bytes:
    """Digest of the versions of Python and the library, and of path, size and mtime of all files concerned."""
    library = [(str(file), file.stat()) for file in (source, models.parent / "__init__.py")]
    states = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in (*library, *sorted(_files(str(models))))]
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
