"""`prompt_logprobs_start`: what comes before is found in the prefix cache, what is reported stays the same."""

import random

import pytest

from nanovllm import SamplingParams
from tests.support.llms import POOLS, check_engine, generate, open_llm
from tests.support.logprobs import assert_right
from tests.support.tiny_models import random_prompts, tiny_model


def requests():
    """Prompts of one beginning, each with its own start, every option that may meet it, and neighbours without."""
    choice = random.Random(3)
    shared = random_prompts(1, low=70, high=70, seed=7)[0]
    prompts = [shared + own for own in random_prompts(16, low=1, high=60, seed=8)]
    kinds = [
        {"temperature": 0.0},
        {"logprobs": 2, "seed": 3},
        {"n": 2, "seed": 4, "repetition_penalty": 1.2},
        {"prompt_logprobs": None, "prompt_logprobs_start": 0, "temperature": 0.0},
    ]
    params = []
    for number, prompt in enumerate(prompts):
        start = choice.choice([1, 15, 16, 17, 69, 70, len(prompt) - 1])
        options = {"prompt_logprobs": number % 3, "prompt_logprobs_start": start} | kinds[number % len(kinds)]
        params.append(SamplingParams(max_tokens=12, **options))
    return prompts, params


QUICK = {("roomy pool", False), ("small chunks", False), ("tiny pool", True)}
SLOW = {(pool, overlap) for pool in POOLS for overlap in (False, True)} - QUICK


@pytest.mark.costly
@pytest.mark.parametrize(
    "pool, overlap", [*sorted(QUICK), *(pytest.param(*case, marks=pytest.mark.slow) for case in sorted(SLOW))]
)
def test_reported_rows_are_the_log_softmax_of_transformers(pool, overlap):
    model = tiny_model("qwen3")
    prompts, params = requests()
    with open_llm(model, overlap=overlap, **POOLS[pool]) as llm:
        for _ in ("cold", "warm"):
            outputs = generate(llm, prompts, params)
            check_engine(llm)
            for output, wanted in zip(outputs, params, strict=True):
                assert_right(model, output, wanted)
        assert any(output.num_cached_tokens >= 64 for output in outputs if output.prompt_logprobs is not None)
        assert (llm.stats().num_preemptions > 0) == (pool == "tiny pool")


@pytest.mark.parametrize("start, cached", [(0, 0), (1, 0), (16, 0), (17, 16), (48, 32), (49, 48), (99, 96)])
def test_a_hit_ends_before_the_row_that_gives_the_first_reported_token(start, cached):
    prompt = random_prompts(1, low=100, high=100)[0]
    with open_llm() as llm:
        generate(llm, prompt, SamplingParams(max_tokens=1))
        before = llm.stats()
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=start)
        (output,) = generate(llm, prompt, params)
        after = llm.stats()
    assert output.num_cached_tokens == cached
    assert output.prompt_logprobs[: max(1, start)] == [None] * max(1, start)
    assert None not in output.prompt_logprobs[max(1, start) :]
    assert after.prefix_cache_hits - before.prefix_cache_hits == cached
    assert after.prefix_cache_queries - before.prefix_cache_queries == max(0, start - 1)


def test_a_shared_beginning_is_computed_once_for_all_continuations():
    shared = random_prompts(1, low=96, high=96, seed=1)[0]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=97)
    with open_llm() as llm:
        prompts = [[*shared, number, 5, 6] for number in range(8)]
        outputs = generate(llm, prompts, params)
        assert [output.num_cached_tokens for output in outputs] == [0] + [96] * 7
        assert llm.stats().num_scheduled_tokens == 99 + 7 * 3


def test_a_start_behind_the_prompt_is_refused():
    params = SamplingParams(prompt_logprobs=0, prompt_logprobs_start=4)
    cut = SamplingParams(prompt_logprobs=0, prompt_logprobs_start=4, truncate_prompt_tokens=3)
    with open_llm() as llm:
        with pytest.raises(ValueError, match="start is 4, but the prompt has 4 tokens; it must be at most 3"):
            generate(llm, [1, 2, 3, 4], params)
        with pytest.raises(ValueError, match="start is 4, but the prompt has 3 tokens; it must be at most 2"):
            generate(llm, [1, 2, 3, 4, 5], cut)
