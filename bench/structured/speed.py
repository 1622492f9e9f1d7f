"""Seconds a step with and without structure, in turn in one process, and what a schema adds to the first token.

    python bench/structured/speed.py [--model FOLDER | --shape 0.6b] [--rows 64] [--rounds 3] [--cpu-time]

All requests have the same number of new tokens: no form has a near end. On a CPU the prompts are W's. A step is a
long run less a short one, the ratio that of the medians. `--shape 0.6b` is for a GPU: random weights in the shape of
Qwen3-0.6B and a tokenizer of its size. Prints JSON.
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


# None of them may end early.
FORMS = {
    "json": StructuredOutput(json_schema={"type": "array", "items": NESTED, "minItems": 1000}),
    "regex": StructuredOutput(regex=r"([a-z]{1,12},[0-9]{1,6}(\.[0-9]{2})?\n){2000,}"),
    "free text": StructuredOutput(regex=r"(?s:.){2000,}"),
}


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
    make: Callable[[int], SamplingParams],
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
    parser.add_argument("--temperature", type=float, default=0.0)
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
    common: dict[str, Any] = {"temperature": options.temperature, "seed": 0}
    steps: dict[str, list[float]] = {}
    with LLM(model, enable_prefix_caching=False, **({"max_model_len": 2048} if options.shape else {})) as llm:

        def maker(form: StructuredOutput | None) -> Callable[[int], SamplingParams]:
            return lambda count: SamplingParams(
                structured_output=form, ignore_eos=form is None, max_tokens=count, **common
            )

        makers = {"plain": maker(None)} | {name: maker(form) for name, form in FORMS.items()}
        for make in makers.values():  # compiles, reads the tokenizer, captures what it needs
            llm.generate(prompts, make(24), use_tqdm=False)
        for _ in range(options.rounds):
            for name, make in makers.items():
                steps.setdefault(name, []).append(step_seconds(llm, prompts, make, options.new_tokens, clock))
        plain = makers["plain"](options.new_tokens)
        first = added_to_first_token(llm, plain, common | {"max_tokens": options.new_tokens}, prompts[0], clock)
    middle = {name: statistics.median(each) for name, each in steps.items()}
    result = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "rows": len(prompts),
        "step, ms": {name: [round(each * 1e3, 3) for each in found] for name, found in steps.items()},
        "speed by unconstrained": {name: round(middle["plain"] / middle[name], 3) for name in FORMS},
        "first token, added ms": first,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
