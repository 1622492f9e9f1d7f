"""What a step pays for sampling: `pytest bench/micro/test_bench_sampler.py`. Times are reported, never asserted.

A vocabulary of 152,000 tokens; 256 requests on a GPU, if there is one, and 16 on a CPU. extra_info holds microseconds
per request and step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from nanovllm.fast.fast_draws import fast_sampler
from nanovllm.features.logprobs.logprobs import StepLogprobs
from nanovllm.features.request_options import RequestOptions
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.sequence import NewRequest, Sequence

VOCAB_SIZE = 152_000
NUM_OUTPUT_TOKENS = 200
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH = 256 if DEVICE.type == "cuda" else 16

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy with logprobs": {"temperature": 0.0, "logprobs": 5},
    "temperature": {},
    "top-k": {"top_k": 50},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "bad words": {"bad_words": ["some word"]},
    "processor": {"logits_processors": lambda token_ids, row: row},
    "all": {
        "repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {5: 1.0},
        "bad_words": ["some word"], "top_k": 50, "top_p": 0.9, "min_p": 0.05, "logprobs": 5,
    },
}  # fmt: skip


def requests(options: dict[str, Any]) -> list[Sequence]:
    sequences = []
    for number in range(BATCH):
        generator = torch.Generator().manual_seed(number)
        prompt, output = torch.randint(VOCAB_SIZE, (2, NUM_OUTPUT_TOKENS), generator=generator).tolist()
        words = ((prompt[0],), (prompt[1], prompt[2])) if "bad_words" in options else ()
        sequence = Sequence(
            NewRequest(str(number), prompt, SamplingParams(**options), bad_words=words),
            arrival=number,
            max_model_len=4096,
            seed=number,
        )
        sequence.token_ids.extend(output)
        sequences.append(sequence)
    return sequences


@pytest.mark.parametrize("kind", KINDS)
def test_sampling(benchmark: BenchmarkFixture, kind: str) -> None:
    # Of a language model's steepness, so that a nucleus is as small as it is there.
    logits = 5 * torch.randn(BATCH, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    logits = logits.to(DEVICE, torch.bfloat16 if DEVICE.type == "cuda" else torch.float32)
    sequences, sampler = requests(KINDS[kind]), fast_sampler(compiles=DEVICE.type == "cuda", build_stage=RequestOptions)
    positions = [len(sequence.token_ids) for sequence in sequences]

    def copy_of_logits() -> tuple[tuple[torch.Tensor], dict[str, Any]]:
        return (logits.clone(),), {}  # since sampling overwrites them

    def step(rows: torch.Tensor) -> None:
        with torch.no_grad():
            sampler.sample(rows, sequences, positions, None, report := StepLogprobs())
            report.to_host()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()

    benchmark.pedantic(step, setup=copy_of_logits, rounds=20, warmup_rounds=3)
    benchmark.extra_info["device"] = str(DEVICE)
    benchmark.extra_info["us per request"] = round(benchmark.stats.stats.median * 1e6 / BATCH, 1)
