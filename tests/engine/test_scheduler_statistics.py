"""The scheduler: what its statistics count, and the states of a sequence."""

from tests.engine.loops import make_loop, prompt, two_that_outgrow_the_pool, waiting


def test_statistics_count_tokens_looked_up_and_found():
    loop = make_loop()
    loop.add(prompt(20), max_tokens=1)
    loop.drain()
    again = loop.add([*prompt(20), 6], max_tokens=1)
    loop.drain()
    stats = loop.scheduler.stats
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (20 + 21, 20)
    assert again.num_cached_tokens == 20
    assert (stats.num_steps, stats.num_scheduled_tokens) == (2, 20 + 1)


def test_a_request_that_comes_back_from_preemption_is_not_counted_again():
    loop = two_that_outgrow_the_pool()
    loop.drain()
    stats = loop.scheduler.stats
    assert stats.num_preemptions > 0
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (10 + 9, 0)
    assert [sequence.num_cached_tokens for sequence in loop.sequences] == [0, 0]


def test_a_request_that_comes_back_from_a_failed_step_is_not_counted_again():
    loop = make_loop()
    loop.add(prompt(20), max_tokens=2)
    loop.launch()
    loop.fail()
    loop.drain()
    assert loop.scheduler.stats.prefix_cache_queries == 20


def test_a_lookup_that_did_not_lead_to_admission_is_not_counted():
    loop = make_loop(num_kv_blocks=1 + 6, max_model_len=24)
    loop.add(prompt(20), max_tokens=4)
    loop.add(prompt(20, 1))
    loop.step()
    loop.step()
    assert waiting(loop) == ["1"]
    assert loop.scheduler.stats.prefix_cache_queries == 20


def test_tokens_found_in_the_middle_of_a_prompt_count_as_cached():
    loop = make_loop(max_num_batched_tokens=12, max_num_seqs=8, max_long_partial_prefills=4)
    for _ in range(3):
        loop.add(prompt(33), max_tokens=1)
    loop.drain()
    assert sum(sequence.num_cached_tokens for sequence in loop.sequences) == 2 * 32
    assert loop.scheduler.stats.prefix_cache_hits == 2 * 32


def test_states_are_what_they_say():
    loop = make_loop()
    sequence = loop.add(prompt(5), max_tokens=1)
    assert (sequence.is_running, sequence.is_finished) == (False, False)
    loop.launch()
    assert (sequence.is_running, sequence.is_finished) == (True, False)
    loop.read()
    assert (sequence.is_running, sequence.is_finished) == (False, True)
