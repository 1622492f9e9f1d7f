"""Fresh processes with compiler caches of their own, and the time of each phase of a process."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CACHES = {  # of compilers, within one folder
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "NANOVLLM_CACHE": "nanovllm",
    "TORCH_EXTENSIONS_DIR": "extensions",
}


def environment(caches: Path | None, tree: Path = ROOT) -> dict[str, str]:
    """Environment of a process that imports `tree`, with its compiler caches in a folder, or the usual ones."""
    path = os.pathsep.join(filter(None, [str(tree), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    found = {**os.environ, "PYTHONPATH": path}
    found.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have theirs
    if caches is not None:
        found |= {name: str(caches / folder) for name, folder in CACHES.items()}
    return found


def since_start() -> float:
    """Seconds since the process started, in steps of the clock's tick of 10 ms."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class Row(NamedTuple):
    """One call, in seconds since the process started."""

    begin: float
    end: float
    processor: float
    depth: int
    name: str

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Phases:
    """Calls of functions by name, with their wall and processor time, of any thread."""

    def __init__(self) -> None:
        self.rows = [Row(0.0, since_start(), time.process_time(), 0, "Python")]
        self._local = threading.local()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            begin, processor, depth = since_start(), time.process_time(), getattr(self._local, "depth", 0)
            self._local.depth = depth + 1
            try:
                return function(*args, **options)
            finally:
                self._local.depth = depth
                self.rows.append(Row(begin, since_start(), time.process_time() - processor, depth, name))

        return run

    def watch(self, module: str, path: str, *, wrap: Callable[..., Any] | None = None) -> None:
        """Time each call of a module's function or method, where the module can be imported."""
        try:
            owner: Any = importlib.import_module(module)
        except ImportError:
            return
        *parts, name = path.split(".")
        for part in parts:
            owner = getattr(owner, part)
        function = getattr(owner, name)
        setattr(owner, name, self.timed(path, function if wrap is None else wrap(function)))

    def show(self, *, least: float = 0.005, most_alike: int = 3) -> None:
        """Print the calls in order; of functions called more often than `most_alike`, a sum at their first call."""
        print("   from      to    wall  processor")
        by_name: dict[str, list[Row]] = {}
        for row in sorted(self.rows):
            by_name.setdefault(row.name, []).append(row)
        for row in sorted(self.rows):
            alike = by_name[row.name]
            if len(alike) <= most_alike:
                if row.seconds >= least:
                    print(f"{_figures(row)}  {'  ' * row.depth}{row.name}")
            elif row is alike[0] and (total := sum(each.seconds for each in alike)) >= least:
                longest = max(each.seconds for each in alike)
                name = f"{row.name}: {len(alike)} calls, {total:.3f} s in all, the longest {longest:.3f}"
                print(f"{row.begin:7.3f} {alike[-1].end:7.3f}                    {'  ' * row.depth}{name}")
        sys.stdout.flush()


def _figures(row: Row) -> str:
    return f"{row.begin:7.3f} {row.end:7.3f} {row.seconds:7.3f}  {row.processor:9.3f}"


class StackSampler:
    """Samples the stack of the thread that enters it; cProfile counts other threads' calls into it on Python 3.12."""

    def __init__(self, interval: float = 0.003) -> None:
        self._interval = interval
        self._inclusive: Counter[str] = Counter()
        self._own: Counter[str] = Counter()
        self._ends = threading.Event()

    def __enter__(self) -> StackSampler:
        thread = threading.Thread(target=self._run, args=(threading.get_ident(),), daemon=True)
        self._begin = time.perf_counter()
        thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._seconds = time.perf_counter() - self._begin

    def _run(self, ident: int) -> None:
        while not self._ends.wait(self._interval):
            frame, names = sys._current_frames().get(ident), []
            while frame is not None:
                code = frame.f_code
                names.append(f"{'/'.join(Path(code.co_filename).parts[-3:])}:{code.co_name}")
                frame = frame.f_back
            self._inclusive.update(set(names))
            self._own.update(names[:1])

    def show(self, num_lines: int) -> None:
        """Print the functions with the most seconds, their callees' included, then without."""
        num_samples = max(1, sum(self._own.values()))
        for title, counts in (("with callees", self._inclusive), ("alone", self._own)):
            print(f"{num_samples} samples; seconds of the {num_lines} longest functions, {title}:")
            for name, count in counts.most_common(num_lines):
                print(f"  {count / num_samples * self._seconds:7.2f}  {name}")
        sys.stdout.flush()


class Timeline:
    """Samples the stacks of all threads: what each did in each half second, weighted by the time between samples."""

    def __init__(self, interval: float = 0.02, bucket: float = 0.5) -> None:
        self._interval, self._bucket = interval, bucket
        self._main: dict[int, Counter[str]] = {}  # seconds by bucket
        self._others: dict[int, Counter[str]] = {}
        self._ends = threading.Event()
        self._ident = threading.get_ident()
        self._thread = threading.Thread(target=self._run, daemon=True, name="timeline")
        self._thread.start()

    def _run(self) -> None:
        last, own = since_start(), threading.get_ident()
        while not self._ends.wait(self._interval):
            now = since_start()
            number = int(now / self._bucket)
            for ident, frame in list(sys._current_frames().items()):
                if ident == own:
                    continue
                label = _label(frame)
                to = self._main if ident == self._ident else self._others
                if ident == self._ident or "_worker" not in label:  # idle threads of a pool
                    to.setdefault(number, Counter())[label] += now - last  # type: ignore[assignment]
            last = now

    def show(self, most: int = 3) -> None:
        """Print each half second: the longest of the main thread, then those of the others."""
        self._ends.set()
        self._thread.join()
        for number in sorted(self._main):
            parts = [f"{seconds:.2f} {label}" for label, seconds in self._main[number].most_common(most)]
            print(f"{number * self._bucket:6.1f}  {' | '.join(parts)}")
            others = self._others.get(number, Counter()).most_common(most)
            if others:
                print(f"          others: {' | '.join(f'{seconds:.2f} {label}' for label, seconds in others)}")
        sys.stdout.flush()


def _label(frame: Any) -> str:
    """The innermost function of this project, and the package and function that it is in."""
    leaf, project = "", ""
    while frame is not None and not project:
        code = frame.f_code
        parts = Path(code.co_filename).parts
        name = f"{'/'.join(parts[-2:])}:{code.co_name}"
        leaf = leaf or name
        if "nanovllm" in parts[:-1] and "site-packages" not in parts:
            project = name
        frame = frame.f_back
    return leaf if project == leaf else f"{project} > {leaf}"


class Compilations:
    """Triton kernels compiled or loaded from the cache, and functions compiled by torch.compile, in order."""

    def __init__(self) -> None:
        self.kernels: list[tuple[float, str, float, bool]] = []  # end, name, seconds, whether it was in the cache
        self.functions: list[tuple[float, float]] = []  # begin, end
        self._begins: list[float] = []

    def watch(self) -> None:
        try:
            from triton import knobs
        except ImportError:
            pass
        else:
            knobs.compilation.listener = self._on_kernel
        from torch._dynamo.callback import on_compile_end, on_compile_start

        on_compile_start(lambda *_: self._begins.append(since_start()))
        on_compile_end(lambda *_: self.functions.append((self._begins.pop(), since_start())))

    def _on_kernel(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        name = getattr(src, "name", None) or getattr(getattr(src, "fn", None), "__name__", "?")
        self.kernels.append((since_start(), name, times.total / 1e6, cache_hit))

    def show(self, since: float = 0.0, *, is_brief: bool = False) -> None:
        """Print what was compiled since then; if brief, nothing where there was nothing."""
        if is_brief and not [each for each in (*self.kernels, *self.functions) if each[0] >= since]:
            return
        own = [kernel for kernel in self.kernels if kernel[0] >= since]
        built = [kernel for kernel in own if not kernel[3]]
        seconds = sum(kernel[2] for kernel in built)
        print(f"Triton: {len(built)} kernels compiled, {seconds:.2f} s in all; {len(own) - len(built)} from the cache")
        for end, name, took, _ in sorted(built, key=lambda kernel: -kernel[2])[:25]:
            print(f"    until {end:7.3f} {took:6.2f} s  {name}")
        compiled = [(begin, end) for begin, end in self.functions if end >= since]
        print(f"torch.compile: {len(compiled)} functions, {sum(end - begin for begin, end in compiled):.2f} s in all")
        for begin, end in compiled:
            if end - begin >= 0.05:
                print(f"    {begin:7.3f} {end:7.3f} {end - begin:6.2f} s")
        sys.stdout.flush()

    @staticmethod
    def show_parts(least: float = 0.1) -> None:
        """Print the parts of torch.compile's time, nested ones too."""
        from torch._dynamo.utils import compilation_time_metrics

        for name, seconds in sorted(compilation_time_metrics.items(), key=lambda item: -sum(item[1])):
            if sum(seconds) >= least:
                print(f"    {sum(seconds):6.2f} s in {len(seconds):4} calls  {name}")
        sys.stdout.flush()
