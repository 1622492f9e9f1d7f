"""Counts the walk of a request: the package's files and functions that run for construction and for one new token.

    python .ci/walk.py [--list]

The default model on the default backend answers one prompt with one new token, for the second time in the process; on a
GPU, tests/gpu/test_walk_on_gpu.py has another model walk the same way. A room is a folder or a top-level module of the
package; a room change is a call into another room than the caller's. Where a thread begins there is no caller. Lambdas,
comprehensions and the bodies of modules and classes are not counted.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import nanovllm
from nanovllm import LLM, SamplingParams

PACKAGE = f"{Path(nanovllm.__file__).parent}/"
OPTIONS = {"max_model_len": 512, "num_kv_blocks": 64}
# What only the first construction on a machine does: unpack the model, compile kernels.
FILL_CACHES = f"from nanovllm import LLM; LLM(**{OPTIONS}).generate('The', use_tqdm=False)"


@dataclass
class Walk:
    """Counts calls while `is_counting`; installed before any engine starts a thread, which then is counted too."""

    is_counting: bool = False
    functions: Counter[tuple[str, str]] = field(default_factory=Counter)  # (file, name)
    num_room_changes: int = 0

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.functions}

    def install(self) -> None:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def remove(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    @contextmanager
    def count(self) -> Iterator[None]:
        """Counts from zero what runs within."""
        self.functions.clear()
        self.num_room_changes = 0
        self.is_counting = True
        yield
        self.is_counting = False

    def __str__(self) -> str:
        return (
            f"{len(self.files)} files, {len(self.functions)} functions, {self.functions.total()} calls, "
            f"{self.num_room_changes} room changes"
        )

    def listed(self) -> Iterator[str]:
        for file in sorted(self.files):
            calls = (f"{function} {n}" for (where, function), n in sorted(self.functions.items()) if where == file)
            yield f"    {file}: {', '.join(calls)}"

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self.is_counting or not is_function(frame.f_code):
            return
        file = _file_in_package(frame)
        if file is None:
            return
        self.functions[file, frame.f_code.co_name] += 1
        caller = frame.f_back
        while caller is not None and _file_in_package(caller) is None:
            caller = caller.f_back
        if caller is not None and _room(_file_in_package(caller)) != _room(file):
            self.num_room_changes += 1


def is_function(code: CodeType) -> bool:
    """Whether it has a name and local variables of its own: the body of a module or a class has none."""
    return not code.co_name.startswith("<") and bool(code.co_flags & inspect.CO_OPTIMIZED)


def _file_in_package(frame: FrameType) -> str | None:
    path = frame.f_code.co_filename
    return path.removeprefix(PACKAGE) if path.startswith(PACKAGE) else None


def _room(file: str | None) -> str | None:
    return file and file.split("/", 1)[0]


def walks(prompts: Sequence[Any], **options: Any) -> Iterator[tuple[str, Walk]]:
    """The walk of construction, then that of one token; each before the next is counted.

    Args:
        prompts: two, of which the second is counted.
        options: of `LLM`.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1)
    walk = Walk()
    walk.install()
    with walk.count():
        llm = LLM(**options)
    yield "construction", walk
    llm.generate([prompts[0]], params, use_tqdm=False)
    with walk.count():
        llm.generate([prompts[1]], params, use_tqdm=False)
    walk.remove()
    yield "one token", walk
    llm.close()


def default_walks() -> Iterator[tuple[str, Walk]]:
    """The walks of the default engine."""
    subprocess.run([sys.executable, "-c", FILL_CACHES], cwd=Path(PACKAGE).parent, check=True)
    yield from walks(("The capital of France is", "The capital of Italy is"), **OPTIONS)


if __name__ == "__main__":
    for name, walk in default_walks():
        print(f"walk, {name}: {walk}")
        if "--list" in sys.argv[1:]:
            print(*walk.listed(), sep="\n")
