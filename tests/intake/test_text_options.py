"""Options on text and prompt: stop strings in the output, special tokens, truncation."""

from itertools import pairwise

import pytest

from nanovllm import SamplingParams
from tests.support.llms import generate, greedy, token_ids
from tests.support.refusals import llm_without_tokenizer, shared_llm
from tests.support.tiny_models import SPECIAL_TOKENS, VOCAB_SIZE, random_prompts, tiny_tokenizer


def say(tokens, **params):
    """The completion of a request that is made to say these tokens, one after the other."""

    def next_of(token_ids, row):
        row[tokens[(len(token_ids) - 1) % len(tokens)]] += 1000.0
        return row

    (output,) = generate(shared_llm(), [5], greedy(len(tokens), logits_processors=next_of, **params))
    return output.outputs[0]


# --------------------------------------------------------------------------------------------------------- stop strings


def test_a_stop_string_is_shown_if_it_is_asked_for_and_what_follows_it_in_its_token_is_not():
    tokenizer = tiny_tokenizer()
    tokens = tokenizer("the lazy dog jumps")["input_ids"]
    hidden = say(tokens, stop=["e l"])
    shown = say(tokens, stop=["e l"], include_stop_str_in_output=True)
    assert (hidden.text, shown.text) == ("th", "the l")
    assert hidden.token_ids == shown.token_ids == tokens[: len(shown.token_ids)]
    assert tokenizer.decode(shown.token_ids) == "the laz"
    assert shown.stop_reason == "e l"


@pytest.mark.costly
@pytest.mark.parametrize("shows_stop", [False, True])
def test_a_stream_never_takes_back_what_it_showed(shows_stop):
    params = SamplingParams(seed=2, max_tokens=60, stop=["e t", "qzx"], include_stop_str_in_output=shows_stop)
    texts = [output.outputs[0].text for output in shared_llm().stream([5, 6, 7], params)]
    (whole,) = generate(shared_llm(), [5, 6, 7], params)
    assert texts[-1] == whole.outputs[0].text
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


def test_a_stream_that_shows_its_stop_string_holds_nothing_back():
    token_id = tiny_tokenizer()("abcdefgh")["input_ids"][0]
    for shows, text in ((False, ""), (True, tiny_tokenizer().decode([token_id]))):
        params = greedy(2, logit_bias={token_id: 100.0}, stop=["xxxxx"], include_stop_str_in_output=shows)
        assert next(shared_llm().stream([5], params)).outputs[0].text == text


# ------------------------------------------------------------------------------------------------------- special tokens


def test_special_tokens_are_shown_if_they_are_asked_for():
    tokenizer = tiny_tokenizer()
    special = tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS[3])
    tokens = [*tokenizer("a dog")["input_ids"], special, *tokenizer(" in")["input_ids"]]
    assert say(tokens).text == "a dog in"
    assert say(tokens, skip_special_tokens=False).text == "a dog<|end|> in"
    # A stop string may then be one of them.
    ended = say(tokens, skip_special_tokens=False, stop=["<|end|>"])
    assert (ended.text, ended.stop_reason) == ("a dog", "<|end|>")
    unseen = say(tokens, stop=["<|end|>"])
    assert (unseen.text, unseen.finish_reason) == ("a dog in", "length")


def test_showing_special_tokens_without_a_tokenizer_is_refused():
    with pytest.raises(ValueError, match="skip_special_tokens=False need a tokenizer"):
        generate(llm_without_tokenizer(), [5], SamplingParams(skip_special_tokens=False))


# ----------------------------------------------------------------------------------------------------------- truncation


@pytest.mark.parametrize("kept", [1, 15, 16, 17, 59, 60, 61, 1000])
def test_the_last_tokens_of_a_prompt_are_kept(kept):
    prompt = random_prompts(1, low=60, high=60)[0]
    (cut,) = generate(shared_llm(), prompt, greedy(5, truncate_prompt_tokens=kept))
    assert cut.prompt_token_ids == prompt[-kept:]
    assert token_ids([cut]) == token_ids(generate(shared_llm(), prompt[-kept:], greedy(5)))


def test_a_prompt_that_is_too_long_fits_once_it_is_truncated():
    prompt = random_prompts(1, low=300, high=300)[0]
    (output,) = generate(shared_llm(), prompt, SamplingParams(truncate_prompt_tokens=100, max_tokens=3))
    assert output.prompt_token_ids == prompt[-100:]
    for given, kept, said in (
        (prompt, None, r"the prompt has 300 tokens.*truncate_prompt_tokens"),
        (prompt, 128, "the prompt has 128 tokens"),
        ([[]], 5, "the prompt is empty"),
        ([[5, 6, VOCAB_SIZE]], 2, f"the prompt holds token id {VOCAB_SIZE}"),
    ):
        with pytest.raises(ValueError, match=said):
            generate(shared_llm(), given, SamplingParams(truncate_prompt_tokens=kept))
