"""`skip_tokenizer_init`: a folder without a tokenizer is prompted by token ids, offline and served."""

import pytest

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.errors import ModelLoadError
from tests.support.serving import serving
from tests.support.tiny_models import tiny_model, tiny_tokenizer

OPTIONS = {"enforce_eager": True, "max_model_len": 64, "num_kv_blocks": 20, "block_size": 16}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    tiny_model().save_pretrained(folder)
    return folder


def test_its_tokens_are_those_of_the_model_with_a_tokenizer(folder):
    answers = []
    for options in ({"skip_tokenizer_init": True}, {"tokenizer": tiny_tokenizer()}):
        with LLM(folder, **OPTIONS, **options) as llm:
            (output,) = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
            answers.append(output.outputs[0])
    assert answers[0].token_ids == answers[1].token_ids and len(answers[0].token_ids) == 6
    assert answers[0].text == "" and answers[1].text


def test_without_the_option_the_error_names_it(folder):
    with pytest.raises(ModelLoadError, match="skip_tokenizer_init=True"):
        LLM(folder, **OPTIONS)


def test_a_tokenizer_beside_it_is_refused(folder):
    with pytest.raises(ValueError, match="skip_tokenizer_init loads none"):
        LLM(folder, tokenizer=str(folder), skip_tokenizer_init=True, **OPTIONS)


def test_text_is_refused_by_name(folder):
    with LLM(folder, skip_tokenizer_init=True, **OPTIONS) as llm:
        with pytest.raises(ValueError, match="needs a tokenizer"):
            llm.generate("text", use_tqdm=False)
        with pytest.raises(ValueError, match="chat needs a tokenizer"):
            llm.chat([{"role": "user", "content": "x"}], use_tqdm=False)


def open_front(model, tokenizer, **options):
    """An engine without the tokenizer that servers of other tests have."""
    return AsyncLLM(model, skip_tokenizer_init=True, **options)


def test_it_is_served_by_token_ids(folder):
    with serving(model=folder, front_door=open_front, **OPTIONS) as running:
        body = {"max_tokens": 6, "temperature": 0}
        (choice,) = running.answer("/v1/completions", body, '{"prompt": [5, 6, 7], "return_token_ids": true}')[
            "choices"
        ]
        assert choice["text"] == "" and len(choice["token_ids"]) == 6
        for path, own in (
            ("/v1/completions", '{"prompt": "text"}'),
            ("/v1/completions", '{"prompt": [5], "stop": "x"}'),
            ("/v1/completions", '{"prompt": [5], "suffix": "x"}'),
            ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "x"}]}'),
        ):
            assert "tokenizer" in running.error(path, body, own)["message"]
        assert [running.get(path).status_code for path in ("/v1/models", "/api/tags")] == [200, 200]
        shown = running.answer("/api/show")
        assert shown["template"] == "" and "insert" not in shown["capabilities"]
