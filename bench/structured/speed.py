"""Seconds a step with and without structure, in turn in one process, and what a schema adds to the first token.

    python bench/structured/speed.py [--model FOLDER | --shape 0.6b] [--rows 64] [--rounds 3] [--cpu-time]
        [--temperature 0 0.8] [--split]

All requests have the same number of new tokens: no form has a near end. On a CPU the prompts are W's. A step is a
long run less a short one, the ratio that of the medians. `--shape 0.6b` is for a GPU: random weights in the shape of
Qwen3-0.6B and a tokenizer of its size. `--split` prints where the host's time of a step goes, by one more run of each
form with a clock around its parts. Prints a line of JSON for each temperature.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from host_split import split_of

from nanovllm import LLM, SamplingParams, StructuredOutput
from nanovllm.model.default_model import DEFAULT_MODEL
from nanovllm.tools.workloads.workloads import w

NESTED = {
    "type": "object",
    "properties": {
        "items": {"type": "array", "maxItems": 50, "items": {
            "type": "object", "required": ["id", "kind", "price"],
            "properties": {
                "id": {"type": "integer", "minimum": 1}, "kind": {"enum": ["book", "film", "song"]},
                "price": {"type": "number", "minimum": 0}, "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
            },
        }},
    },
    "required": ["items"],
}  # fmt: skip


RECORD = {  # facts drawn from a text
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60}, "born": {"type": "string", "format": "date"},
        "email": {"type": "string", "format": "email"}, "score": {"type": "number", "minimum": 0, "maximum": 100},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5}, "is_member": {"type": "boolean"},
        "notes": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["name", "born", "email", "score", "tags", "is_member", "notes"],
    "additionalProperties": False,
}  # fmt: skip
CALL = {  # of one of several tools
    "anyOf": [
        {
            "type": "object",
            "properties": {"tool": {"const": name}, "arguments": {
                "type": "object", "properties": {key: {"type": kind} for key, kind in arguments.items()},
                "required": list(arguments), "additionalProperties": False,
            }},
            "required": ["tool", "arguments"], "additionalProperties": False,
        }
        for name, arguments in {
            "search": {"query": "string", "limit": "integer"}, "read_file": {"path": "string"},
            "weather": {"city": "string", "days": "integer", "is_metric": "boolean"}, "run": {"command": "string"},
        }.items()
    ]
}  # fmt: skip


def many(schema: dict[str, Any], least: int = 1000) -> StructuredOutput:
    return StructuredOutput(json_schema={"type": "array", "items": schema, "minItems": least})


# None of them may end early.
FORMS = {
    "json": many(NESTED),
    "records": many(RECORD),
    "calls": many(CALL),
    "regex": StructuredOutput(regex=r"([a-z]{1,12},[0-9]{1,6}(\.[0-9]{2})?\n){2000,}"),
    "free text": StructuredOutput(regex=r"(?s:.){2000,}"),
}
SEVERAL = [many(schema, 1001 + number) for number, schema in enumerate([NESTED, RECORD, CALL] * 3)]  # beside each other


def first_token_seconds(llm: LLM, params: SamplingParams, prompt: list[int], clock: Callable[[], float]) -> float:
    llm.reset_prefix_cache()
    begin = clock()
    stream = llm.stream(prompt, params)
    next(stream)
    seconds = clock() - begin
    stream.close()  # type: ignore[attr-defined]
    return seconds


def step_seconds(
    llm: LLM,
    prompts: list[list[int]],
    make: Callable[[int], SamplingParams | list[SamplingParams]],
    new_tokens: int,
    clock: Callable[[], float],
) -> float:
    """Of a step that decodes all prompts: a long run less a short one, so that prompts and start do not count."""
    seconds = []
    for count in (new_tokens, new_tokens // 4):
        begin = clock()
        outputs = llm.generate(prompts, make(count), use_tqdm=False)
        seconds.append(clock() - begin)
        for output in outputs:
            if output.error or len(output.outputs[0].token_ids) != count:
                raise RuntimeError(output.error or "an output has another length than it was asked for")
    return (seconds[0] - seconds[1]) / (new_tokens - new_tokens // 4)


def added_to_first_token(
    llm: LLM, plain: SamplingParams, common: dict[str, Any], prompt: list[int], clock: Callable[[], float]
) -> dict[str, float]:
    """Milliseconds by which a schema that comes for the first time, and again, delays a request's first token."""
    seconds: dict[str, list[float]] = {}
    for number in range(9):
        form = StructuredOutput(json_schema={"type": "object", "properties": {f"key{number}": NESTED, "other": NESTED}})
        structured = SamplingParams(structured_output=form, **common)
        for name, params in (("plain", plain), ("new schema", structured), ("known schema", structured)):
            seconds.setdefault(name, []).append(first_token_seconds(llm, params, prompt, clock))
    base = statistics.median(seconds.pop("plain"))
    return {name: round((statistics.median(each) - base) * 1e3, 2) for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--shape", help="random weights of this shape of bench/machines, 0.6b, and random prompts")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=None, help="cut prompts to this many tokens")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--split", action="store_true", help="the host's microseconds of a step, part by part")
    parser.add_argument(
        "--cpu-time", action="store_true", help="by seconds of the processor, on a machine with other load"
    )
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    if options.shape:
        from shapes import text_checkpoint

        model, length = text_checkpoint(options.shape), options.prompt_tokens or 128
        choice = random.Random(0)
        prompts = [[choice.randrange(500) for _ in range(length)] for _ in range(options.rows)]
    else:
        model = options.model
        prompts = [request.prompt_token_ids[: options.prompt_tokens] for request in w().requests[: options.rows]]
    with LLM(model, enable_prefix_caching=False, **({"max_model_len": 2048} if options.shape else {})) as llm:
        for temperature in options.temperature:
            print(json.dumps(measured(llm, prompts, temperature, options, clock)), flush=True)


def measured(
    llm: LLM, prompts: list[list[int]], temperature: float, options: argparse.Namespace, clock: Callable[[], float]
) -> dict[str, Any]:
    common: dict[str, Any] = {"temperature": temperature, "seed": 0}

    def maker(*forms: StructuredOutput | None) -> Callable[[int], list[SamplingParams]]:
        def make(count: int) -> list[SamplingParams]:
            each = [
                SamplingParams(structured_output=f, ignore_eos=f is None, max_tokens=count, **common) for f in forms
            ]
            return [each[row % len(each)] for row in range(len(prompts))]

        return make

    makers = {"plain": maker(None)} | {name: maker(form) for name, form in FORMS.items()} | {"several": maker(*SEVERAL)}
    for make in makers.values():  # compiles, reads the tokenizer, captures what it needs
        llm.generate(prompts, make(24), use_tqdm=False)
    steps: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, make in makers.items():
            steps.setdefault(name, []).append(step_seconds(llm, prompts, make, options.new_tokens, clock))
    split = {name: split_of(llm, prompts, make(options.new_tokens)) for name, make in makers.items() if options.split}
    plain = makers["plain"](options.new_tokens)[0]
    first = added_to_first_token(llm, plain, common | {"max_tokens": options.new_tokens}, prompts[0], clock)
    middle = {name: statistics.median(each) for name, each in steps.items()}
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "rows": len(prompts),
        "temperature": temperature,
        "step, ms": {name: [round(each * 1e3, 3) for each in found] for name, found in steps.items()},
        "times a plain step": {name: round(middle[name] / middle["plain"], 3) for name in makers},
        "split, us": split,
        "first token, added ms": first,
    }


if __name__ == "__main__":
    main()
