"""`LLM.chat` and `LLM.stream`: deltas, text held back, streams left early, several at once."""

import gc
import threading

import pytest

from nanovllm import LLM, SamplingParams, StepError
from tests.support.llms import (
    GREEDY,
    OPTIONS,
    assert_idle_and_whole,
    ends_within,
    fail_in_step,
    generate,
    greedy,
    open_llm,
    script,
    shared_llm,
    token_ids,
)
from tests.support.refusals import invalid
from tests.support.tiny_models import random_prompts, tiny_model, tiny_tokenizer


def test_chat_answers_a_conversation_through_the_chat_template():
    (output,) = shared_llm().chat([{"role": "user", "content": "What is it?"}], GREEDY, use_tqdm=False)
    assert tiny_tokenizer().decode(output.prompt_token_ids) == "<|user|>What is it?<|end|><|assistant|>"


def test_chat_answers_several_conversations_in_order():
    conversations = [[{"role": "user", "content": content}] for content in ("one", "two", "three")]
    outputs = shared_llm().chat(conversations, GREEDY, use_tqdm=False)
    assert ["one" in tiny_tokenizer().decode(o.prompt_token_ids) for o in outputs] == [True, False, False]
    assert len(outputs) == 3


def test_a_chat_template_of_a_file_leaves_the_callers_tokenizer_as_it_was(tmp_path):
    path, tokenizer = tmp_path / "template.jinja", tiny_tokenizer()
    path.write_text("say {{ messages[0]['content'] }}")
    before = tokenizer.chat_template
    with LLM(tiny_model(), tokenizer=tokenizer, chat_template=path, **OPTIONS) as llm:
        (prompt,) = llm.apply_chat_template([{"role": "user", "content": "hello"}])
        assert tokenizer.decode(prompt) == "say hello" and tokenizer.chat_template == before
    with invalid("there is no tokenizer to use it"):
        LLM(tiny_model(), chat_template=path, **OPTIONS)


def test_the_deltas_of_a_stream_join_to_the_text_of_generate():
    prompt, params = random_prompts(1)[0], greedy(60)
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
    generate(llm, [5, 6, 7], greedy(100))
    seen += stream
    assert [len(output.outputs[0].token_ids) for output in seen] == list(range(1, 13))
    assert [output.finished for output in seen] == [False] * 11 + [True]


def test_streams_of_one_llm_run_interleaved():
    llm, prompts = open_llm(), random_prompts(3)
    last = []
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
    holder = [llm.stream([5] * 40, GREEDY)]
    next(holder[0])
    holder.append(holder)  # a cycle, as the traceback of an exception makes them: only the collector ends it
    del holder
    sampler = llm._engine.model_runner.sampler
    sample = sampler.sample
    monkeypatch.setattr(sampler, "sample", lambda *arguments: (gc.collect(), sample(*arguments))[1])
    answers = []
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
    with invalid("empty"):
        next(shared_llm().stream("", GREEDY))


def test_threads_that_generate_at_once_each_get_their_own_answers():
    llm, prompts = open_llm(), random_prompts(6)
    expected = token_ids(generate(shared_llm(), prompts))
    answers = {}
    threads = [
        threading.Thread(target=lambda number=n: answers.update({number: token_ids(generate(llm, prompts[number]))}))
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answers[number][0] for number in range(6)] == expected


# --------------------------------------------------------------------------------------------------------- as completed


def test_outputs_come_as_their_prompts_end_and_equal_those_of_generate():
    prompts, counts = random_prompts(4, seed=8), (9, 2, 12, 5)
    params = [greedy(count) for count in counts]
    found = list(shared_llm().as_completed(prompts, params))
    assert [index for index, _ in found] == [1, 3, 0, 2]
    expected = generate(shared_llm(), prompts, params)
    assert [output.outputs[0].token_ids for _, output in sorted(found)] == token_ids(expected)


def test_bad_input_raises_at_the_call_and_an_iterator_left_early_ends_the_rest():
    llm = open_llm()
    with invalid("prompt 1"):
        llm.as_completed([[5], []], GREEDY)
    outputs = llm.as_completed([[5], [6], [7]], [SamplingParams(max_tokens=n) for n in (2, 100, 100)])
    assert next(outputs)[0] == 0
    outputs.close()  # type: ignore[attr-defined]
    assert_idle_and_whole(llm)
