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
    shared_llm,
    token_ids,
)
from tests.support.refusals import invalid
from tests.support.tiny_models import random_prompts, tiny_model, tiny_tokenizer


def test_a_chat_template_of_a_file_leaves_the_callers_tokenizer_as_it_was(tmp_path):
    path, tokenizer = tmp_path / "template.jinja", tiny_tokenizer()
    path.write_text("say {{ messages[0]['content'] }}")
    before = tokenizer.chat_template
    with LLM(tiny_model(), tokenizer=tokenizer, chat_template=path, **OPTIONS) as llm:
        (prompt,) = llm.apply_chat_template([{"role": "user", "content": "hello"}])
        assert tokenizer.decode(prompt) == "say hello" and tokenizer.chat_template == before
    with invalid("there is no tokenizer to use it"):
        LLM(tiny_model(), chat_template=path, **OPTIONS)


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
