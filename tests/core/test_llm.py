"""`LLM`: what goes in, what comes out, several engines in one process, and closing."""

import pytest
import torch

import nanovllm.llm
from nanovllm import LLM, SamplingParams
from tests.support.llms import GREEDY, OPTIONS, generate, greedy, open_llm, script, shared_llm, token_ids
from tests.support.tiny_models import VOCAB_SIZE, random_prompts, tiny_model, tiny_tokenizer

# -------------------------------------------------------------------------------------------------- prompts and outputs


def test_a_string_gives_one_output_with_its_text_decoded():
    text = "The capital of France is"
    for prompt in (text, {"prompt": text, "prompt_token_ids": None}):
        (output,) = generate(shared_llm(), prompt)
        assert (output.prompt, output.prompt_token_ids) == (text, tiny_tokenizer()(text)["input_ids"])
        assert output.outputs[0].text == tiny_tokenizer().decode(output.outputs[0].token_ids, skip_special_tokens=True)
    (output,) = generate(shared_llm(), {"prompt_token_ids": [5, 6]})
    assert (output.prompt, output.prompt_token_ids) == (None, [5, 6])
    assert list(shared_llm().as_completed([])) == []


@pytest.mark.parametrize(
    "prompt, error", [({"text": "a"}, "the key 'text'"), ({"prompt": None}, "a dictionary without")]
)
def test_a_dictionary_that_is_no_prompt_is_refused(prompt, error):
    with pytest.raises(TypeError, match=error):
        generate(shared_llm(), prompt)


def test_the_llm_of_the_engine_alone_answers_and_streams_as_the_public_one():
    with nanovllm.llm.LLM(tiny_model(num_layers=1), **OPTIONS) as llm:
        (output,) = generate(llm, [5, 6, 7])
        *_, last = llm.stream([5, 6, 7], GREEDY)
    assert token_ids([output, last]) == 2 * token_ids(generate(shared_llm(), [5, 6, 7]))


def stopped(monkeypatch, text, **params):
    """The output of a model that says `text`, under stop strings."""
    llm = shared_llm()
    says = script(monkeypatch, llm, text)
    (output,) = generate(llm, "ask", SamplingParams(**({"max_tokens": len(says)} | params)))
    return output.outputs[0]


def test_a_stop_string_in_the_prompt_does_not_end_the_request(monkeypatch):
    assert stopped(monkeypatch, "fine", stop="ask").finish_reason == "length"


def test_a_stop_string_passed_over_by_min_tokens_stays_passed_over_whatever_the_others_are(monkeypatch):
    """A longer one among them must not make the search begin before the text that is new."""
    alone = stopped(monkeypatch, "zq and on and on and on", stop="zq", min_tokens=8)
    beside = stopped(monkeypatch, "zq and on and on and on", stop=["zq", "something much longer"], min_tokens=8)
    assert (alone.token_ids, alone.finish_reason) == (beside.token_ids, beside.finish_reason)


def test_an_output_of_a_stream_does_not_change_after_it_was_given():
    first, *_, last = shared_llm().stream([5] * 40, GREEDY)
    assert first.metrics.finished_time is None
    assert last.metrics.finished_time is not None
    assert len(first.outputs[0].token_ids) == 1


def test_an_end_of_sequence_token_outside_the_vocabulary_is_never_looked_for():
    model = tiny_model()
    model.generation_config.eos_token_id = [VOCAB_SIZE + 7, VOCAB_SIZE]
    params = greedy(4, min_tokens=4)  # suppresses them until then
    assert len(token_ids(generate(open_llm(model), [5, 6, 7], params))[0]) == 4


def test_the_progress_bar_shows_requests_and_tokens_a_second_unless_it_is_off(capsys):
    shared_llm().generate(random_prompts(3), GREEDY, use_tqdm=True)
    shown = capsys.readouterr().err
    assert "3/3" in shown and "tokens/s" in shown
    generate(shared_llm(), random_prompts(3))
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


def test_setting_only_max_num_batched_tokens_works():
    llm = LLM(tiny_model(num_layers=1), enforce_eager=True, max_num_batched_tokens=128, kv_cache_memory_bytes=2**28)
    prompts = random_prompts(12, low=1, high=300)
    assert llm.config.max_num_batched_tokens == 128
    assert token_ids(generate(llm, prompts)) == token_ids(generate(shared_llm(), prompts))


# ------------------------------------------------------------------------------------------------------ several engines


def test_two_llms_in_one_process_do_not_touch_each_other():
    prompts = random_prompts(5, low=1, high=100)
    first, second = open_llm(tiny_model(seed=1)), open_llm(tiny_model("qwen3", seed=2))
    expected = [
        token_ids(generate(open_llm(model), prompts)) for model in (tiny_model(seed=1), tiny_model("qwen3", seed=2))
    ]
    assert [token_ids(generate(llm, prompts)) for llm in (first, second)] == expected
    assert first.stats().prefix_cache_hits == second.stats().prefix_cache_hits == 0


# -------------------------------------------------------------------------------------------------------------- closing


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
