"""Bad prompts and conversations: refused with the value, the limit and the remedy."""

import numpy as np
import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.errors import PromptTooLongError
from tests.support.refusals import GREEDY, OPTIONS, assert_names, llm_without_tokenizer, refused, shared_llm
from tests.support.tiny_models import VOCAB_SIZE, random_prompts, tiny_model, tiny_tokenizer

# -------------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("key", ["text", "multi_modal_data", "cache_salt"])
def test_a_dictionary_without_text_or_token_ids_is_refused_by_its_key(key):
    assert_names(refused(TypeError, {"prompt": "a", key: "b"}, GREEDY), repr(key), "prompt_token_ids")
    assert_names(refused(TypeError, ["good", {"prompt": None}], GREEDY), "prompt 1", "prompt_token_ids")


def test_a_list_of_numpys_integers_is_a_prompt():
    """It is what `list(array)` gives; it must not be taken for a list of prompts."""
    (output,) = shared_llm().generate(list(np.array([5, 6, 7])), GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == [5, 6, 7]


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**31, 2**80])
def test_a_token_id_outside_the_vocabulary_is_refused_with_the_limit(token_id):
    assert_names(refused(ValueError, [5, token_id], GREEDY), token_id, f"vocabulary of {VOCAB_SIZE}")


def test_the_last_token_id_of_the_vocabulary_is_served():
    (output,) = shared_llm().generate([VOCAB_SIZE - 1], GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8


@pytest.mark.parametrize("length", [128, 129, 5000])
def test_a_prompt_without_room_for_one_new_token_is_refused_with_numbers_and_remedy(length):
    assert_names(refused(ValueError, [5] * length, GREEDY), f"{length} tokens", "max_model_len (128)", "127", "raise")


def test_a_prompt_with_room_for_just_one_new_token_is_served():
    (output,) = shared_llm().generate([5] * 127, GREEDY, use_tqdm=False)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (1, "length")


def test_half_of_a_surrogate_pair_is_refused_with_its_place_its_code_and_a_remedy():
    half = "half a pair: \ud83d"
    named = "U+D83D, as character 13", "errors='replace'"
    assert_names(refused(ValueError, half, GREEDY), "the prompt holds", *named)
    assert_names(refused(ValueError, ["good", half], GREEDY), "prompt 1: the prompt holds", *named)
    for name in ("stop", "bad_words"):
        with pytest.raises(ValueError) as caught:
            SamplingParams(**{name: ["good", half]})
        assert_names(str(caught.value), f"{name} holds half", *named)


USER = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("conversation", "options", "name"),
    [
        ([*USER, {"role": "user", "content": "\udfff"}], {}, "messages[1].content holds"),
        ([{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}], {}, "messages[0].content[0].text holds"),
        ([USER[0] | {"\udfff": 1}], {}, "a key of messages[0] holds"),
        (USER, {"tools": [{"name": "\udfff"}]}, "tools[0].name holds"),
        (USER, {"tone": "\udfff"}, "template_options.tone holds"),
    ],
)
def test_half_of_a_surrogate_pair_in_a_conversation_is_refused(conversation, options, name):
    with pytest.raises(ValueError) as caught:
        shared_llm()._engine.input_processor.parts.chat.apply_to(conversation, **options)
    assert_names(str(caught.value), name, "U+DFFF, as character 0", "errors='replace'")


class Unreadable:
    """A tokenizer whose errors take more than a message."""

    def __init__(self, error):
        self.error = error

    def __call__(self, prompt, **_):
        if prompt == "bad":
            raise self.error
        return {"input_ids": [5]}

    def decode(self, token_ids, **_):
        return ""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), ValueError),
        (type("Odd", (TypeError,), {"__init__": lambda self, a, b: None})(1, 2), TypeError),
        (PromptTooLongError("long"), PromptTooLongError),
    ],
    ids=["unicode", "odd", "long"],
)
def test_an_error_of_one_prompt_keeps_its_kind_and_names_the_prompt(error, kind):
    with LLM(tiny_model(), tokenizer=Unreadable(error), **OPTIONS) as llm:
        with pytest.raises(kind, match=r"^prompt 1: ") as caught:
            llm.generate(["good", "bad"], GREEDY, use_tqdm=False)
        assert caught.type is kind and caught.value.__cause__ is error


WRONG_TYPES = (None, 3.5, {"prompt": 7}, b"bytes", bytearray(b"bytes"), object())
BAD = {
    "text": ("", "at least one token"),
    "list": ([], "at least one token"),
    "id": ([5, VOCAB_SIZE], "vocabulary"),
    "length": ([5] * 128, "raise"),
    **{type(prompt).__name__: (prompt, "list of token ids") for prompt in WRONG_TYPES},
    **{f"item {item!r}": ([5, item], f"whole numbers, not {item!r}") for item in (2.0, "a", None, True, [1])},
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_one_bad_request_among_good_ones_is_named_before_any_work_starts(name, place):
    bad, said = BAD[name]
    prompts = random_prompts(4)
    prompts.insert(place, bad)
    assert_names(refused((ValueError, TypeError), prompts, GREEDY), f"prompt {place}", said)


# ----------------------------------------------------------------------------------------------------------------- chat


@pytest.mark.parametrize("messages", [None, [{"content": "hello"}], [*USER, "b"], [USER, "b"]], ids=repr)
def test_messages_that_are_no_conversation_are_refused(messages):
    with pytest.raises(ValueError, match="conversation"):
        shared_llm().chat(messages, GREEDY, use_tqdm=False)


def test_chat_is_refused_without_a_chat_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    for llm in (LLM(tiny_model(), tokenizer=tokenizer, **OPTIONS), llm_without_tokenizer()):
        with pytest.raises(ValueError, match="chat template"):
            llm.chat(USER)


def test_prompts_without_an_id_each_are_refused_and_none_is_dropped():
    processor = shared_llm()._engine.input_processor
    with pytest.raises(ValueError, match="shorter"):
        processor.process([[5], [6]], request_ids=["a"])
