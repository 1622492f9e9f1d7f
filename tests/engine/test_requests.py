"""What a caller gives and gets: prompts in every form, refusals, texts, stop strings, samples, streams."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
import torch

from nanovllm.config import EngineConfig
from nanovllm.errors import PromptTooLongError
from nanovllm.llm import LLM
from nanovllm.outputs import OutputKind
from nanovllm.requests import InputProcessor, RequestLimits
from nanovllm.responses import Request, Sample, TokenTimes, deliver
from nanovllm.sampling_params import SamplingParams, sample_seeds
from tests.engine.blocks import MoreParams, make_sequence
from tests.engine.models import (
    END,
    GREEDY,
    byte_tokenizer,
    check_idle,
    generate,
    make_it_say,
    open_llm,
    tiny_model,
    token_ids,
)


@pytest.fixture(scope="module")
def llm():
    with open_llm(tokenizer=byte_tokenizer()) as llm:
        yield llm


@pytest.fixture(scope="module")
def without_tokenizer():
    with open_llm() as llm:
        yield llm


# ------------------------------------------------------------------------------------------------------------- prompts


def test_a_prompt_may_be_text_or_token_ids(llm: LLM):
    ids = llm.tokenizer("abc")["input_ids"]
    forms = ["abc", ids, tuple(ids), np.array(ids), torch.tensor(ids)]
    outputs = generate(llm, [*forms, [np.int64(each) for each in ids]])
    assert [output.prompt_token_ids for output in outputs] == [ids] * 6
    assert [output.prompt for output in outputs] == ["abc", *[None] * 5]
    assert len({tuple(tokens) for tokens in token_ids(outputs)}) == 1
    for alone in ("abc", ids, iter([ids])):
        assert token_ids(generate(llm, alone)) == token_ids(outputs)[:1]
    assert generate(llm, []) == []


def test_options_are_one_for_all_prompts_or_one_for_each(llm: LLM):
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (3, 1, 2)]
    outputs = generate(llm, [[1], [2], [3]], params, priority=[2, 0, 1], cache_salt="salt", timeout=[9.0, None, 5])
    assert [len(tokens) for tokens in token_ids(outputs)] == [3, 1, 2]


def test_the_beginning_of_a_prompt_is_cut_off_where_the_request_says_so(llm: LLM):
    params = SamplingParams(temperature=0.0, max_tokens=3, truncate_prompt_tokens=2)
    (output,) = generate(llm, [[*range(200)]], params)
    assert output.prompt_token_ids == [198, 199]


@pytest.mark.parametrize(("prompts", "options", "error", "message"), [
    ("", {}, ValueError, "empty string"),
    ([[]], {}, ValueError, "the prompt is empty"),
    (7, {}, TypeError, "a string or a list of token ids, not 7"),
    ([5, "text"], {}, TypeError, "prompt 0: .* not 5"),
    ([b"bytes"], {}, TypeError, "not b'bytes'"),
    ([[1, 2.0]], {}, TypeError, r"whole numbers, not 2\.0"),
    ([[1], [2, True]], {}, TypeError, "prompt 1: .*whole numbers, not True"),
    ([[1, 300]], {}, ValueError, "token id 300, outside the vocabulary of 258"),
    ([[-1]], {}, ValueError, "token id -1"),
    ([[1] * 128], {}, PromptTooLongError, "128 tokens"),
    ("\ud800", {}, ValueError, "surrogate|UTF-8"),
    ([[1]], {"unknown": 1}, TypeError, "unknown"),
    ([[1], [2]], {"priority": [1]}, ValueError, "priority has 1 entries for 2 prompts"),
    ([[1]], {"priority": 1.5}, TypeError, "priority must be a whole number"),
    ([[1]], {"priority": True}, TypeError, "priority must be a whole number"),
    ([[1]], {"priority": 2**60}, ValueError, "priority is 1152921504606846976"),
    ([[1]], {"timeout": 0}, ValueError, "timeout is 0"),
    ([[1]], {"timeout": float("nan")}, ValueError, "timeout is nan"),
    ([[1]], {"cache_salt": 5}, TypeError, "cache_salt must be a string"),
], ids=str)  # fmt: skip
def test_a_bad_prompt_or_option_is_refused_with_its_value_before_any_work(prompts, options, error, message, llm: LLM):
    with pytest.raises(error, match=message):
        llm.generate(prompts, GREEDY, use_tqdm=False, **options)
    assert not llm._engine.requests


@pytest.mark.parametrize(("params", "message"), [
    ({"stop_token_ids": [3, 258]}, "stop_token_ids holds 258, outside the vocabulary of 258"),
], ids=str)  # fmt: skip
def test_parameters_beyond_the_models_limits_are_refused_by_name(params, message, llm: LLM):
    with pytest.raises(ValueError, match=message):
        llm.generate([[1] * 60], SamplingParams(**params), use_tqdm=False)


@pytest.mark.parametrize(("options", "message"), [
    ({"temperature": -1}, "temperature is -1"), ({"temperature": 1e-9}, "the smallest above 0"),
    ({"top_p": 0.0}, "top_p is 0"), ({"top_k": -2}, "top_k is -2"), ({"min_p": 2}, "min_p is 2"),
    ({"n": 2, "temperature": 0.0}, "n is 2 and temperature 0"), ({"max_tokens": 0}, "max_tokens is 0"),
    ({"stop": [""]}, "stop"), ({"seed": 2**64}, "seed is"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"temperature": "hot"}, "must be a number, not 'hot'"), ({"temperature": 10**400}, "temperature is inf"),
    ({"top_k": 1.5}, "top_k must be a whole number"), ({"max_tokens": True}, "max_tokens must be a whole number"),
    ({"stop": 5}, "stop must be a string or a list of them"), ({"stop": [5]}, "stop must hold strings, not 5"),
    ({"stop": ["\ud800"]}, "half of a surrogate pair"), ({"stop": ["\udc80"]}, "the byte 0x80"),
    ({"stop_token_ids": 5}, "must be a list of token ids"), ({"ignore_eos": 1}, "must be True or False"),
    ({"stop_token_ids": "12"}, "must be a list of token ids"),
], ids=str)  # fmt: skip
def test_sampling_parameters_out_of_range_are_refused_with_value_and_limit(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        SamplingParams(**options)


def test_none_is_an_empty_list_of_stop_strings_and_tokens():
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()


def test_texts_need_a_tokenizer(without_tokenizer: LLM):
    for prompts, params in (("text", GREEDY), ([[1]], SamplingParams(stop="a"))):
        with pytest.raises(ValueError, match="tokenizer"):
            without_tokenizer.generate(prompts, params, use_tqdm=False)
    (output,) = generate(without_tokenizer, [[1, 2]])
    assert output.outputs[0].text == ""


class Embedding(SamplingParams):
    embeds = True


def test_an_option_that_no_request_has_is_refused_with_those_that_there_are(llm: LLM):
    with pytest.raises(TypeError, match=r"no option 'beams'; its options are priority, cache_salt"):
        llm._engine.input_processor.process_one("0", [1], beams=2)


def test_options_of_features_are_refused_by_a_processor_without_them():
    processor = InputProcessor(byte_tokenizer(), EngineConfig(max_model_len=64), RequestLimits(258, 258, "Tiny"))
    assert processor.process_one("0", [1], MoreParams(seed=3)).params.seed == 3
    refused = {"built without min_tokens": MoreParams(min_tokens=2), "without embeddings": Embedding()}
    for message, params in refused.items():
        with pytest.raises(ValueError, match=message):
            processor.process_one("0", [1], params)


# ---------------------------------------------------------------------------------------------------------------- ends


def said(llm: LLM, monkeypatch: pytest.MonkeyPatch, text: str, **params):
    ids = llm.tokenizer(text)["input_ids"]
    make_it_say(monkeypatch, llm, ids)
    (output,) = generate(llm, ["x"], SamplingParams(**({"max_tokens": len(ids)} | params)))
    return output.outputs[0]


@pytest.mark.parametrize(("stop", "include", "text"), [
    (". And", False, "Paris"), (". And", True, "Paris. And"), (["zzz", "ris", "Par"], False, ""),
    ("é", False, "Paris. And "),
])  # fmt: skip
def test_the_first_stop_string_ends_the_text_before_it_or_after_it(llm, monkeypatch, stop, include, text):
    completion = said(llm, monkeypatch, "Paris. And é so on", stop=stop, include_stop_str_in_output=include)
    assert (completion.text, completion.finish_reason) == (text, "stop")
    assert completion.stop_reason in ([stop] if isinstance(stop, str) else stop)


def test_a_stop_string_that_the_last_token_completes_is_the_reason_of_the_end(llm, monkeypatch):
    completion = said(llm, monkeypatch, "Paris.", stop=".")
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("Paris", "stop", ".")


def test_every_latency_between_tokens_is_kept_where_the_engine_is_asked_to():
    with open_llm(record_itl=True) as llm:
        (output,) = generate(llm, [[1]])
        assert len(output.metrics.itls) == 11 and max(output.metrics.itls) == output.metrics.max_itl


def test_no_stop_string_ends_a_request_before_its_least_tokens(llm, monkeypatch):
    sequence = make_sequence([1], MoreParams(stop=["ab"], min_tokens=4))
    sample = Sample(llm._engine.input_processor.process_one("0", [1]), sequence, llm.tokenizer)
    found = []
    for token_id in llm.tokenizer("abcab")["input_ids"]:
        sequence.token_ids.append(token_id)
        found.append(sample.advance(0.0))
    assert found == [None, None, None, None, "ab"]


def test_an_error_of_a_step_behind_the_stop_string_does_not_count(llm):
    processor = llm._engine.input_processor
    new = processor.process_one("0", [1], SamplingParams(stop="b"))
    request = Request(new, processor, number=0, arrivals=count())
    (sequence,) = request.sequences
    sequence.token_ids.extend(llm.tokenizer("ab")["input_ids"])
    sequence.finish_reason = sequence.error = "error"
    sequence.is_finished = True
    (output,) = deliver({"0": request}, [sequence], 0.0, TokenTimes(), lambda *_: None, {sequence: 1})
    assert (output.outputs[0].text, output.outputs[0].finish_reason, output.error) == ("a", "stop", None)


def test_the_models_end_token_ends_a_request_and_is_not_part_of_the_text(llm, monkeypatch):
    ids = [*llm.tokenizer("done")["input_ids"], END, 1]
    make_it_say(monkeypatch, llm, ids)
    ended, ignored = generate(
        llm, [[1], [1]], [SamplingParams(max_tokens=6), SamplingParams(max_tokens=6, ignore_eos=True)]
    )
    assert (ended.outputs[0].text, ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == (
        "done",
        "stop",
        END,
    )
    assert ended.outputs[0].token_ids == ids[:5] and ignored.outputs[0].token_ids == ids
    shown = said(llm, monkeypatch, "a<end>b", skip_special_tokens=False, ignore_eos=True)
    assert shown.text == "a<end>b"


def test_a_request_ends_at_the_models_length(llm: LLM):
    (output,) = generate(llm, [[1] * 120], SamplingParams(temperature=0.0, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 8 and output.outputs[0].finish_reason == "length"


def test_defaults_of_the_models_generation_config_are_those_of_requests_without_parameters():
    model = tiny_model()
    model.generation_config.update(do_sample=True, top_k=5, eos_token_id=[3, 4])
    with open_llm(model) as llm:
        params = llm.default_sampling_params
        assert (params.temperature, params.top_k, params.top_p) == (1.0, 5, 1.0)
        assert {*llm._engine.input_processor.limits.eos_token_ids} >= {3, 4}
    model.generation_config.top_k = -5
    with pytest.raises(Exception, match="generation_config holds sampling options that cannot be used"):
        open_llm(model)


# ------------------------------------------------------------------------------------------------------------- samples


def test_the_samples_of_a_request_are_requests_with_their_seeds_and_compute_the_prompt_once(llm: LLM):
    prompt = [*range(37)]  # ends within a block, which each sample but one has as a copy
    params = {"max_tokens": 9, "ignore_eos": True}
    before = llm._engine.scheduler.stats.num_scheduled_tokens
    (output,) = generate(llm, [prompt], SamplingParams(seed=3, n=4, **params))
    assert llm._engine.scheduler.stats.num_scheduled_tokens - before == 37 + 4 * 8
    alone = [
        generate(llm, [prompt], SamplingParams(seed=seed, **params))[0].outputs[0].token_ids
        for seed in sample_seeds(3, 4, engine_seed=0, request_number=0)
    ]
    assert [completion.token_ids for completion in output.outputs] == alone
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3] and len({*map(tuple, alone)}) == 4


def test_a_request_without_a_seed_draws_anew_each_time_and_an_engine_with_its_seed_repeats_itself():
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    found = []
    for seed in (5, 5, 6):
        with open_llm(seed=seed) as llm:
            found.append(token_ids(generate(llm, [[1], [1]], params)))
    assert found[0] == found[1] != found[2] and found[0][0] != found[0][1]


# ------------------------------------------------------------------------------------------------------------- streams


def test_a_stream_yields_the_output_so_far_and_no_part_of_a_character_or_of_a_stop_string(llm, monkeypatch):
    ids = llm.tokenizer("go 😀 zq, zqxj never")["input_ids"]
    make_it_say(monkeypatch, llm, ids)
    outputs = list(llm.stream("ask", SamplingParams(max_tokens=len(ids), stop=["!", "zqxj"])))
    texts = [output.outputs[0].text for output in outputs]
    assert texts[-1] == "go 😀 zq, " and not any("\ufffd" in text for text in texts)
    assert all(texts[-1].startswith(text) for text in texts) and len({*texts}) > 5
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_a_stream_that_is_left_ends_its_request(llm: LLM):
    stream = llm.stream([1, 2], GREEDY)
    next(stream)
    stream.close()
    llm.generate([[3]], GREEDY, use_tqdm=False)
    check_idle(llm._engine)


def test_streams_and_calls_run_together_and_each_gets_its_own(llm: LLM):
    expected = token_ids(generate(llm, [[1], [2], [3, 4]]))
    streams = [llm.stream([number], GREEDY) for number in (1, 2)]
    last = [[], []]
    for outputs in zip(*streams, strict=True):
        last = [output.outputs[0].token_ids for output in outputs]
    assert last == expected[:2]


def test_a_stream_that_is_left_while_another_call_steps_ends_at_the_next_turn(llm: LLM):
    stream = llm.stream([1, 2], GREEDY)
    next(stream)
    with llm._lock:
        stream.close()
        assert llm._engine.requests
    generate(llm, [[3]])


def test_outputs_wait_for_a_reader_and_those_of_nobody_are_dropped(llm: LLM):
    expected = token_ids(generate(llm, [[1], [2]]))
    llm._engine.add(llm._engine.input_processor.process_one("nobody", [3], SamplingParams(max_tokens=2)))
    first, second = (llm.stream([number], GREEDY) for number in (1, 2))
    next(first)
    next(second)
    llm._engine.step()  # its outputs are there before anybody reads
    (*_, last) = second
    assert last.outputs[0].token_ids == expected[1]
    (*_, last) = first
    assert last.outputs[0].token_ids == expected[0]
    check_idle(llm._engine)


def test_a_call_whose_request_is_lost_ends_with_an_error(monkeypatch):
    with open_llm() as llm:
        stream = llm.stream([1], GREEDY)
        next(stream)
        llm._engine.abort("0")
        with pytest.raises(RuntimeError, match="has lost a request"):
            next(stream)


def test_deltas_join_to_the_whole_output(llm: LLM, monkeypatch):
    ids = llm.tokenizer("Größe 你好 end")["input_ids"]
    make_it_say(monkeypatch, llm, ids)
    engine = llm._engine
    params = SamplingParams(max_tokens=len(ids), n=2)
    engine.add(engine.input_processor.process_one("delta", "ask", params, output_kind=OutputKind.DELTA))
    whole = None
    while engine.has_unfinished:
        engine.step()
        while engine.outputs:
            output = engine.outputs.popleft()
            if whole is None:
                whole = output
            else:
                whole.extend(output)
    assert whole.finished and [completion.text for completion in whole.outputs] == ["Größe 你好 end"] * 2
    assert [completion.token_ids for completion in whole.outputs] == [ids] * 2


# --------------------------------------------------------------------------------------------------------------- texts


def test_a_tokenizer_that_fails_ends_its_request_and_keeps_the_tokens(llm, monkeypatch):
    def broken(*_: object, **__: object) -> str:
        raise OSError("no such vocabulary")

    monkeypatch.setattr(llm._engine.input_processor.tokenizer, "decode", broken)
    (output,) = generate(llm, [[1]])
    assert output.outputs[0].finish_reason == "error" and len(output.outputs[0].token_ids) == 12
    assert "no such vocabulary" in output.error
    (*_, streamed) = llm.stream([1], GREEDY)
    assert streamed.outputs[0].finish_reason == "error" and "no such vocabulary" in streamed.error
