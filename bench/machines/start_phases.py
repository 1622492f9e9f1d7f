"""Where the time of a start goes until the second token, in fresh processes with empty and with warm compiler caches.

    python bench/machines/start_phases.py                                the shape of Qwen3-0.6B, empty then warm caches
    python bench/machines/start_phases.py --caches warm --profile        and a profile of the engine's construction
    python bench/machines/start_phases.py --timeline                     and what each thread did in each half second
    python bench/machines/start_phases.py --model FOLDER --shape ""      a checkpoint with its tokenizer

`warm` are the caches that the processes before it filled; a first `warm` fills them by a process that is not shown.
Seconds count from the start of each process. Imports come first, in the order of their dependencies.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from fresh_process import Compilations, Phases, StackSampler, Timeline, environment, since_start

IMPORTS = ("numpy", "torch", "nanovllm.llm")
MORE_IMPORTS = ("transformers", "nanovllm.build")  # else within LLM.__init__
COMPILERS = ("triton", "torch._dynamo", "torch._inductor.compile_fx")  # else imported by compile_ahead, in a thread
PHASES = (
    ("nanovllm.model.loader", "load"),
    ("nanovllm.model.loader", "load_weights"),
    ("nanovllm.model.loader", "load_tokenizer"),
    ("nanovllm.model.building", "build_binding"),
    ("nanovllm.build", "resolve_options"),
    ("nanovllm.fast.layers", "FastLayers.merge_linears"),
    ("nanovllm.fast.graph_paths", "compile_ahead"),
    ("nanovllm.fast.layers", "FastLayers.fuse_rotary"),
    ("nanovllm.execution.memory", "memory_for_cache"),
    ("nanovllm.build", "ModelRunner.__init__"),
    ("nanovllm.fast.graph_paths", "GraphExecutor.__init__"),
    ("nanovllm.execution.cuda_graphs", "build_gpu_attention"),
    ("nanovllm.fast.layers", "FastLayers.use_kernel_layers"),
    ("nanovllm.fast.layers", "FastLayers.stack_layers"),
    ("nanovllm.model.binding", "probe_model"),
    ("nanovllm.model.building", "check_rows"),
    ("nanovllm.fast.layers", "FastLayers.pack_weights"),
    ("nanovllm.fast.graph_paths", "GraphExecutor.warm_up"),
    ("nanovllm.execution.compile_ahead", "_start_compiler"),
    ("nanovllm.execution.option_kernels", "on_device"),
    ("nanovllm.fast.graph_paths", "run_some_rows"),
    ("nanovllm.fast.graph_paths", "run_few_decodes"),
    ("nanovllm.fast.graph_paths", "rehearse_at_start"),
    ("nanovllm.execution.memory", "measure_peaks"),
    ("nanovllm.execution.cuda_graphs", "GraphExecutor._capture_forward"),
    ("nanovllm.execution.graph_pool", "GraphPool.capture"),
    ("nanovllm.execution.cuda_graphs", "GraphExecutor._capture_head"),
    ("nanovllm.execution.option_kernels", "use_gpu"),
    ("nanovllm.kernels.prompt_attention", "open_kernel"),
    ("nanovllm.kernels.nvrtc", "compile_source"),
    ("nanovllm.model.fast.compiled_layers", "_compile"),
    ("nanovllm.engine", "Engine.step"),
)


class _NoText:
    """`random_models.NoText`, whose file imports transformers."""

    def __call__(self, text: str) -> Any:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        return ""


def show_start(arguments: argparse.Namespace) -> None:
    """Run the start in this process."""
    phases, compilations = Phases(), Compilations()
    if arguments.command:
        from nanovllm.process.import_index import keep_import_index

        keep_import_index()
    timeline = Timeline() if arguments.timeline else None
    for name in (*IMPORTS, *(MORE_IMPORTS + COMPILERS if arguments.imports else ())):
        with suppress(ModuleNotFoundError):  # no Triton on a CPU
            phases.timed(f"import {name}", importlib.import_module)(name)
    phases.watch("nanovllm.features.llm", "open_engine", wrap=partial(_watching, phases, compilations))
    from nanovllm import SamplingParams

    sampler = StackSampler()
    with sampler if arguments.profile else nullcontext():
        llm = phases.timed("LLM.__init__", _open)(arguments)
    params = SamplingParams(max_tokens=1, temperature=0.6, ignore_eos=True)
    for name in ("first", "second"):
        generate = phases.timed(f"the {name} token", llm.generate)
        generate([[1, 2, 3]], params, use_tqdm=False)
        print(f"{name} token after {since_start():.2f} s", flush=True)
    phases.show()
    compilations.show()
    if timeline is not None:
        timeline.show()
        compilations.show_parts()
        print(f"torch._inductor.compile_fx imported: {'torch._inductor.compile_fx' in sys.modules}")
    if arguments.profile:
        sampler.show(arguments.lines)
    llm.close()


def _watching(phases: Phases, compilations: Compilations, open_engine: Callable[..., Any]) -> Callable[..., Any]:
    """Watch the rest once it is imported, as `open_engine` does."""

    def run(*args: Any, **options: Any) -> Any:
        from nanovllm.execution.early_start import begin_gpu

        begin_gpu(args[0], args[3])
        phases.timed("import nanovllm.build", importlib.import_module)("nanovllm.build")
        compilations.watch()
        for module, path in PHASES:
            phases.watch(module, path)
        return open_engine(*args, **options)

    return run


def _open(arguments: argparse.Namespace) -> Any:
    from nanovllm import LLM

    tokenizer = None if arguments.with_text else _NoText()
    return LLM(str(arguments.model), tokenizer=tokenizer, **({"dtype": "bfloat16"} if arguments.shape else {}))


def run_process(arguments: list[str], caches: Path | None, *, is_shown: bool = True, limit: float = 300.0) -> None:
    """This script's start in a process of its own."""
    command = [sys.executable, "-u", str(Path(__file__).resolve()), "--here", *arguments]
    output = None if is_shown else subprocess.DEVNULL
    subprocess.run(command, env=environment(caches), check=True, stdout=output, timeout=limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6b", help="of random weights, see random_models.py")
    parser.add_argument("--model", type=Path, help="a folder instead")
    parser.add_argument("--caches", nargs="+", choices=("empty", "warm", "usual"), default=["empty", "warm"])
    parser.add_argument("--imports", action="store_true", help="import everything first, and the compilers")
    parser.add_argument("--command", action="store_true", help="as the command, which keeps indices of imports on disk")
    parser.add_argument("--profile", action="store_true", help="profile the engine's construction")
    parser.add_argument("--timeline", action="store_true", help="what each thread did in each half second")
    parser.add_argument("--lines", type=int, default=40, help="of the profile")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--with-text", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        show_start(arguments)
        return
    from random_models import checkpoint

    folder = arguments.model or checkpoint(arguments.shape)
    given = ["--model", str(folder), "--shape", "" if arguments.model else arguments.shape]
    given += ["--with-text"] if arguments.model else []
    given += [f"--{name}" for name in ("imports", "command", "profile", "timeline") if getattr(arguments, name)]
    given += ["--lines", str(arguments.lines)]
    with tempfile.TemporaryDirectory(prefix="nanovllm-caches-") as root:
        caches: Path | None = None
        for number, state in enumerate(arguments.caches):
            if state == "empty" or (state == "warm" and caches is None):
                caches = Path(root) / str(number)
                if state == "warm":
                    run_process(given, caches, is_shown=False)
            print(f"\n==== {state} caches", flush=True)
            run_process(given, None if state == "usual" else caches)


if __name__ == "__main__":
    main()
