"""Requests of the traffic benchmark: log-normal lengths, and every sampling option by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nanovllm.tools.workloads.workloads import LOWEST_ID, Workload, at_once

TEMPERATURE = 0.6
WARM = {"temperature": 0.8}
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.2}
NUCLEUS = {"top_k": 50, "top_p": 0.9}

# Sampling option -> parameters of every request.
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": WARM,
    "top_k": WARM | {"top_k": 50},
    "top_p": WARM | {"top_p": 0.9},
    "top_k + top_p": WARM | NUCLEUS,
    "min_p": WARM | {"min_p": 0.05},
    "log-probabilities": WARM | {"logprobs": 5},
    "penalties": WARM | PENALTIES,
    "penalties + log-probabilities": WARM | PENALTIES | {"logprobs": 5},
    "one in 8 with filters": WARM,  # see `params_of_option`
}
FILTERED = "one in 8 with filters"


def params_of_option(option: str, count: int, num_tokens: int) -> list[dict[str, Any]]:
    """Return the sampling parameters of `count` requests under one option of `OPTIONS`."""
    base = OPTIONS[option] | {"ignore_eos": True, "max_tokens": num_tokens}
    return [base | NUCLEUS if option == FILTERED and number % 8 == 0 else base for number in range(count)]


def params_of(workload: Workload, temperature: float = TEMPERATURE) -> list[dict[str, Any]]:
    base = {"temperature": temperature, "ignore_eos": True}
    return [base | {"max_tokens": request.num_output_tokens} for request in workload.requests]


def lengths(generator: np.random.Generator, count: int, median: int, longest: int) -> list[int]:
    """Draw log-normal lengths; sigma is such that the longest of the draws is `longest`."""
    normal = generator.standard_normal(count)
    sigma = math.log(longest / median) / normal.max()
    return np.maximum(1, np.rint(median * np.exp(sigma * normal))).astype(int).tolist()


def lognormal(
    *, requests: int = 400, prompt: int = 220, longest_prompt: int = 6000, output: int = 180,
    longest_output: int = 1500, vocab: int = 10_000, seed: int = 0,
) -> Workload:  # fmt: skip
    """Random tokens, all requests at once, with log-normal lengths of prompts and outputs.

    Args:
        prompt, output: median tokens in and out.
        longest_prompt, longest_output: tokens of the longest.
    """
    generator = np.random.default_rng([seed, 2])
    prompt_lengths = lengths(generator, requests, prompt, longest_prompt)
    output_lengths = lengths(generator, requests, output, longest_output)
    prompts = [generator.integers(LOWEST_ID, vocab, length).tolist() for length in prompt_lengths]
    return at_once("lognormal", prompts, output_lengths, requests=requests, prompt=prompt, output=output, seed=seed)
