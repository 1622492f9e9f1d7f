"""The index of transformers' model files, which it makes when it is imported, kept in the cache folder.

It looks through 2,500 files and reads 1,700 of them twice to find which file defines which name, 0.4 s of each start.
As long as all of them have the size and the time of change that they had, the index of an earlier start is the same.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import update_wrapper
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from nanovllm.core.paths import cache_root

_MODULE, _FUNCTION = "transformers.utils.import_utils", "define_import_structure"
_FORMAT = 2  # of the file; the number goes up with a change
_CHECKSUM_BYTES = hashlib.sha256().digest_size


@contextmanager
def import_index_kept() -> Iterator[None]:
    """Around the first import of transformers, and around the first use of a model, which imports it once more.

    The function that makes the index is exchanged within such blocks alone, of any thread. Where something else has
    imported transformers before, nothing happens.
    """
    block = object()
    try:
        _Index.follow(opened=block)
        yield
    finally:
        _Index.follow(closed=block)


class _Finder:
    """Finds one module as the finders behind it do, and has its function exchanged once it has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        finders = list(sys.meta_path)
        behind = finders[finders.index(self) + 1 :] if self in finders else finders
        specs = (finder.find_spec(name, path, target) for finder in behind if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


class _Loader:
    """Stands for a loader until the module runs."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        with suppress(AttributeError):
            module.__loader__ = module.__spec__.loader = self._loader  # type: ignore[union-attr]
        self._loader.exec_module(module)
        with suppress(Exception):  # a user has no home folder, or the library has changed
            _Index.of_process = _Index(module)
            _Index.follow()


class _Index:
    """Stands for the library's function, whose results for the folder of all models it keeps."""

    of_process: ClassVar[_Index | None] = None
    _finder, _lock = _Finder(), threading.RLock()
    _blocks: ClassVar[set[object]] = set()  # that are open

    def __init__(self, module: ModuleType) -> None:
        self._module, self._original = module, getattr(module, _FUNCTION)
        update_wrapper(self, self._original)
        memo = ("cache_clear", "cache_info")
        vars(self).update({name: getattr(self._original, name) for name in memo if hasattr(self._original, name)})
        self._source = Path(str(module.__file__))
        self._models = self._source.parents[1] / "models"
        self._path = cache_root() / "imports" / f"{_digest(os.fsencode(self._models)).hex()[:24]}.index"
        self._identity = b""
        self._results: dict[str, bytes] | None = None  # by arguments; marshalled at once: the library changes its own
        self._has_new = False

    @classmethod
    def follow(cls, *, opened: object = None, closed: object = None) -> None:
        """Note a block that opens or closes, and exchange the function while there are any, if it is whose it was."""
        with cls._lock:
            cls._blocks = (cls._blocks | {opened}) - {closed, None}
            if cls._blocks and _MODULE not in sys.modules and cls._finder not in sys.meta_path:
                sys.meta_path.insert(0, cls._finder)
            elif not cls._blocks:
                with suppress(ValueError):
                    sys.meta_path.remove(cls._finder)
            if (index := cls.of_process) is None:
                return
            before, after = (index._original, index) if cls._blocks else (index, index._original)
            if vars(index._module).get(_FUNCTION) is before:
                setattr(index._module, _FUNCTION, after)
        if closed is not None:
            index._keep()

    def __call__(self, *args: Any, **options: Any) -> Any:
        places = self._models, self._models / "__init__.py"  # others are of one model: a few files
        is_of_all = bool(args) and isinstance(args[0], (str, Path)) and Path(args[0]) in places
        results = self._found() if is_of_all else None
        if results is None:
            return self._original(*args, **options)
        call = repr((str(args[0]), args[1:], sorted(options.items())))
        if call in results:
            return marshal.loads(results[call])
        result = self._original(*args, **options)
        with suppress(ValueError):  # marshal takes no objects of classes
            results[call] = marshal.dumps(result)
            self._has_new = True
        return result

    def _found(self) -> dict[str, bytes] | None:
        """Results so far, at first those that were kept of the same files; None if a file cannot be looked at."""
        if self._results is None:
            with suppress(Exception):  # such as a link to nowhere, which an editor leaves
                self._identity = _identity(self._models, self._source)
                self._results = self._read()
        return self._results

    def _read(self) -> dict[str, bytes]:
        """What was kept of the same files; nothing if there is nothing, or it is damaged."""
        kept = self._path.read_bytes() if self._path.exists() else b""
        checksum, results = kept[:_CHECKSUM_BYTES], kept[_CHECKSUM_BYTES:]
        return marshal.loads(results) if checksum == _digest(self._identity + results) else {}

    def _keep(self) -> None:
        """Write what is new; where that cannot be, the next start reads the files."""
        if not self._has_new:
            return
        with suppress(OSError):
            results = marshal.dumps(self._results)
            self._has_new = False
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside = self._path.with_suffix(".new")  # one for all processes: the checksum tells what two have mixed
            beside.write_bytes(_digest(self._identity + results) + results)
            os.replace(beside, self._path)


def _identity(models: Path, source: Path) -> bytes:
    """Of Python, the library, the function's source file and every file of the folder: path, size, time of change."""
    others = [(str(file), file.stat()) for file in (source, models.parent / "__init__.py")]
    states = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in (*others, *sorted(_files(str(models))))]
    version = getattr(sys.modules.get("transformers"), "__version__", None)
    return _digest(repr((_FORMAT, sys.version, marshal.version, version, states)).encode())


def _files(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir():
                yield entry.path, entry.stat()
            elif entry.name != "__pycache__":
                yield from _files(entry.path)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
