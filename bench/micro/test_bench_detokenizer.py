"""What text costs: `pytest bench/micro/test_bench_detokenizer.py`. Times are reported, never asserted.

The default model's tokenizer. extra_info holds microseconds per token.
"""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from transformers import AutoTokenizer

from nanovllm.features.intake.token_texts import detokenizer_of
from nanovllm.models.default_model import ensure_default_model
from nanovllm.requests import decode

TEXTS = {
    "english": "The sea is calm tonight, the tide is full, the moon lies fair upon the straits. ",
    "chinese": "海上生明月。天涯共此时。情人怨遥夜。竟夕起相思。",  # several tokens to a character
}
NUM_TOKENS = 512


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ensure_default_model())


def tokens_of(tokenizer, text: str) -> list[int]:
    return tokenizer(TEXTS[text] * NUM_TOKENS)["input_ids"][:NUM_TOKENS]


@pytest.mark.parametrize("text", TEXTS)
def test_token_by_token(benchmark: BenchmarkFixture, tokenizer, text: str) -> None:
    token_ids = tokens_of(tokenizer, text)

    def stream() -> None:
        detokenizer = detokenizer_of(tokenizer)
        for token_id in token_ids:
            detokenizer.add(token_id)

    benchmark(stream)
    benchmark.extra_info["us per token"] = round(benchmark.stats.stats.median * 1e6 / NUM_TOKENS, 3)


@pytest.mark.parametrize("text", TEXTS)
def test_all_at_the_end(benchmark: BenchmarkFixture, tokenizer, text: str) -> None:
    benchmark(decode, tokenizer, tokens_of(tokenizer, text))
    benchmark.extra_info["us per token"] = round(benchmark.stats.stats.median * 1e6 / NUM_TOKENS, 3)
