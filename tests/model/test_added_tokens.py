"""The added tokens of a tokenizer's file: as transformers finds them, or left to it."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanovllm.models.added_tokens import added_tokens_option
from tests.support.tiny_models import edit_json


@pytest.fixture
def folder(tmp_path):
    """A tokenizer with control tokens, some of them in its vocabulary, and one that is normalised."""
    inner = Tokenizer(models.BPE({"a": 0, "b": 1, "<s>": 2, "ab": 3}, [("a", "b")]))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<end>", lstrip=True, special=True)])
    inner.add_tokens([AddedToken("ü word", normalized=True, single_word=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="<end>")
    tokenizer.save_pretrained(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class="TokenizersBackend")
    return tmp_path


def test_a_tokenizer_is_the_same_with_the_option(folder):
    option = added_tokens_option(str(folder))
    assert [token["content"] for token in option["added_tokens_decoder"].values()] == ["<s>", "<end>", "ü word"]
    own, other = (AutoTokenizer.from_pretrained(folder, **given) for given in ({}, option))
    for name in ("added_tokens_decoder", "special_tokens_map", "init_kwargs"):
        assert getattr(own, name) == getattr(other, name), name
    assert own.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
    assert own("ab <end> ü word").input_ids == other("ab <end> ü word").input_ids


@pytest.mark.parametrize("tokens", [[], None, 3, [{"content": "<s>"}], ["<s>"]])
def test_other_entries_are_left_to_the_library(tokens, folder):
    edit_json(folder / "tokenizer.json", added_tokens=tokens)
    assert added_tokens_option(str(folder)) == ({"added_tokens_decoder": {}} if tokens == [] else {})


TEXTS = ['{"model": {"added_tokens": []}}', '{"text": "\\"added_tokens\\""}', '{"version": "1"}', '["added_tokens"', ""]


@pytest.mark.parametrize(
    "name, text",
    [*(("tokenizer.json", text) for text in TEXTS), ("special_tokens_map.json", "{}"), ("added_tokens.json", "{}")],
)
def test_a_key_within_something_else_and_tokens_in_other_files_too_are_left_to_the_library(name, text, folder):
    (folder / name).write_text(text)
    assert added_tokens_option(str(folder)) == {}


def test_a_file_whose_tokens_are_far_behind_is_left_to_the_library(folder, monkeypatch):
    monkeypatch.setattr("nanovllm.models.added_tokens._MOST_CHARACTERS", 100)
    assert added_tokens_option(str(folder)) == {}


@pytest.mark.parametrize(
    "values",
    [{"tokenizer_class": "LlamaTokenizer"}, {"added_tokens_decoder": {}}, {"auto_map": {"AutoTokenizer": "a"}}],
    ids=str,
)
def test_a_config_that_says_otherwise_is_left_to_the_library(values, folder):
    edit_json(folder / "tokenizer_config.json", **values)
    assert added_tokens_option(str(folder)) == {}


def test_a_hub_id_and_a_folder_without_files_have_no_option(tmp_path):
    assert added_tokens_option("owner/name") == added_tokens_option(str(tmp_path)) == {}
