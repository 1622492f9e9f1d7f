"""`LLM`: what goes in, what comes out, several engines in one process, and closing."""

import pytest
import torch

import nanovllm.llm
from nanovllm import LLM, SamplingParams
from tests.support.llms import GREEDY, OPTIONS, SAMPLED, generate, open_llm, shared_llm, token_ids
from tests.support.tiny_models import random_prompts, tiny_model, tiny_tokenizer

# -------------------------------------------------------------------------------------------------- prompts and outputs


def test_a_string_gives_one_output_with_its_text_decoded():
    (output,) = generate(shared_llm(), "The capital of France is")
    assert output.prompt == "The capital of France is"
    assert output.prompt_token_ids == tiny_tokenizer()("The capital of France is")["input_ids"]
    assert output.outputs[0].text == tiny_tokenizer().decode(output.outputs[0].token_ids, skip_special_tokens=True)


def test_the_llm_of_the_engine_alone_answers_and_streams_as_the_public_one():
    with nanovllm.llm.LLM(tiny_model(num_layers=1), **OPTIONS) as llm:
        (output,) = generate(llm, [5, 6, 7])
        *_, last = llm.stream([5, 6, 7], GREEDY)
    assert token_ids([output, last]) == 2 * token_ids(generate(shared_llm(), [5, 6, 7]))


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


def test_prompts_may_be_dictionaries_of_text_or_token_ids():
    llm = shared_llm()
    forms = [{"prompt": "one"}, {"prompt_token_ids": [5, 6, 7]}, {"prompt": "one", "prompt_token_ids": None}]
    outputs = generate(llm, [*forms, "one", [5, 6, 7]])
    assert [output.prompt for output in outputs] == ["one", None, "one", "one", None]
    assert token_ids(outputs)[:3] == [token_ids(outputs)[number] for number in (3, 4, 3)]
    (alone,) = generate(llm, {"prompt_token_ids": [5, 6, 7]})
    assert alone.prompt_token_ids == [5, 6, 7]


def test_prompts_may_come_from_a_generator():
    outputs = generate(shared_llm(), (prompt for prompt in ("one", [5, 6, 7])))
    assert [output.prompt for output in outputs] == ["one", None]


def test_no_prompts_have_no_outputs():
    llm = shared_llm()
    assert generate(llm, []) == [] and generate(llm, iter(())) == [] and list(llm.as_completed([])) == []


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
    generate(shared_llm(), random_prompts(3), GREEDY)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


# ------------------------------------------------------------------------------------------------------ several engines


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


# -------------------------------------------------------------------------------------------------------------- closing


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
        llm = open_llm(tiny_model(num_layers=1))
    assert token_ids(generate(llm, [5, 6, 7])) == token_ids(generate(shared_llm(), [5, 6, 7]))
