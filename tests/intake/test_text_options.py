"""Options on text and prompt: stop strings in the output, special tokens, truncation."""

from itertools import pairwise

import pytest

from nanovllm import LLM, SamplingParams
from tests.support.tiny_models import SPECIAL_TOKENS, VOCAB_SIZE, random_prompts, tiny_model, tiny_tokenizer

OPTIONS = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 65, "max_model_len": 128}


def open_llm(**options):
    return LLM(tiny_model(), **({"tokenizer": tiny_tokenizer()} | OPTIONS | options))


def say(llm, tokens, **params):
    """The completion of a request that is made to say these tokens, one after the other."""

    def next_of(token_ids, row):
        row[tokens[(len(token_ids) - 1) % len(tokens)]] += 1000.0
        return row

    params = {"temperature": 0.0, "max_tokens": len(tokens), "logits_processors": next_of} | params
    (output,) = llm.generate([[5]], SamplingParams(**params), use_tqdm=False)
    return output.outputs[0]


# --------------------------------------------------------------------------------------------------------- stop strings


def test_a_stop_string_is_shown_if_it_is_asked_for_and_what_follows_it_in_its_token_is_not():
    tokenizer = tiny_tokenizer()
    tokens = tokenizer("the lazy dog jumps")["input_ids"]
    with open_llm() as llm:
        hidden = say(llm, tokens, stop=["e l"])
        shown = say(llm, tokens, stop=["e l"], include_stop_str_in_output=True)
    assert (hidden.text, shown.text) == ("th", "the l")
    assert hidden.token_ids == shown.token_ids == tokens[: len(shown.token_ids)]
    assert tokenizer.decode(shown.token_ids) == "the laz"
    assert shown.stop_reason == "e l"


def test_the_first_stop_string_is_shown_whatever_their_order():
    tokens = tiny_tokenizer()("the lazy dog jumps")["input_ids"]
    with open_llm() as llm:
        for stop in (["dog", "y d"], ["y d", "dog"]):
            assert say(llm, tokens, stop=stop, include_stop_str_in_output=True).text == "the lazy d"


@pytest.mark.costly
@pytest.mark.parametrize("shows_stop", [False, True])
def test_a_stream_never_takes_back_what_it_showed(shows_stop):
    params = SamplingParams(seed=2, max_tokens=60, stop=["e t", "qzx"], include_stop_str_in_output=shows_stop)
    with open_llm() as llm:
        texts = [output.outputs[0].text for output in llm.stream([5, 6, 7], params)]
        (whole,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert texts[-1] == whole.outputs[0].text
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


def test_a_stream_that_shows_its_stop_string_holds_nothing_back():
    tokens = tiny_tokenizer()("abcdefgh")["input_ids"]
    with open_llm() as llm:

        def first_text(**options):
            bias = {tokens[0]: 100.0}
            stream = llm.stream([5], SamplingParams(temperature=0.0, max_tokens=2, logit_bias=bias, **options))
            return next(stream).outputs[0].text

        assert first_text(stop=["xxxxx"]) == ""
        assert first_text(stop=["xxxxx"], include_stop_str_in_output=True) == tiny_tokenizer().decode(tokens[:1])


# ------------------------------------------------------------------------------------------------------- special tokens


def test_special_tokens_are_shown_if_they_are_asked_for():
    tokenizer = tiny_tokenizer()
    special = tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS[3])
    tokens = [*tokenizer("a dog")["input_ids"], special, *tokenizer(" in")["input_ids"]]
    with open_llm() as llm:
        assert say(llm, tokens).text == tokenizer.decode(tokens, skip_special_tokens=True) == "a dog in"
        shown = say(llm, tokens, skip_special_tokens=False)
        assert shown.text == tokenizer.decode(tokens, skip_special_tokens=False) == "a dog<|end|> in"
        # A stop string may then be one of them.
        ended = say(llm, tokens, skip_special_tokens=False, stop=["<|end|>"])
        assert (ended.text, ended.stop_reason) == ("a dog", "<|end|>")
        unseen = say(llm, tokens, stop=["<|end|>"])
        assert (unseen.text, unseen.finish_reason) == ("a dog in", "length")


def test_a_stream_shows_special_tokens_as_the_whole_text_does():
    tokenizer = tiny_tokenizer()
    special = {tokenizer.convert_tokens_to_ids(token): 6.0 for token in SPECIAL_TOKENS}
    params = SamplingParams(seed=1, max_tokens=20, logit_bias=special, skip_special_tokens=False)
    with open_llm() as llm:
        texts = [output.outputs[0] for output in llm.stream([5, 6], params)]
    assert "<|" in texts[-1].text
    assert texts[-1].text == tokenizer.decode(texts[-1].token_ids)
    assert all(texts[-1].text.startswith(earlier.text) for earlier in texts)


def test_showing_special_tokens_without_a_tokenizer_is_refused():
    with open_llm(tokenizer=None) as llm, pytest.raises(ValueError, match="skip_special_tokens=False need a tokenizer"):
        llm.generate([[5]], SamplingParams(skip_special_tokens=False), use_tqdm=False)


# ----------------------------------------------------------------------------------------------------------- truncation


@pytest.mark.parametrize("kept", [1, 15, 16, 17, 59, 60, 61, 1000])
def test_the_last_tokens_of_a_prompt_are_kept(kept):
    prompt = random_prompts(1, low=60, high=60)[0]
    greedy = {"temperature": 0.0, "max_tokens": 5}
    with open_llm() as llm:
        (cut,) = llm.generate([prompt], SamplingParams(truncate_prompt_tokens=kept, **greedy), use_tqdm=False)
        (expected,) = llm.generate([prompt[-kept:]], SamplingParams(**greedy), use_tqdm=False)
    assert cut.prompt_token_ids == prompt[-kept:]
    assert cut.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_prompt_that_is_too_long_fits_once_it_is_truncated():
    prompt = random_prompts(1, low=300, high=300)[0]
    with open_llm() as llm:
        with pytest.raises(ValueError, match=r"the prompt has 300 tokens.*truncate_prompt_tokens"):
            llm.generate([prompt], use_tqdm=False)
        (output,) = llm.generate([prompt], SamplingParams(truncate_prompt_tokens=100, max_tokens=3), use_tqdm=False)
        assert output.prompt_token_ids == prompt[-100:]
        with pytest.raises(ValueError, match="the prompt has 128 tokens"):
            llm.generate([prompt], SamplingParams(truncate_prompt_tokens=128), use_tqdm=False)
        with pytest.raises(ValueError, match="the prompt is empty"):
            llm.generate([[]], SamplingParams(truncate_prompt_tokens=5), use_tqdm=False)
        with pytest.raises(ValueError, match=f"the prompt holds token id {VOCAB_SIZE}"):
            llm.generate([[5, 6, VOCAB_SIZE]], SamplingParams(truncate_prompt_tokens=2), use_tqdm=False)


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), ("3", TypeError)])
def test_what_is_no_length_is_refused(value, error):
    with pytest.raises(error, match=r"truncate_prompt_tokens (is|must be)"):
        SamplingParams(truncate_prompt_tokens=value)


@pytest.mark.costly
@pytest.mark.parametrize("name", ["include_stop_str_in_output", "skip_special_tokens"])
def test_what_is_no_truth_value_is_refused(name):
    with pytest.raises(TypeError, match=f"{name} must be True or False, not 1"):
        SamplingParams(**{name: 1})
