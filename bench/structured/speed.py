"""Tokens per second with and without structure in one run, and what a schema adds to the first token.

    python bench/structured/speed.py [--model FOLDER] [--rows 64] [--rounds 3]

All requests have prompts of W and the same number of new tokens: a schema or a regex without a near end keeps the
structured ones as long. Rounds with and without structure alternate; the ratio is that of the best of each. Prints
JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from typing import Any

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


def tokens_per_second(llm: LLM, prompts: list[list[int]], params: SamplingParams, clock: Callable[[], float]) -> float:
    begin = clock()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (clock() - begin)


def first_token_seconds(llm: LLM, params: SamplingParams, prompt: list[int], clock: Callable[[], float]) -> float:
    llm.reset_prefix_cache()
    begin = clock()
    stream = llm.stream(prompt, params)
    next(stream)
    seconds = clock() - begin
    stream.close()  # type: ignore[attr-defined]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=None, help="cut prompts to this many tokens")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--cpu-time", action="store_true", help="by seconds of the processor, on a machine with other load"
    )
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    prompts = [request.prompt_token_ids[: options.prompt_tokens] for request in w().requests[: options.rows]]
    common: dict[str, Any] = {"temperature": 0.0, "max_tokens": options.new_tokens}
    forms = {
        "json": StructuredOutput(json_schema={"type": "array", "items": NESTED, "minItems": 1000}),
        "free text": StructuredOutput(regex=r"(?s:.){2000,}"),
    }
    best: dict[str, float] = {}
    first: dict[str, float] = {}
    with LLM(options.model, enable_prefix_caching=False) as llm:
        plain = SamplingParams(ignore_eos=True, **common)
        kinds = {"plain": plain} | {
            name: SamplingParams(structured_output=form, **common) for name, form in forms.items()
        }
        tokens_per_second(llm, prompts[:4], kinds["json"], clock)  # compiles, reads the tokenizer
        for _ in range(options.rounds):
            for name, params in kinds.items():
                best[name] = max(best.get(name, 0.0), tokens_per_second(llm, prompts, params, clock))
        for number in range(9):
            new = {"type": "object", "properties": {f"key{number}": NESTED, "other": NESTED}}
            form = StructuredOutput(json_schema=new)
            for name, params in (
                ("plain", plain),
                ("new schema", SamplingParams(structured_output=form, **common)),
                ("known schema", SamplingParams(structured_output=form, **common)),
            ):
                seconds = first_token_seconds(llm, params, prompts[0], clock)
                first[name] = min(first.get(name, seconds), seconds)
    result = {
        "processor": platform.processor() or platform.machine(),
        "rows": len(prompts),
        "tokens per second": {name: round(value, 1) for name, value in best.items()},
        "ratio": {name: round(best[name] / best["plain"], 3) for name in forms},
        "first token, added ms": {
            name: round((first[name] - first["plain"]) * 1e3, 2) for name in ("new schema", "known schema")
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
