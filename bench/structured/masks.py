"""Microseconds of the processor that a mask and a consumed token take on the host, for forms that leave text free.

    python bench/structured/masks.py [--vocab-size 151936] [--slices own|library|none]

Random walks within each grammar, on a tokenizer whose words are those of the standard library's code: a vocabulary of
151,936 is as large as Qwen3's. The first walk meets new states, the second those that are known. Prints a line of JSON
for each form: medians, means and 99th percentiles.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
from shapes import wide_tokenizer

from nanovllm import StructuredOutput
from nanovllm.requests.grammar.compiler import GrammarCompiler

FORMS = {
    "any text": StructuredOutput(regex=r"(?s:.)*"),
    "any 2,000 characters": StructuredOutput(regex=r"(?s:.){2000,}"),
    "a line of up to 500": StructuredOutput(regex=r"[^\n]{0,500}"),
    "lines of values, counted": StructuredOutput(regex=r"([a-z]{1,12},[0-9]{1,6}(\.[0-9]{2})?\n){2000,}"),
    "JSON strings": StructuredOutput(json_schema={"type": "array", "items": {"type": "string"}, "minItems": 50}),
    "JSON string of up to 2,000": StructuredOutput(json_schema={"type": "string", "maxLength": 2000}),
}


def walk(matchers: list[Any], num_steps: int, eos: int, chance: np.random.Generator) -> tuple[list[int], list[int]]:
    """Nanoseconds of each mask, and of each token consumed."""
    masks, tokens = [], []
    for _ in range(num_steps):
        for matcher in matchers:
            words = np.empty(matcher.num_words, np.int32)
            begin = time.thread_time_ns()
            matcher.fill(words)
            masks.append(time.thread_time_ns() - begin)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            allowed = allowed[allowed != eos]
            if len(allowed):
                token_id = int(allowed[chance.integers(len(allowed))])
                begin = time.thread_time_ns()
                matcher.consume(token_id)
                tokens.append(time.thread_time_ns() - begin)
    return masks, tokens


def figures(nanoseconds: list[int]) -> dict[str, float]:
    values = np.array(nanoseconds) / 1e3
    found = {"median": np.median(values), "mean": values.mean(), "p99": np.percentile(values, 99)}
    return {name: round(float(value), 1) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--slices", choices=("own", "library", "none"), default="own")
    options = parser.parse_args()
    tokenizer = wide_tokenizer(options.vocab_size)
    eos = tokenizer.eos_token_id
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [eos])
    if options.slices != "own":
        vocabulary = compiler.vocabulary
        slices = vocabulary.general_slices() if options.slices == "library" else []
        compiler.__dict__["vocabulary"] = vocabulary.with_slices(slices)
    for name, form in FORMS.items():
        for seed, states in enumerate(("new", "known")):
            matchers = [compiler.matcher(form).copy() for _ in range(options.rows)]
            masks, tokens = walk(matchers, options.steps, eos, np.random.default_rng(seed))
            found = {"mask, us": figures(masks), "token, us": figures(tokens)}
            print(json.dumps({"form": name, "states": states} | found), flush=True)


if __name__ == "__main__":
    main()
