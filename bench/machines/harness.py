"""What the scripts beside it share: a command line of parts, runs in turn, seeds, engines, peers, a GPU's clock.

A script is a table of parts and a table of options. `run_parts` reads the command line, refuses parts whose device or
package is missing, runs the chosen parts, prints the figures of each as a line of JSON, and appends the line to the
file of --out as soon as it is there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
from random_models import NoText  # beside this file

from nanovllm import LLM, SamplingParams
from nanovllm.models import loader
from nanovllm.models.default_model import DEFAULT_MODEL, ensure_default_model
from nanovllm.tools.workloads.workloads import Workload

Figures = dict[str, Any]
T = TypeVar("T")
TABLE: list[tuple[str, str, str]] = []  # what, figure, target


class Part(NamedTuple):
    """One thing that a script measures.

    gpu: whether it needs a GPU.
    needs: packages that it imports and the project does not install.
    is_default: whether it runs when no part is named.
    """

    run: Callable[[argparse.Namespace], Figures]
    gpu: bool = False
    needs: tuple[str, ...] = ()
    is_default: bool = True


class Option(NamedTuple):
    """A flag of a script. Its type is that of the default, or of the first value of a list."""

    default: Any
    help: str
    choices: tuple[str, ...] | None = None


# ------------------------------------------------------------------------------------------------------ command line


def add_options(parser: argparse.ArgumentParser, options: Mapping[str, Option]) -> None:
    for name, option in options.items():
        flag = "--" + name.replace("_", "-")
        if option.default is False:
            parser.add_argument(flag, action="store_true", help=option.help)
            continue
        first = option.default[0] if isinstance(option.default, list) else option.default
        kind = str if first is None else type(first)
        nargs = "+" if isinstance(option.default, list) else None
        text = option.help if option.default is None else f"{option.help} (default %(default)s)"
        parser.add_argument(flag, type=kind, nargs=nargs, default=option.default, choices=option.choices, help=text)


def why_not(part: Part) -> str | None:
    """Why a part cannot run here, or None."""
    if part.gpu and not torch.cuda.is_available():
        return "it needs a GPU that torch sees, and there is none."
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    return f"it needs {', '.join(missing)}, which this environment lacks." if missing else None


def run_parts(
    description: str | None,
    parts: Mapping[str, Part],
    options: Mapping[str, Option],
    *,
    begin: Callable[[argparse.Namespace], object] | None = None,
) -> None:
    """Run the parts of a command line.

    Args:
        begin: function called with the parsed flags before the first part.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [name for name, part in parts.items() if part.is_default]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)} (default: {', '.join(usual)})")
    parser.add_argument("--out", type=Path, help="file to which each line of JSON is appended")
    add_options(parser, options)
    given = parser.parse_args()
    chosen = given.parts or usual
    if unknown := set(chosen) - set(parts):
        parser.error(f"there is no part {min(unknown)!r}; there are {', '.join(parts)}")
    for name in chosen:
        if reason := why_not(parts[name]):
            parser.error(f"{name}: {reason}")
    if begin is not None:
        begin(given)
    for name in chosen:
        start = time.perf_counter()
        result = parts[name].run(given)
        line = json.dumps({"stage": name, "took": round(time.perf_counter() - start, 1), "result": result})
        print(line, flush=True)
        if given.out:
            with given.out.open("a", encoding="utf-8") as out:
                out.write(line + "\n")
    for what, figure, target in TABLE:
        print(f"{what:<60} {figure:>16}" + (f"   target {target}" if target else ""))


def note(what: str, figure: float, unit: str = "", target: str = "") -> None:
    """Add a row to the table that ends the output."""
    TABLE.append((what, f"{figure:.3g} {unit}", target))


# ----------------------------------------------------------------------------------------------------------- in turn


def in_turn(settings: Mapping[str, Callable[[int], T]], rounds: int) -> dict[str, list[T]]:
    """Call each setting once a round with the round's number, and return what the rounds from 1 on gave.

    Round 0 compiles and captures. Which setting is first changes with each round.
    """
    found: dict[str, list[T]] = {name: [] for name in settings}
    for number in range(rounds + 1):
        for name in list(settings)[:: 1 if number % 2 else -1]:
            result = settings[name](number)
            if number:
                found[name].append(result)
    return found


def ratios(found: Mapping[str, list[float]], name: str, base: str) -> list[float]:
    """Return `name` over `base`, round by round, in ascending order."""
    return sorted(one / other for one, other in zip(found[name], found[base], strict=True))


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def seeded(*task: object) -> random.Random:
    """Return numbers that depend on the task's names alone, and are others for each."""
    return random.Random("/".join(map(str, task)))


def random_prompts(count: int, length: int, vocab_size: int, *task: object) -> list[list[int]]:
    """Return prompts of equal length, `count` lists of token ids."""
    return [seeded(*task, number).choices(range(vocab_size), k=length) for number in range(count)]


# ----------------------------------------------------------------------------------------------------------- engines


def folder_of(model: str) -> str:
    return str(ensure_default_model()) if model == DEFAULT_MODEL else model


@contextlib.contextmanager
def engine_of(model: Any, **options: Any) -> Iterator[LLM]:
    """Open an engine of a module that counts as loaded from a file, so that kernels may change its weights."""
    load = loader.load
    own = mock.patch.object(loader, "load", lambda *given: dataclasses.replace(load(*given), is_live=False))
    with own, LLM(model, **{"tokenizer": NoText()} | options) as llm:
        yield llm


def params_of(workload: Workload, temperature: float = 0.6) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=request.num_output_tokens)
        for request in workload.requests
    ]


def prompts_of(workload: Workload) -> list[list[int]]:
    return [request.prompt_token_ids for request in workload.requests]


def seconds_of(
    llm: LLM,
    workload: Workload,
    params: list[SamplingParams] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds of a call; raise RuntimeError if an output has another length than it was asked for."""
    params = params_of(workload) if params is None else params
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    begin = clock()
    outputs = llm.generate(prompts_of(workload), params, use_tqdm=False)
    seconds = clock() - begin
    for output, request in zip(outputs, workload.requests, strict=True):
        if output.error or len(output.outputs[0].token_ids) != request.num_output_tokens:
            raise RuntimeError(output.error or "an output has another length than it was asked for")
    return seconds


# ------------------------------------------------------------------------------------------------ peers and processes


def last_line(command: list[str], **environment: str) -> Any:
    """Run a process, such as one in a peer's environment, and return the JSON in the last line that it prints."""
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def in_a_new_process(script: str, *arguments: str, python: str = sys.executable, **environment: str) -> Any:
    return last_line([python, script, *arguments], **environment)


# --------------------------------------------------------------------------------------------------------- GPU clock


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """Return a replay of what `run` launches, captured on a stream of its own after one trial that compiles it."""
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph.capture_begin()
        run()
        graph.capture_end()
    return graph.replay


def milliseconds(run: Callable[[], object], *, rounds: int = 10) -> list[float]:
    """Return the milliseconds of each round, one at a time, after two that are not measured."""
    times = []
    for _ in range(2 + rounds):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times[2:]


def replayed_micros(run: Callable[[], object], *, rounds: int = 10) -> float:
    """Return the median microseconds of a replay."""
    return 1e3 * statistics.median(milliseconds(captured(run), rounds=rounds))


def read_rate() -> float:
    """Return the bytes per second of a plain sum over 4 GiB, the fastest of several."""
    data = torch.empty(2**31, dtype=torch.bfloat16, device="cuda").normal_()
    return data.nbytes / (min(milliseconds(data.sum)) / 1e3)
