"""`LLM`: prefix cache hits, what `stats` counts of them, priorities and limits."""

import pytest

from nanovllm import LLM
from tests.support.llms import generate, greedy, open_llm, shared_llm, token_ids
from tests.support.tiny_models import random_prompts, tiny_model


def test_a_second_call_finds_the_prompt_in_the_prefix_cache():
    llm, prompt = open_llm(), random_prompts(1, low=100, high=100)[0]
    assert [generate(llm, prompt)[0].num_cached_tokens for _ in range(2)] == [0, 96]


@pytest.mark.costly
@pytest.mark.parametrize("length, cached", [(15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32)])
def test_a_fully_cached_prompt_still_computes_its_last_token(length, cached):
    llm, prompt = open_llm(), random_prompts(1, low=length, high=length)[0]
    cold, warm = generate(llm, prompt)[0], generate(llm, prompt)[0]
    assert warm.num_cached_tokens == cached
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def test_a_follow_up_finds_the_generated_tokens_in_the_prefix_cache_too():
    llm, prompt = open_llm(), random_prompts(1, low=20, high=20)[0]
    (first,) = generate(llm, prompt, greedy(30))
    (follow_up,) = generate(llm, prompt + first.outputs[0].token_ids + [5, 6])
    assert follow_up.num_cached_tokens == 48  # 49 tokens are computed: the last one drawn has no KV yet


def test_requests_of_one_call_share_a_prefix_that_the_call_itself_computes():
    llm, shared = open_llm(), random_prompts(1, low=64, high=64)[0]
    outputs = generate(llm, [[*shared, n] for n in range(8)])
    assert [output.num_cached_tokens for output in outputs] == [0] + [64] * 7


def test_a_prefix_is_shared_only_within_one_cache_salt():
    llm, prompt = open_llm(), random_prompts(1, low=100, high=100)[0]
    generate(llm, prompt, cache_salt="alice")
    cached = [o.num_cached_tokens for o in generate(llm, [prompt, prompt], cache_salt=["bob", "alice"])]
    assert cached == [0, 96]


def test_reset_prefix_cache_forgets_every_prefix():
    llm, prompt = open_llm(), random_prompts(1, low=100, high=100)[0]
    generate(llm, prompt)
    llm.reset_prefix_cache()
    assert llm.stats().num_findable_blocks == 0
    assert generate(llm, prompt)[0].num_cached_tokens == 0


def test_without_prefix_caching_nothing_is_found():
    llm, prompt = open_llm(enable_prefix_caching=False), random_prompts(1, low=100, high=100)[0]
    assert [generate(llm, prompt)[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_stats_count_prefix_cache_queries_and_hits_once_per_request():
    llm, prompt = open_llm(), random_prompts(1, low=100, high=100)[0]
    generate(llm, prompt)
    generate(llm, prompt)
    stats = llm.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.prefix_cache_evictions) == (200, 96, 0)


def test_stats_count_steps_and_scheduled_tokens():
    llm = open_llm(enable_prefix_caching=False)
    generate(llm, [[5] * 10, [6] * 20], greedy(4))
    stats = llm.stats()
    assert (stats.num_steps, stats.num_failed_steps) == (4, 0)
    assert stats.num_scheduled_tokens == 10 + 20 + 2 * 3


def test_stats_count_blocks_taken_for_other_content_as_evictions():
    llm = open_llm(max_model_len=64, num_kv_blocks=6)
    for prompt in random_prompts(4, low=40, high=60):
        generate(llm, prompt, greedy(2))
    assert llm.stats().prefix_cache_evictions > 0


def test_a_lower_priority_number_runs_first():
    llm = open_llm(max_num_seqs=1)
    outputs = generate(llm, random_prompts(3), priority=[2, 0, 1])
    order = sorted(range(3), key=lambda number: outputs[number].metrics.finished_time)
    assert order == [1, 2, 0]


def test_max_num_seqs_bounds_the_sequences_that_run_at_once():
    llm, seen = open_llm(max_num_seqs=2), []
    execute = llm._engine.model_runner.execute
    llm._engine.model_runner.execute = lambda batch: (seen.append(len(batch.entries)), execute(batch))[1]
    generate(llm, random_prompts(7))
    assert max(seen) == 2


def test_setting_only_max_num_batched_tokens_works():
    llm = LLM(tiny_model(num_layers=1), enforce_eager=True, max_num_batched_tokens=128, kv_cache_memory_bytes=2**28)
    prompts = random_prompts(12, low=1, high=300)
    assert llm.config.max_num_batched_tokens == 128
    assert token_ids(generate(llm, prompts)) == token_ids(generate(shared_llm(), prompts))


def test_the_config_has_the_resolved_options():
    config = open_llm().config
    assert (config.block_size, config.num_kv_blocks, config.max_model_len) == (16, 129, 512)
    assert None not in (config.max_num_batched_tokens, config.max_num_seqs, config.long_prefill_token_threshold)
