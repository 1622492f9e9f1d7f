"""The pause at the first use of each option: a fresh process answers one plain request, then meets every option.

    python bench/machines/first_use.py                                the default model
    python bench/machines/first_use.py --shape 0.6b --caches empty    random weights, no compiled kernels on disk
    python bench/machines/first_use.py --idle 0                       options right after the plain request

For each option: time to the first token and the longest interval of the first use, medians of ten later uses of the
same size, and their ratios. Options come in the order of the table, each with prompts of its own; `--idle` seconds pass
after the plain request, in which an engine prepares what it has not prepared at its start. An option with a ratio above
1.3 and more than 2 ms lost is marked. With `--events` compilations are listed at the option that caused them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

from fresh_process import Compilations, environment, since_start

NUM_LATER = 10
PROMPT_TOKENS = 48
NUM_TOKENS = 24  # of an answer: more than the steps after which a head is captured
MOST_RATIO, LEAST_LOSS = 1.3, 0.002  # seconds


class Case(NamedTuple):
    """Requests sent together: the options of each, and the number of its prompt's tokens."""

    name: str
    options: Sequence[dict[str, Any]]
    prompt_tokens: int = PROMPT_TOKENS


def cases(has_text: bool, longest: int) -> list[Case]:
    """The options, one case each, then together."""
    single: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "temperature": {"temperature": 0.8},
        "temperature below 0.02": {"temperature": 0.01},
        "top_k": {"top_k": 40},
        "top_p": {"top_p": 0.9},
        "min_p": {"min_p": 0.05},
        "repetition_penalty": {"repetition_penalty": 1.1},
        "frequency_penalty, top_p": {"frequency_penalty": 0.5, "top_p": 0.9},
        "logprobs=0": {"logprobs": 0},
        "logprobs=5": {"logprobs": 5},
        "logprobs=20": {"logprobs": 20},
        "logprobs=40": {"logprobs": 40},
        "penalty and logprobs": {"repetition_penalty": 1.1, "logprobs": 5},
        "penalty, logprobs, top_k": {"repetition_penalty": 1.1, "logprobs": 5, "top_k": 40},
        "logit_bias": {"logit_bias": {7: 2.0, 9: -2.0}},
        "logit_bias, penalty, logprobs": {"logit_bias": {7: 2.0}, "presence_penalty": 0.3, "logprobs": 2},
        "allowed_token_ids": {"allowed_token_ids": tuple(range(10, 400))},
        "min_tokens": {"min_tokens": 12},
        "logits_processors": {"logits_processors": (_same,)},
        "prompt_logprobs": {"prompt_logprobs": 5},
        "n=4": {"n": 4},
        "embed": {"embeds": True},
    }
    if has_text:
        from nanovllm import StructuredOutput

        def schema(number: int) -> StructuredOutput:  # another form each time, since a known one is not compiled again
            name = {"type": "string", "maxLength": 40 + number}
            return StructuredOutput(json_schema={"type": "object", "properties": {"name": name}, "required": ["name"]})

        single["bad_words"] = {"bad_words": ("the", "of the")}
        single["stop"] = {"stop": ("\n\n\n",)}
        form = {"structured_output": schema, "ignore_eos": False}
        single["JSON schema"] = form
        single["JSON schema, penalty, top_p"] = form | {"repetition_penalty": 1.1, "top_p": 0.9}
        single["regex, greedy"] = form | {
            "structured_output": lambda number: StructuredOutput(regex=f"[a-z ]{{60}}{number}"), "temperature": 0.0,
        }  # fmt: skip
    found = [Case(name, [options]) for name, options in single.items()]
    drawn = [options for options in single.values() if "embeds" not in options and "n" not in options]
    found += [
        Case("8 plain", [{}] * 8),
        Case("8 with penalties", [{"repetition_penalty": 1.1}] * 8),
        Case("8 with logprobs", [{"logprobs": 5}] * 8),
        Case("8 mixed", [{}, {"top_p": 0.9}, {"repetition_penalty": 1.1}, {"logprobs": 5}] * 2),
        Case("every option at once", drawn),
        Case("40 plain", [{}] * 40),
        Case("one long prompt", [{}], longest),
        Case("16 short prompts", [{}] * 16, 17),
        Case("3 prompts of 500", [{}] * 3, min(500, longest)),
    ]
    return found


def _same(token_ids: list[int], logits: Any) -> Any:
    return logits


class Use(NamedTuple):
    """Seconds to the first token, and the longest interval, of the slowest of a case's requests."""

    ttft: float
    itl: float


class Client:
    """Sends cases to an engine; prompts are random, none twice."""

    def __init__(self, llm: Any) -> None:
        self._llm, self._random, self._number = llm, random.Random(0), itertools.count()

    async def use(self, case: Case) -> Use:
        uses = await asyncio.gather(*(self._request(options, case.prompt_tokens) for options in case.options))
        return Use(max(use.ttft for use in uses), max(use.itl for use in uses))

    async def _request(self, options: dict[str, Any], prompt_tokens: int) -> Use:
        from nanovllm import SamplingParams

        prompt = [self._random.randrange(3, self._llm.num_logits) for _ in range(prompt_tokens)]
        begin = time.perf_counter()
        if options.get("embeds"):
            await self._llm.embed(prompt)
            return Use(time.perf_counter() - begin, 0.0)
        number = next(self._number)
        own = {name: value(number) if callable(value) else value for name, value in options.items()}
        params = SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": number} | own)
        begin = time.perf_counter()
        times = [begin]
        async with aclosing(self._llm.generate(prompt, params, output_kind="delta")) as outputs:
            async for output in outputs:
                times.append(time.perf_counter())
                if output.error:
                    raise RuntimeError(output.error)
        intervals = [after - before for before, after in itertools.pairwise(times[1:])]
        return Use(times[1] - begin, max(intervals, default=0.0))


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from random_models import NoText

    from nanovllm import AsyncLLM

    own = {} if arguments.with_text else {"tokenizer": NoText(), "dtype": "bfloat16"}
    llm = await asyncio.to_thread(AsyncLLM, arguments.model, prepares_when_idle=arguments.idle > 0, **own)
    compilations = Compilations()
    if arguments.events:
        compilations.watch()
    rows = []
    async with llm:
        client = Client(llm)
        begin = since_start()
        plain = await client.use(Case("plain", [{}]))
        print(f"engine after {begin:.1f} s, a plain request's first token {plain.ttft * 1e3:.1f} ms later", flush=True)
        await asyncio.sleep(arguments.idle)
        longest = min(llm.config.max_model_len - NUM_TOKENS - 1, arguments.longest)
        print(f"{'ms':32} {'TTFT':>8} {'later':>8} {'ratio':>6}   {'ITL max':>8} {'later':>8} {'ratio':>6}", flush=True)
        for case in cases(arguments.with_text, longest):
            if arguments.cases and not any(part in case.name for part in arguments.cases):
                continue
            begin = since_start()
            first = await client.use(case)
            later = [await client.use(case) for _ in range(NUM_LATER)]
            rows.append(row := _row(case, first, later))
            print(_line(row), flush=True)
            if arguments.events:
                compilations.show(begin, is_brief=True)
    return rows


def _row(case: Case, first: Use, later: list[Use]) -> dict[str, Any]:
    ttft, itl = (statistics.median(values) for values in zip(*later, strict=True))
    lost = [(first.ttft, ttft), (first.itl, itl)]
    is_slow = any(one > MOST_RATIO * median and one - median > LEAST_LOSS for one, median in lost)
    return {"case": case.name, "ttft": first.ttft, "later_ttft": ttft, "itl": first.itl, "later_itl": itl,
            "is_slow": is_slow}  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    def part(first: float, later: float) -> str:
        return f"{first * 1e3:8.1f} {later * 1e3:8.1f} {first / later if later else 0.0:6.2f}"

    figures = part(row["ttft"], row["later_ttft"]), part(row["itl"], row["later_itl"])
    return f"{row['case']:32} {figures[0]}   {figures[1]}{'  <-- slow' if row['is_slow'] else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help="of random weights, see random_models.py; without text")
    parser.add_argument("--model", help="a folder, in place of the default model")
    parser.add_argument("--caches", nargs="+", choices=("empty", "warm", "usual"), default=["warm"])
    parser.add_argument("--idle", type=float, default=5.0, help="seconds after the plain request; 0: nothing is idle")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of the long prompt, at most")
    parser.add_argument("--cases", nargs="+", help="only cases with one of these texts in their names")
    parser.add_argument("--events", action="store_true", help="list compilations")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--with-text", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        rows = asyncio.run(measure(arguments))
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        return
    run_all(arguments)


def run_all(arguments: argparse.Namespace) -> None:
    """A process for each state of the caches; `warm` are those that the process before filled."""
    from random_models import checkpoint

    from nanovllm.model.default_model import ensure_default_model

    model = arguments.model or (checkpoint(arguments.shape) if arguments.shape else ensure_default_model())
    given = ["--here", "--model", str(model), "--idle", str(arguments.idle), "--longest", str(arguments.longest)]
    given += ["--with-text"] * (not arguments.shape) + ["--events"] * arguments.events
    given += ["--cases", *arguments.cases] if arguments.cases else []
    given += ["--json", str(arguments.json)] if arguments.json else []
    with tempfile.TemporaryDirectory(prefix="nanovllm-caches-") as root:
        caches: Path | None = None
        for number, state in enumerate(arguments.caches):
            if state == "empty" or (state == "warm" and caches is None):
                caches = Path(root) / str(number)
            folder = None if state == "usual" else caches
            command = [sys.executable, "-u", str(Path(__file__).resolve()), *given]
            if state == "warm" and not any(caches.glob("*")):  # filled by a process that is not shown
                subprocess.run([*command, "--idle", "0"], env=environment(folder), check=True, capture_output=True)
            print(f"\n==== {state} caches, {arguments.idle:g} s idle", flush=True)
            subprocess.run(command, env=environment(folder), check=True)


if __name__ == "__main__":
    main()
