"""How a request ends: length, end-of-sequence token, stop token, stop string."""

import pytest

from nanovllm import ErrorKind, SamplingParams
from tests.support.llms import GREEDY, assert_idle_and_whole, generate, greedy, open_llm, script, shared_llm, token_ids
from tests.support.tiny_models import VOCAB_SIZE, random_prompts, tiny_model, tiny_tokenizer


def greedy_answer(prompt, count=12):
    return token_ids(generate(shared_llm(), prompt, greedy(count)))[0]


def test_max_tokens_ends_a_request_by_length():
    (output,) = generate(shared_llm(), [5, 6], SamplingParams(max_tokens=3, seed=0))
    assert len(output.outputs[0].token_ids) == 3
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.costly
@pytest.mark.parametrize("length", [1, 15, 16, 17, 62, 63])
def test_max_model_len_ends_a_request_by_length_whatever_max_tokens_asks(length):
    llm = open_llm(max_model_len=64)
    (output,) = generate(llm, [5] * length, greedy(1000))
    assert length + len(output.outputs[0].token_ids) == 64
    assert output.outputs[0].finish_reason == "length"


def test_the_end_of_sequence_token_of_the_model_ends_a_request_and_is_kept():
    prompt = random_prompts(1)[0]
    answer = greedy_answer(prompt)
    llm = open_llm(tiny_model(num_layers=1, eos_token_id=answer[4]))
    (output,) = generate(llm, prompt)
    assert output.outputs[0].token_ids == answer[: answer.index(answer[4]) + 1]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", answer[4])


@pytest.mark.parametrize("place", [2, 5])
def test_each_of_several_end_of_sequence_tokens_of_the_generation_config_ends_a_request(place):
    prompt = random_prompts(1)[0]
    answer = greedy_answer(prompt)
    unseen = next(token for token in range(VOCAB_SIZE) if token not in answer)
    model = tiny_model(num_layers=1)
    model.generation_config.eos_token_id = [unseen, answer[place]]
    (output,) = generate(open_llm(model), prompt)
    assert output.outputs[0].token_ids == answer[: answer.index(answer[place]) + 1]
    assert output.outputs[0].finish_reason == "stop"


def test_ignore_eos_goes_on_past_the_end_of_sequence_token():
    prompt = random_prompts(1)[0]
    answer = greedy_answer(prompt)
    llm = open_llm(tiny_model(num_layers=1, eos_token_id=answer[4]))
    (output,) = generate(llm, prompt, greedy(12, ignore_eos=True))
    assert output.outputs[0].token_ids == answer
    assert output.outputs[0].finish_reason == "length"


def test_a_stop_token_ends_a_request_even_if_eos_is_ignored():
    prompt = random_prompts(1)[0]
    answer = greedy_answer(prompt)
    params = greedy(12, stop_token_ids=[answer[3]], ignore_eos=True)
    (output,) = generate(shared_llm(), prompt, params)
    assert output.outputs[0].token_ids == answer[: answer.index(answer[3]) + 1]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", answer[3])


def test_no_end_of_sequence_token_is_drawn_before_min_tokens():
    prompt = random_prompts(1)[0]
    eos = greedy_answer(prompt)[0]
    llm = open_llm(tiny_model(num_layers=1, eos_token_id=eos))
    assert token_ids(generate(llm, prompt)) == [[eos]]
    (output,) = generate(llm, prompt, greedy(40, min_tokens=30))
    assert len(output.outputs[0].token_ids) > 30
    assert eos not in output.outputs[0].token_ids[:30]


def test_no_stop_token_is_drawn_before_min_tokens():
    prompt = random_prompts(1)[0]
    stop = greedy_answer(prompt)[0]
    params = greedy(12, min_tokens=5, stop_token_ids=[stop])
    (output,) = generate(shared_llm(), prompt, params)
    assert stop not in output.outputs[0].token_ids[:5]


def stopped(monkeypatch, text, **params):
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
    for params in (GREEDY, greedy(12, stop="never seen")):
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
    params = greedy(4, min_tokens=4)  # suppresses them until then
    assert len(token_ids(generate(open_llm(model), [5, 6, 7], params))[0]) == 4


def test_a_request_stopped_by_a_string_frees_its_blocks(monkeypatch):
    assert stopped(monkeypatch, "Paris. And more", stop=". And").finish_reason == "stop"
    assert_idle_and_whole(shared_llm())
