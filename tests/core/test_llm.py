"""`LLM`: what goes in, what comes out, and that nothing but the request decides it."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nanovllm import LLM, EngineDeadError, ErrorKind, SamplingParams, StepError
from nanovllm.errors import DeviceError
from tests.support.tiny_models import VOCAB_SIZE, random_prompts, tiny_model, tiny_tokenizer

OPTIONS: dict[str, Any] = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 129, "max_model_len": 512}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SAMPLED = SamplingParams(seed=7, max_tokens=12)


def open_llm(model: Any = None, **options: Any) -> LLM:
    return LLM(model or tiny_model(), tokenizer=tiny_tokenizer(), **(OPTIONS | options))


@functools.cache
def shared_llm() -> LLM:
    """For tests that leave no trace which another would see, the prefix cache aside."""
    return open_llm()


def generate(llm: LLM, prompts: Any, params: Any = GREEDY, **options: Any) -> list[Any]:
    return llm.generate(prompts, params, use_tqdm=False, **options)


def token_ids(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def script(monkeypatch: pytest.MonkeyPatch, llm: LLM, text: str) -> list[int]:
    """Make the model say `text`, whatever it is asked; returns the text's tokens."""
    says = llm.tokenizer(text)["input_ids"]

    def sample(logits, sequences, positions, latest, report):
        places = [position - s.num_prompt_tokens for s, position in zip(sequences, positions, strict=True)]
        return torch.tensor([says[place % len(says)] for place in places])

    monkeypatch.setattr(llm._engine.model_runner.sampler, "sample", sample)
    return says


def fail_in_step(monkeypatch: pytest.MonkeyPatch, llm: LLM, number: int, error: BaseException) -> None:
    """Raise in the middle of the `number`-th step from now: its KV is written, its tokens are not sampled."""
    sampler, steps = llm._engine.model_runner.sampler, iter(range(1, 10_000))
    sample = sampler.sample

    def failing(*arguments):
        if next(steps) == number:
            raise error
        return sample(*arguments)

    monkeypatch.setattr(sampler, "sample", failing)


def assert_idle_and_whole(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert stats.num_free_blocks == stats.num_blocks
    llm._engine.check_integrity()


def ends_within(seconds: float, function: Callable[[], Any]) -> bool:
    """Whether the function returns or raises in time, run in a thread; it goes on in the background if not."""

    def run() -> None:
        try:
            function()
        except Exception:  # it ended, which is all that is asked
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


# ------------------------------------------------------------------------------------------------ prompts and outputs


def test_a_string_gives_one_output_with_its_text_decoded():
    (output,) = generate(shared_llm(), "The capital of France is")
    assert output.prompt == "The capital of France is"
    assert output.prompt_token_ids == tiny_tokenizer()("The capital of France is")["input_ids"]
    assert output.outputs[0].text == tiny_tokenizer().decode(output.outputs[0].token_ids, skip_special_tokens=True)


def test_a_list_of_token_ids_is_one_prompt_without_text():
    (output,) = generate(shared_llm(), [5, 6, 7])
    assert (output.prompt, output.prompt_token_ids) == (None, [5, 6, 7])


def test_token_id_zero_is_a_token_like_any_other():
    (output,) = generate(shared_llm(), [0])
    assert output.prompt_token_ids == [0]
    assert len(output.outputs[0].token_ids) == GREEDY.max_tokens


def test_strings_and_token_ids_mix_and_keep_their_order():
    prompts = ["one", [5, 6, 7], "three", [8] * 100]
    outputs = generate(shared_llm(), prompts)
    assert [output.prompt for output in outputs] == ["one", None, "three", None]
    assert [output.prompt_token_ids for output in outputs][1::2] == prompts[1::2]


def test_outputs_keep_their_order_when_the_later_prompt_ends_first():
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (20, 1, 10)]
    outputs = generate(shared_llm(), random_prompts(3), params)
    assert [len(ids) for ids in token_ids(outputs)] == [20, 1, 10]


def test_the_same_prompt_twice_in_a_call_is_answered_twice():
    first, second = generate(shared_llm(), ["again", "again"])
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert first.request_id != second.request_id


def test_each_prompt_follows_its_own_sampling_params():
    prompt = random_prompts(1)[0]
    greedy, sampled = generate(shared_llm(), [prompt] * 2, [GREEDY, SAMPLED])
    assert greedy.outputs[0].token_ids == token_ids(generate(shared_llm(), prompt, GREEDY))[0]
    assert sampled.outputs[0].token_ids == token_ids(generate(shared_llm(), prompt, SAMPLED))[0]
    assert greedy.outputs[0].token_ids != sampled.outputs[0].token_ids


def test_without_sampling_params_tokens_are_sampled_to_the_end_of_the_room():
    llm = open_llm(max_model_len=64)
    (output,) = llm.generate([3] * 40, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 24


def test_a_finished_output_says_so_in_every_field():
    (output,) = generate(shared_llm(), [5, 6, 7])
    completion = output.outputs[0]
    assert output.finished
    assert output.error is None
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)


def test_times_are_in_order_and_those_of_one_call_overlap():
    outputs = generate(shared_llm(), random_prompts(4))
    for metrics in (output.metrics for output in outputs):
        assert metrics.arrival_time <= metrics.first_token_time < metrics.finished_time
    assert max(o.metrics.first_token_time for o in outputs) < min(o.metrics.finished_time for o in outputs)


def test_a_numpy_array_among_the_prompts_is_a_list_of_token_ids():
    (output,) = generate(shared_llm(), [torch.tensor([5, 6, 7]).numpy()])
    assert output.prompt_token_ids == [5, 6, 7]


def test_without_a_tokenizer_token_ids_are_served_and_the_text_is_empty():
    llm = LLM(tiny_model(), **OPTIONS)
    (output,) = generate(llm, [5, 6, 7])
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == GREEDY.max_tokens


def test_the_answer_is_the_models_own_greedy_continuation():
    model = tiny_model()
    prompts = random_prompts(4, low=1, high=90)
    ours = token_ids(generate(open_llm(model), prompts))
    for prompt, answer in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        full = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert answer == full[0, len(prompt) :].tolist()


def test_the_progress_bar_shows_requests_and_tokens_a_second(capsys):
    shared_llm().generate(random_prompts(3), GREEDY, use_tqdm=True)
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "tokens/s" in shown


def test_without_the_progress_bar_nothing_is_printed(capsys):
    shared_llm().generate(random_prompts(3), GREEDY, use_tqdm=False)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


# ----------------------------------------------------------------------------------------------------- finish reasons


def greedy_answer(prompt: list[int], count: int = 12) -> list[int]:
    return token_ids(generate(shared_llm(), prompt, SamplingParams(temperature=0.0, max_tokens=count)))[0]


def test_max_tokens_ends_a_request_by_length():
    (output,) = generate(shared_llm(), [5, 6], SamplingParams(max_tokens=3, seed=0))
    assert len(output.outputs[0].token_ids) == 3
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("length", [1, 15, 16, 17, 62, 63])
def test_max_model_len_ends_a_request_by_length_whatever_max_tokens_asks(length):
    llm = open_llm(max_model_len=64)
    (output,) = generate(llm, [5] * length, SamplingParams(temperature=0.0, max_tokens=1000))
    assert length + len(output.outputs[0].token_ids) == 64
    assert output.outputs[0].finish_reason == "length"


def test_the_end_of_sequence_token_of_the_model_ends_a_request_and_is_kept():
    prompt = random_prompts(1)[0]
    answer = greedy_answer(prompt)
    llm = open_llm(tiny_model(eos_token_id=answer[4]))
    (output,) = generate(llm, prompt)
    assert output.outputs[0].token_ids == answer[: answer.index(answer[4]) + 1]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", answer[4])


@pytest.mark.parametrize("place", [2, 5])
def test_each_of_several_end_of_sequence_tokens_of_the_generation_config_ends_a_request(place):
    prompt = random_prompts(1)[0]
    answer = greedy_answer(prompt)
    unseen = next(token for token in range(VOCAB_SIZE) if token not in answer)
    model = tiny_model()
    model.generation_config.eos_token_id = [unseen, answer[place]]
    (output,) = generate(open_llm(model), prompt)
    assert output.outputs[0].token_ids == answer[: answer.index(answer[place]) + 1]
    assert output.outputs[0].finish_reason == "stop"


def test_ignore_eos_goes_on_past_the_end_of_sequence_token():
    prompt = random_prompts(1)[0]
    answer = greedy_answer(prompt)
    llm = open_llm(tiny_model(eos_token_id=answer[4]))
    (output,) = generate(llm, prompt, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert output.outputs[0].token_ids == answer
    assert output.outputs[0].finish_reason == "length"


def test_a_stop_token_ends_a_request_even_if_eos_is_ignored():
    prompt = random_prompts(1)[0]
    answer = greedy_answer(prompt)
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[answer[3]], ignore_eos=True)
    (output,) = generate(shared_llm(), prompt, params)
    assert output.outputs[0].token_ids == answer[: answer.index(answer[3]) + 1]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", answer[3])


def test_no_end_of_sequence_token_is_drawn_before_min_tokens():
    prompt = random_prompts(1)[0]
    eos = greedy_answer(prompt)[0]
    llm = open_llm(tiny_model(eos_token_id=eos))
    assert token_ids(generate(llm, prompt)) == [[eos]]
    (output,) = generate(llm, prompt, SamplingParams(temperature=0.0, max_tokens=40, min_tokens=30))
    assert len(output.outputs[0].token_ids) > 30
    assert eos not in output.outputs[0].token_ids[:30]


def test_no_stop_token_is_drawn_before_min_tokens():
    prompt = random_prompts(1)[0]
    stop = greedy_answer(prompt)[0]
    params = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=5, stop_token_ids=[stop])
    (output,) = generate(shared_llm(), prompt, params)
    assert stop not in output.outputs[0].token_ids[:5]


def stopped(monkeypatch: pytest.MonkeyPatch, text: str, **params: Any) -> Any:
    """The output of a model that says `text`, under stop strings."""
    llm = shared_llm()
    says = script(monkeypatch, llm, text)
    (output,) = generate(llm, "ask", SamplingParams(**({"max_tokens": len(says)} | params)))
    return output.outputs[0]


def test_a_stop_string_ends_a_request_and_the_text_is_cut_before_it(monkeypatch):
    completion = stopped(monkeypatch, "Paris. And then some more.", stop=". And")
    assert completion.text == "Paris"
    assert (completion.finish_reason, completion.stop_reason) == ("stop", ". And")


def test_a_stop_string_is_found_across_token_borders(monkeypatch):
    text = "xqzvw zxqvj kw"  # no merge of the tokenizer: one token a character
    assert len(tiny_tokenizer()(text)["input_ids"]) > 10
    completion = stopped(monkeypatch, text, stop="w zxq")
    assert completion.text == "xqzv"


def test_text_behind_a_stop_string_in_the_same_token_is_cut_too(monkeypatch):
    tokens = tiny_tokenizer().tokenize("The capital")
    assert any("apital" in token for token in tokens)
    assert stopped(monkeypatch, "The capital of France", stop="ap").text == "The c"


def test_a_request_ends_with_the_token_that_completes_its_stop_string(monkeypatch):
    completion = stopped(monkeypatch, "zqxj vwkz qxjv", stop="j v")
    assert tiny_tokenizer().decode(completion.token_ids) == "zqxj v"


def test_the_first_stop_string_in_the_text_wins_whatever_their_order(monkeypatch):
    completion = stopped(monkeypatch, "one, two; three", stop=["three", ";", ", t"])
    assert (completion.text, completion.stop_reason) == ("one", ", t")


def test_a_stop_string_that_begins_again_inside_itself_is_found(monkeypatch):
    assert stopped(monkeypatch, "zzzzq and on", stop="zzq").text == "zz"


def test_a_stop_string_of_several_bytes_a_character_is_found(monkeypatch):
    assert stopped(monkeypatch, "well 😀😃 done", stop="😃").text == "well 😀"


def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop(monkeypatch):
    completion = stopped(monkeypatch, "wait. END", stop="END")
    assert (completion.text, completion.finish_reason) == ("wait. ", "stop")


def test_a_stop_string_in_the_prompt_does_not_end_the_request(monkeypatch):
    assert stopped(monkeypatch, "fine", stop="ask").finish_reason == "length"


def test_no_stop_string_ends_a_request_before_min_tokens(monkeypatch):
    completion = stopped(monkeypatch, "zq zq zq zq zq zq", stop="zq", min_tokens=8)
    assert len(completion.token_ids) >= 8
    assert completion.finish_reason == "stop"


def test_a_stop_string_passed_over_by_min_tokens_stays_passed_over_whatever_the_others_are(monkeypatch):
    """A longer one among them must not make the search begin before the text that is new."""
    alone = stopped(monkeypatch, "zq and on and on and on", stop="zq", min_tokens=8)
    beside = stopped(monkeypatch, "zq and on and on and on", stop=["zq", "something much longer"], min_tokens=8)
    assert (alone.token_ids, alone.finish_reason) == (beside.token_ids, beside.finish_reason)


def test_a_tokenizer_that_cannot_decode_ends_its_request_with_an_error_and_no_other(monkeypatch):
    llm = open_llm()
    decode = llm.tokenizer.decode
    prompts = random_prompts(3)
    wanted = token_ids(generate(shared_llm(), prompts))
    broken = wanted[1][3]
    assert all(broken not in wanted[n] for n in (0, 2))

    def failing(ids, **options):
        if broken in ids:
            raise IndexError("piece id is out of range")
        return decode(ids, **options)

    monkeypatch.setattr(llm.tokenizer, "decode", failing)
    for params in (GREEDY, SamplingParams(temperature=0.0, max_tokens=12, stop="never seen")):
        outputs = generate(llm, prompts, params)
        assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
        assert "piece id is out of range" in outputs[1].error
        assert [output.error_kind for output in outputs] == [None, ErrorKind.INTERNAL, None]
        assert token_ids([outputs[0], outputs[2]]) == [wanted[0], wanted[2]]
        assert wanted[1][: len(outputs[1].outputs[0].token_ids)] == outputs[1].outputs[0].token_ids
        assert_idle_and_whole(llm)


def test_an_output_of_a_stream_does_not_change_after_it_was_given():
    first, *_, last = shared_llm().stream([5] * 40, GREEDY)
    assert first.metrics.finished_time is None
    assert last.metrics.finished_time is not None
    assert len(first.outputs[0].token_ids) == 1


def test_an_end_of_sequence_token_outside_the_vocabulary_is_never_looked_for():
    model = tiny_model()
    model.generation_config.eos_token_id = [VOCAB_SIZE + 7, VOCAB_SIZE]
    params = SamplingParams(temperature=0.0, max_tokens=4, min_tokens=4)  # suppresses them until then
    assert len(token_ids(generate(open_llm(model), [5, 6, 7], params))[0]) == 4


def test_a_request_stopped_by_a_string_frees_its_blocks(monkeypatch):
    assert stopped(monkeypatch, "Paris. And more", stop=". And").finish_reason == "stop"
    assert_idle_and_whole(shared_llm())


# ------------------------------------------------------------------------------------------------------- repeatability


def test_greedy_requests_repeat_with_a_cold_and_with_a_warm_cache():
    llm, prompts = open_llm(), random_prompts(6, low=1, high=100)
    cold = generate(llm, prompts)
    warm = generate(llm, prompts)
    assert token_ids(cold) == token_ids(warm)
    assert any(output.num_cached_tokens for output in warm)


def test_seeded_requests_repeat_across_calls_and_engines():
    prompts = random_prompts(6)
    first = token_ids(generate(shared_llm(), prompts, SAMPLED))
    assert token_ids(generate(shared_llm(), prompts, SAMPLED)) == first
    assert token_ids(generate(open_llm(seed=99), prompts, SAMPLED)) == first


def test_another_seed_gives_another_sample():
    prompt = random_prompts(1)[0]
    params = [SamplingParams(seed=seed, max_tokens=12) for seed in range(10)]
    assert len(set(map(tuple, token_ids(generate(shared_llm(), [prompt] * 10, params))))) == 10


def test_ten_equal_unseeded_prompts_give_ten_samples():
    outputs = generate(shared_llm(), ["Once upon a time"] * 10, SamplingParams(max_tokens=12))
    assert len(set(map(tuple, token_ids(outputs)))) == 10


def test_unseeded_requests_draw_afresh_in_each_call():
    params = SamplingParams(max_tokens=12)
    draws = [token_ids(generate(shared_llm(), "Once upon a time", params))[0] for _ in range(5)]
    assert len(set(map(tuple, draws))) == 5


def test_the_engines_seed_makes_unseeded_requests_repeat_in_a_new_process():
    prompts, params = random_prompts(4), SamplingParams(max_tokens=12)
    first, again, other = (token_ids(generate(open_llm(seed=seed), prompts, params)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def mixed_requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts with greedy and seeded sampling in turn, filtered in different ways."""
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}]
    params = [SamplingParams(seed=n, max_tokens=24, **kinds[n % len(kinds)]) for n in range(count)]
    return random_prompts(count, low=1, high=150, seed=1), params


@functools.cache
def answers_alone(count: int) -> list[list[int]]:
    """Each request by itself, in an engine without a prefix cache."""
    llm = open_llm(enable_prefix_caching=False)
    return [token_ids(generate(llm, p, q))[0] for p, q in zip(*mixed_requests(count), strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 32, "max_num_seqs": 16},
        {"max_num_batched_tokens": 64, "max_num_seqs": 3},
        {"block_size": 64},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_a_requests_tokens_do_not_depend_on_its_neighbours_or_on_chunks(options):
    prompts, params = mixed_requests(15)
    assert token_ids(generate(open_llm(**options), prompts, params)) == answers_alone(15)


def test_a_requests_tokens_do_not_depend_on_preemption():
    prompts, params = mixed_requests(15)
    llm = open_llm(max_model_len=192, num_kv_blocks=14)  # room for one sequence of full length and a bit
    assert token_ids(generate(llm, prompts, params)) == answers_alone(15)
    assert llm.stats().num_preemptions > 0
    assert_idle_and_whole(llm)


def test_a_requests_tokens_do_not_depend_on_the_order_of_submission():
    prompts, params = mixed_requests(15)
    outputs = generate(open_llm(), prompts[::-1], params[::-1])
    assert token_ids(outputs)[::-1] == answers_alone(15)


# ---------------------------------------------------------------------------------- the prefix cache and priorities


def test_a_second_call_finds_the_prompt_in_the_prefix_cache():
    llm, prompt = open_llm(), random_prompts(1, low=100, high=100)[0]
    assert [generate(llm, prompt)[0].num_cached_tokens for _ in range(2)] == [0, 96]


@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32)])
def test_a_fully_cached_prompt_still_computes_its_last_token(length, cached):
    llm, prompt = open_llm(), random_prompts(1, low=length, high=length)[0]
    cold, warm = generate(llm, prompt)[0], generate(llm, prompt)[0]
    assert warm.num_cached_tokens == cached
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def test_a_follow_up_finds_the_generated_tokens_in_the_prefix_cache_too():
    llm, prompt = open_llm(), random_prompts(1, low=20, high=20)[0]
    (first,) = generate(llm, prompt, SamplingParams(temperature=0.0, max_tokens=30))
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
    generate(llm, [[5] * 10, [6] * 20], SamplingParams(temperature=0.0, max_tokens=4))
    stats = llm.stats()
    assert (stats.num_steps, stats.num_failed_steps) == (4, 0)
    assert stats.num_scheduled_tokens == 10 + 20 + 2 * 3


def test_stats_count_blocks_taken_for_other_content_as_evictions():
    llm = open_llm(max_model_len=64, num_kv_blocks=6)
    for prompt in random_prompts(4, low=40, high=60):
        generate(llm, prompt, SamplingParams(temperature=0.0, max_tokens=2))
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
    llm = LLM(tiny_model(), enforce_eager=True, max_num_batched_tokens=128, kv_cache_memory_bytes=2**28)
    prompts = random_prompts(12, low=1, high=300)
    assert llm.config.max_num_batched_tokens == 128
    assert token_ids(generate(llm, prompts)) == token_ids(generate(shared_llm(), prompts))


def test_the_config_tells_the_resolved_options():
    config = open_llm().config
    assert (config.block_size, config.num_kv_blocks, config.max_model_len) == (16, 129, 512)
    assert None not in (config.max_num_batched_tokens, config.max_num_seqs, config.long_prefill_token_threshold)


# ---------------------------------------------------------------------------------------------------- chat and streams


def test_chat_answers_a_conversation_through_the_chat_template():
    (output,) = shared_llm().chat([{"role": "user", "content": "What is it?"}], GREEDY, use_tqdm=False)
    assert tiny_tokenizer().decode(output.prompt_token_ids) == "<|user|>What is it?<|end|><|assistant|>"


def test_chat_answers_several_conversations_in_order():
    conversations = [[{"role": "user", "content": content}] for content in ("one", "two", "three")]
    outputs = shared_llm().chat(conversations, GREEDY, use_tqdm=False)
    assert ["one" in tiny_tokenizer().decode(o.prompt_token_ids) for o in outputs] == [True, False, False]
    assert len(outputs) == 3


def test_the_deltas_of_a_stream_join_to_the_text_of_generate():
    prompt, params = random_prompts(1)[0], SamplingParams(temperature=0.0, max_tokens=60)
    texts = [output.outputs[0].text for output in shared_llm().stream(prompt, params)]
    shown = ""
    for text in texts:
        assert text.startswith(shown)
        shown = text
    assert shown == generate(shared_llm(), prompt, params)[0].outputs[0].text


def test_a_stream_yields_each_token_and_ends_with_the_finished_output():
    outputs = list(shared_llm().stream([5, 6, 7], GREEDY))
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 13))
    assert [output.finished for output in outputs] == [False] * 11 + [True]
    assert outputs[-1].outputs[0].finish_reason == "length"


def test_a_stream_shows_no_part_of_a_character(monkeypatch):
    llm = shared_llm()
    says = script(monkeypatch, llm, "go 😀 你好!")
    texts = [o.outputs[0].text for o in llm.stream("ask", SamplingParams(max_tokens=len(says)))]
    assert texts[-1] == "go 😀 你好!"
    assert not any("\ufffd" in text for text in texts)


def test_a_stream_shows_no_part_of_a_stop_string(monkeypatch):
    llm = shared_llm()
    says = script(monkeypatch, llm, "well done zqxv, zqxj never seen")
    texts = [o.outputs[0].text for o in llm.stream("ask", SamplingParams(max_tokens=len(says), stop="zqxj"))]
    assert texts[-1] == "well done zqxv, "
    assert all(texts[-1].startswith(text) for text in texts)


def test_a_stop_string_longer_than_the_text_so_far_is_held_back_whole(monkeypatch):
    llm = shared_llm()
    says = script(monkeypatch, llm, "zqxv wzqj kx and on")
    texts = [o.outputs[0].text for o in llm.stream("ask", SamplingParams(max_tokens=len(says), stop="zqxv wzqj kx"))]
    assert set(texts) == {""}


def test_closing_a_stream_frees_its_blocks():
    llm = open_llm()
    stream = llm.stream([5] * 40, GREEDY)
    next(stream)
    assert llm.stats().num_used_blocks > 0
    stream.close()
    assert_idle_and_whole(llm)


def test_leaving_a_loop_over_a_stream_leaves_the_llm_usable():
    llm = open_llm()
    for _ in llm.stream([5] * 40, GREEDY):
        break
    assert token_ids(generate(llm, [5, 6, 7])) == token_ids(generate(shared_llm(), [5, 6, 7]))


def test_generate_inside_a_loop_over_a_stream_answers_and_the_stream_goes_on():
    llm, answers = open_llm(), []
    stream = llm.stream([5] * 40, GREEDY)
    next(stream)
    assert ends_within(10, lambda: answers.append(token_ids(generate(llm, [[5, 6, 7], [8]]))))
    *_, last = stream
    assert answers == [token_ids(generate(shared_llm(), [[5, 6, 7], [8]]))]
    assert token_ids([last]) == token_ids(generate(shared_llm(), [5] * 40))
    assert_idle_and_whole(llm)


def test_a_stream_shows_every_token_even_if_another_call_computed_it_meanwhile():
    llm = open_llm()
    stream = llm.stream([5] * 40, GREEDY)
    seen = [next(stream)]
    generate(llm, [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=100))
    seen += stream
    assert [len(output.outputs[0].token_ids) for output in seen] == list(range(1, 13))
    assert [output.finished for output in seen] == [False] * 11 + [True]


def test_streams_of_one_llm_run_interleaved():
    llm, prompts = open_llm(), random_prompts(3)
    last: list[list[int]] = []
    for outputs in zip(*(llm.stream(prompt, GREEDY) for prompt in prompts), strict=True):
        last = token_ids(list(outputs))
    assert last == token_ids(generate(shared_llm(), prompts))


def test_closing_one_stream_leaves_another_one_going():
    llm = open_llm()
    first, second = (llm.stream([token] * 40, GREEDY) for token in (5, 6))
    next(first), next(second)
    first.close()
    *_, last = second
    assert token_ids([last]) == token_ids(generate(shared_llm(), [6] * 40))
    assert_idle_and_whole(llm)


def test_a_stream_survives_the_failure_of_a_step_that_another_call_took(monkeypatch):
    llm = open_llm()
    stream = llm.stream([5] * 40, GREEDY)
    next(stream)
    fail_in_step(monkeypatch, llm, 2, RuntimeError("boom"))
    with pytest.raises(StepError, match="boom"):
        generate(llm, random_prompts(3))
    *_, last = stream
    assert token_ids([last]) == token_ids(generate(shared_llm(), [5] * 40))
    assert_idle_and_whole(llm)


def test_a_forgotten_stream_that_the_garbage_collector_closes_during_a_step_does_not_hang(monkeypatch):
    llm = open_llm()
    holder: list[Any] = [llm.stream([5] * 40, GREEDY)]
    next(holder[0])
    holder.append(holder)  # a cycle, as the traceback of an exception makes them: only the collector ends it
    del holder
    sampler = llm._engine.model_runner.sampler
    sample = sampler.sample
    monkeypatch.setattr(sampler, "sample", lambda *arguments: (gc.collect(), sample(*arguments))[1])
    answers: list[list[list[int]]] = []
    assert ends_within(10, lambda: answers.append(token_ids(generate(llm, [5, 6, 7])))), "it waits for its own lock"
    assert answers == [token_ids(generate(shared_llm(), [5, 6, 7]))]
    assert_idle_and_whole(llm)


def test_a_stream_whose_llm_was_closed_ends_instead_of_turning_for_ever(monkeypatch):
    llm = open_llm()
    engine = llm._engine
    stream = llm.stream([5] * 40, GREEDY)
    next(stream)
    llm.close()
    num_steps = 0

    def step():
        nonlocal num_steps
        num_steps += 1
        assert num_steps < 100, "the stream goes on stepping a closed engine"
        return type(engine).step(engine)

    monkeypatch.setattr(engine, "step", step)
    with pytest.raises(RuntimeError, match="closed"):
        list(stream)


def test_a_bad_prompt_is_refused_by_a_stream_too():
    with pytest.raises(ValueError, match="empty"):
        next(shared_llm().stream("", GREEDY))


def test_threads_that_generate_at_once_each_get_their_own_answers():
    llm, prompts = open_llm(), random_prompts(6)
    expected = token_ids(generate(shared_llm(), prompts))
    answers: dict[int, list[list[int]]] = {}
    threads = [
        threading.Thread(target=lambda number=n: answers.update({number: token_ids(generate(llm, prompts[number]))}))
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answers[number][0] for number in range(6)] == expected


# ---------------------------------------------------------------------------------------------------- several engines


def test_two_llms_in_one_process_do_not_touch_each_other():
    prompts = random_prompts(5, low=1, high=100)
    first, second = open_llm(tiny_model(seed=1)), open_llm(tiny_model("qwen3", seed=2))
    expected = [
        token_ids(generate(open_llm(model), prompts)) for model in (tiny_model(seed=1), tiny_model("qwen3", seed=2))
    ]
    assert [token_ids(generate(llm, prompts)) for llm in (first, second)] == expected
    assert first.stats().prefix_cache_hits == second.stats().prefix_cache_hits == 0


def test_streams_of_two_llms_run_interleaved():
    prompts = random_prompts(2)
    llms = [open_llm(tiny_model(seed=seed)) for seed in (1, 2)]
    last = [None, None]
    for outputs in zip(*(llm.stream(prompt, GREEDY) for llm, prompt in zip(llms, prompts, strict=True)), strict=True):
        last = [output.outputs[0].token_ids for output in outputs]
    assert last == [
        token_ids(generate(open_llm(tiny_model(seed=s)), p))[0] for s, p in zip((1, 2), prompts, strict=True)
    ]


def test_closing_one_llm_leaves_another_one_usable():
    first, second = open_llm(), open_llm()
    first.close()
    assert token_ids(generate(second, [5, 6, 7])) == token_ids(generate(shared_llm(), [5, 6, 7]))


# ------------------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("number", [1, 2, 5])
def test_an_error_in_a_step_leaves_the_engine_usable_and_no_block_leaked(monkeypatch, number):
    llm, prompts = open_llm(max_num_batched_tokens=96, max_num_seqs=8), random_prompts(6, low=20, high=100)
    fail_in_step(monkeypatch, llm, number, RuntimeError("boom"))
    with pytest.raises(StepError, match="boom"):
        generate(llm, prompts)
    assert_idle_and_whole(llm)
    assert token_ids(generate(llm, prompts)) == token_ids(generate(shared_llm(), prompts))


def test_a_step_error_names_its_requests_and_its_cause(monkeypatch):
    llm = open_llm()
    generate(llm, "count me")  # so that ids do not start at 0
    cause = RuntimeError("boom")
    fail_in_step(monkeypatch, llm, 1, cause)
    with pytest.raises(StepError) as caught:
        generate(llm, ["a", "b"])
    assert sorted(caught.value.request_ids) == ["1", "2"]
    assert caught.value.__cause__ is cause
    assert all(part in str(caught.value) for part in ("RuntimeError", "boom", *caught.value.request_ids))


@pytest.mark.parametrize("number", [1, 2, 5])
def test_an_interrupt_from_the_keyboard_stays_one_and_leaves_no_block_leaked(monkeypatch, number):
    llm, prompts = open_llm(max_num_batched_tokens=96, max_num_seqs=8), random_prompts(6, low=20, high=100)
    fail_in_step(monkeypatch, llm, number, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        generate(llm, prompts)
    assert_idle_and_whole(llm)
    assert token_ids(generate(llm, prompts)) == token_ids(generate(shared_llm(), prompts))


def test_what_a_failed_step_was_to_compute_is_not_found_in_the_prefix_cache(monkeypatch):
    llm, prompt = open_llm(), random_prompts(1, low=100, high=100)[0]
    fail_in_step(monkeypatch, llm, 1, RuntimeError("boom"))
    with pytest.raises(StepError):
        generate(llm, prompt)
    assert generate(llm, prompt)[0].num_cached_tokens == 0


def test_an_error_in_a_stream_frees_its_blocks(monkeypatch):
    llm = open_llm()
    fail_in_step(monkeypatch, llm, 3, RuntimeError("boom"))
    with pytest.raises(StepError):
        list(llm.stream([5] * 40, GREEDY))
    assert_idle_and_whole(llm)


def test_a_request_whose_logits_are_not_finite_ends_alone_with_an_error_that_says_so():
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan
    prompts = [[p for p in prompt if p != 7] for prompt in random_prompts(3, low=40, high=60)]
    llm = open_llm(model)
    good, bad, also_good = generate(llm, [prompts[0], [*prompts[1], 7], prompts[2]])
    assert bad.outputs[0].finish_reason == "error"
    assert bad.request_id in bad.error
    assert "finite" in bad.error and bad.error_kind is ErrorKind.INTERNAL
    assert token_ids([good, also_good]) == token_ids(generate(shared_llm(), [prompts[0], prompts[2]]))
    assert_idle_and_whole(llm)


def test_the_blocks_of_a_request_driven_to_nan_harm_no_successor():
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan
    llm = open_llm(model, max_model_len=128, num_kv_blocks=10)  # so few that the successors take the same ones
    generate(llm, [[7] * 100])
    prompts = [[p for p in prompt if p != 7] for prompt in random_prompts(4, low=20, high=100)]
    assert token_ids(generate(llm, prompts)) == token_ids(generate(shared_llm(), prompts))


def kill(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    fail_in_step(monkeypatch, llm, 1, DeviceError("the device fell off the bus"))
    with pytest.raises(StepError, match="fell off the bus"):
        generate(llm, [5, 6, 7])


def test_after_a_device_error_the_engine_is_dead_and_says_why(monkeypatch):
    llm = open_llm()
    kill(monkeypatch, llm)
    with pytest.raises(EngineDeadError, match="fell off the bus"):
        generate(llm, [5, 6, 7])
    with pytest.raises(EngineDeadError, match="fell off the bus"):
        next(llm.stream([5, 6, 7]))


def test_a_dead_engine_can_be_closed_and_another_one_opened(monkeypatch):
    llm = open_llm()
    kill(monkeypatch, llm)
    llm.close()
    assert token_ids(generate(open_llm(), [5, 6, 7])) == token_ids(generate(shared_llm(), [5, 6, 7]))


# ------------------------------------------------------------------------------------------------------------- closing


def test_closing_twice_does_nothing():
    llm = open_llm()
    llm.close()
    llm.close()
    assert llm._engine is None


def test_leaving_the_with_block_closes():
    with open_llm() as llm:
        generate(llm, [5, 6, 7])
    with pytest.raises(RuntimeError, match="closed"):
        generate(llm, [5, 6, 7])


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: llm.generate("a"),
        lambda llm: llm.chat([{"role": "user", "content": "a"}]),
        lambda llm: next(llm.stream("a")),
        lambda llm: llm.stats(),
        lambda llm: llm.reset_prefix_cache(),
        lambda llm: llm.weights_changed(),
        lambda llm: llm.config,
    ],
    ids=["generate", "chat", "stream", "stats", "reset_prefix_cache", "weights_changed", "config"],
)
def test_using_a_closed_llm_is_a_runtime_error_that_names_the_remedy(use):
    llm = open_llm()
    llm.close()
    with pytest.raises(RuntimeError, match="closed; build a new one"):
        use(llm)


def test_an_llm_built_inside_inference_mode_works_outside_of_it():
    with torch.inference_mode():
        llm = open_llm(tiny_model())
    assert token_ids(generate(llm, [5, 6, 7])) == token_ids(generate(shared_llm(), [5, 6, 7]))
