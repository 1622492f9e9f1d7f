"""The index that transformers makes of its model files when it is imported, kept in the cache folder.

It reads 2,500 files twice to find which file defines which name, 0.4 s of each start. As long as all of them have the
size and the time of change that they had, the index of the last start is the same.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from nanovllm.paths import cache_root

_MODULE, _FUNCTION = "transformers.utils.import_utils", "define_import_structure"
_FORMAT = 1  # of the file; the number goes up with a change
_CHECKSUM_BYTES = hashlib.sha256().digest_size


@contextmanager
def import_index_kept() -> Iterator[None]:
    """Around the first import of transformers, and around the first use of a model, which imports it once more.

    The function that makes the index is exchanged in this block alone. Where something else has imported transformers
    before, nothing happens.
    """
    finder = None
    if "transformers" not in sys.modules:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    elif _Exchange.of_process is not None:
        _Exchange.of_process.begin()
    try:
        yield
    finally:
        if finder is not None:
            sys.meta_path.remove(finder)
        if _Exchange.of_process is not None:
            _Exchange.of_process.end()


class _Exchange:
    """The library's function, and what stands for it within a block."""

    of_process: ClassVar[_Exchange | None] = None

    def __init__(self, module: ModuleType, original: Callable[..., Any], file: str) -> None:
        self._module, self._original = module, original
        self._index = _Index(Path(file), original)

    def begin(self) -> None:
        setattr(self._module, _FUNCTION, self._index)

    def end(self) -> None:
        setattr(self._module, _FUNCTION, self._original)
        self._index.keep()


class _Finder:
    """Finds one module as it would be found anyway, and exchanges its function once it has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def run_and_exchange(module: ModuleType) -> None:
            del loader.exec_module  # the loader is as it was
            run(module)
            original = getattr(module, _FUNCTION, None)
            if callable(original) and module.__file__ is not None:
                with suppress(RuntimeError):  # of a user without a home folder
                    _Exchange.of_process = _Exchange(module, original, module.__file__)
                    _Exchange.of_process.begin()

        loader.exec_module = run_and_exchange
        return spec


class _Index:
    """Stands for the function, whose results for the folder of all models it keeps."""

    def __init__(self, file: Path, original: Callable[..., Any]) -> None:
        self._original = original
        self._models = file.parents[1] / "models"
        self._source = file
        self._path = cache_root() / "imports" / f"{_digest(str(self._models)).hex()[:24]}.index"
        self._identity: bytes | None = None
        self._results: dict[str, bytes] = {}  # by arguments; marshalled at once, since the library changes its own
        self._has_new = False

    def __call__(self, module_path: Any, *args: Any, **options: Any) -> Any:
        is_of_all = Path(module_path) in (self._models, self._models / "__init__.py")  # else of one: a few files
        if not is_of_all or not self._is_identified():
            return self._original(module_path, *args, **options)
        call = repr((str(module_path), args, sorted(options.items())))
        if call in self._results:
            return marshal.loads(self._results[call])
        result = self._original(module_path, *args, **options)
        with suppress(ValueError):  # marshal takes no objects of classes
            self._results[call] = marshal.dumps(result)
            self._has_new = True
        return result

    def _is_identified(self) -> bool:
        """Whether all files could be looked at; the first time, what was kept of them is read."""
        if self._identity is None:
            with suppress(OSError):  # such as a link to nowhere, which an editor leaves
                self._identity = _identity(self._models, self._source)
                self._results = self._read()
        return self._identity is not None

    def _read(self) -> dict[str, bytes]:
        """What was kept of the same files; nothing if there is nothing, or it is damaged."""
        assert self._identity is not None
        try:
            kept = self._path.read_bytes()
        except OSError:
            return {}
        checksum, identity = kept[:_CHECKSUM_BYTES], kept[_CHECKSUM_BYTES : 2 * _CHECKSUM_BYTES]
        results = kept[2 * _CHECKSUM_BYTES :]
        if identity != self._identity or checksum != _digest(identity + results):
            return {}
        loaded: dict[str, bytes] = marshal.loads(results)
        return loaded

    def keep(self) -> None:
        """Write what is new, beside its place and by a rename; where that cannot be, the next start reads the files."""
        if not self._has_new or self._identity is None:
            return
        with suppress(OSError):
            kept = self._identity + marshal.dumps(self._results)
            self._has_new = False
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._path.parent) as folder:
                written = Path(folder) / self._path.name
                written.write_bytes(_digest(kept) + kept)
                os.replace(written, self._path)


def _identity(models: Path, source: Path) -> bytes:
    """Of Python, the function's source file and every file of the folder: path, size and time of change."""
    stat = source.stat()
    states = [(str(source), stat.st_size, stat.st_mtime_ns), *_states(str(models))]
    return _digest(repr((_FORMAT, sys.version, marshal.version, sorted(states))))


def _states(folder: str) -> Iterator[tuple[str, int, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir():
                stat = entry.stat()
                yield entry.path, stat.st_size, stat.st_mtime_ns
            elif entry.name != "__pycache__":
                yield from _states(entry.path)


def _digest(content: str | bytes) -> bytes:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).digest()
